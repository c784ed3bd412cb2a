"""The decision journal: its format and its files."""
