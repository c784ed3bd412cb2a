"""The journal's bytes: blocks with a checksum, records in them, arrays packed. Values ↔ bytes, no files."""
