"""The simulator: the unmodified pipeline against simulated model servers, an hour of traffic in seconds.

The entry point is `fairlead.lab.simulator.run.simulate`."""
