"""The simulator: the unmodified pipeline against simulated model servers, an hour of traffic in seconds.

`fairlead.sim.run.simulate` is the door."""
