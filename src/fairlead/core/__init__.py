"""The scheduler, which is pure: no I/O; time and randomness are passed in. Start with `scheduler`."""
