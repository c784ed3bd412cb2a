"""Schedulers in other processes: the contract and its client."""
