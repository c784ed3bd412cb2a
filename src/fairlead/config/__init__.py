"""The configuration of an operator, and how it becomes objects.

`schema.Config` is what `fairlead.compat.load` makes of a file; `building` makes a pipeline of it, whose plugins
`registry` finds."""
