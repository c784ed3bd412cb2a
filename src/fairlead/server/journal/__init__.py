"""The journal on disk: its format and its files."""
