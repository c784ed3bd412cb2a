"""Exact knowledge of the engines' KV caches: the index of blocks, and how engines hash them."""
