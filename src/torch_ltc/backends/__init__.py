"""The built-in backends, independent of each other."""
