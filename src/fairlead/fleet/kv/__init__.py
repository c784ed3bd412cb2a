"""Exact prefix knowledge: what every endpoint's KV cache holds, learned from its KV events. Start at `index.py`."""
