"""The built-in plugins. They know the contracts of `core`, the fleet and the nouns, and not each other."""
