"""Codecs: bytes ↔ values. No sockets, no clock."""
