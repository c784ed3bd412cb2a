"""The configuration of an operator, and how it becomes objects.

`load` reads a YAML file into a `schema.Config`, or raises with all of its problems; `registry` finds the classes of its
plugins."""
