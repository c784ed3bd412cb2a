"""Pickers: one endpoint out of the rated ones."""
