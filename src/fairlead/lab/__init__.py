"""The laboratory: engine, stub, simulator, workloads, load generator, demo. Nothing else imports it."""
