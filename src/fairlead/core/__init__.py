"""The scheduler, pure: no I/O, no clock, no chance of its own. Start with `scheduler`."""
