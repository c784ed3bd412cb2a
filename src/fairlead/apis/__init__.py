"""Request and response bytes to and from the core, one dialect a module; engines' metrics pages."""
