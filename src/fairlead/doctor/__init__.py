"""`fairlead doctor`: examines a configuration and, if there is one, the installation that uses it.

    checks      all checks, in the order of the harm that they find
    site        what checks examine: configuration, endpoints, pages; every page is fetched once
    run         what checks and findings are; runs all checks at the same time, each within its own time limit
    report      findings for people and for machines
    survey      a first look at model servers, for `fairlead init`

A check is a function of the site that returns findings. What it can find is declared as a `Kind` next to it: a code
for machines, a sentence, and what to do. Nothing here changes anything in a pool. Checks that send requests which a
model server has to compute run only on demand (`--probe`, `--gateway`)."""
