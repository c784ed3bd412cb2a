"""Where a request runs: the Policy contract, and the filter → score → pick profile that keeps it."""
