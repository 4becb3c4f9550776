"""The backends in the box. Strangers to each other."""
