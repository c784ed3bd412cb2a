"""The built-in plugins, one file each. They know the contracts of `schedule`, the fleet and the nouns."""
