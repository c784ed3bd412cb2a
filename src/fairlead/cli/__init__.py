"""The commands, one small module each. `main` is the entry point; heavy imports stay inside the commands."""
