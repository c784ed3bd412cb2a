"""The built-in plugins. They depend on the contracts and data types of `core`."""
