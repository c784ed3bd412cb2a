"""The configuration that an operator writes, and how it becomes objects.

`fairlead.compat.load` reads a file into a `schema.Config`. `building` builds a pipeline from that, and `registry` finds
its plugins."""
