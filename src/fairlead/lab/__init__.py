"""The laboratory: engine, stub, simulator, workloads, load generator, demo. Only the commands import it."""
