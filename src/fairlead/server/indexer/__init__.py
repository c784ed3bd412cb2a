"""The prefix index as a service of its own."""
