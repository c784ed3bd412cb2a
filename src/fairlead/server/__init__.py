"""What runs: wiring, reload, admin pages, metrics, journal, tracing, dashboard."""
