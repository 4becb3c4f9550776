"""Functions whose calls are replayed: the program of a call that records the same again and again runs without its
Python code."""
