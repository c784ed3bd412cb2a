"""Filters: which endpoints can, and which should, serve a request."""
