"""Request and response bytes to and from the core, a module for each family of APIs; the metrics pages of engines."""
