"""One check per file: what it can find, and how."""
