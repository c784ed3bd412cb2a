"""`fairlead doctor`: examines a configuration and, if there is one, the installation that runs by it.

    checks      all checks, in the order of their harm
    site        what checks look at: configuration, endpoints, pages; every page is fetched once
    run         all at once, each within its own time
    report      findings for people and for machines

A check is a function of the site that returns findings. What can be found is declared as a `Kind` beside it: a code
for machines, a sentence, and what to do. Nothing here changes anything on a pool; what sends a request that a model
server has to compute is asked for by name (`--probe`, `--gateway`)."""
