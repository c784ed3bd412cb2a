"""Request and response bytes to and from the core, one dialect per module; the metrics pages of engines."""
