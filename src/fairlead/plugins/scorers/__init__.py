"""Scorers: how good an endpoint would be for a request, from 0 to 1."""
