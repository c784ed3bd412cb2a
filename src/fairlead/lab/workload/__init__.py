"""Workloads as data: the native record, importers of published traces, seeded generators. Pure: bytes in, bytes out."""
