"""The indexer: the exact prefix index as a service of its own, its HTTP interface, and the client for it."""
