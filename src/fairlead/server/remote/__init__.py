"""Schedulers in other processes: the messages of the contract, and the client."""
