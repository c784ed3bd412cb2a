"""The I/O ring: asyncio lives here and only here. Turns bytes into events and instructions into bytes."""
