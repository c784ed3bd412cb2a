"""The prefix index over HTTP: serving it, and asking one that runs elsewhere."""
