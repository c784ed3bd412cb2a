"""Policies by name: the cost model, and the rules of others to compare it with."""
