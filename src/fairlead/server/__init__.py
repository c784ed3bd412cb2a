"""The running scheduler: wiring, reload, admin pages, metrics, journal, tracing, dashboard."""
