"""What an operator may say, and how it becomes objects.

`load` reads one YAML file into a `schema.Config`, or raises with every problem it has; `registry` makes the policy
of it."""
