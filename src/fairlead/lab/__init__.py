"""The laboratory: engine, stub, simulator, workloads, load generator, demo. Only `cli` and `doctor` import it."""
