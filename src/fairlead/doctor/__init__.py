"""`fairlead doctor`: examines a configuration and, if there is one, the installation that uses it.

    checks      all checks, those that find the most harmful problems first
    site        what checks examine: configuration, endpoints, pages; every page is fetched once
    run         defines checks and findings; runs all checks at the same time, each within its own time limit
    report      findings for people and for machines
    survey      a first look at model servers, for `fairlead init`

A check is a function of the site that returns findings. What it can find is declared as a `Kind` next to it: a code
for machines, a sentence, and what to do. No check changes anything in a pool. Checks whose requests make a model server
compute tokens run only on demand (`--probe`, `--gateway`)."""
