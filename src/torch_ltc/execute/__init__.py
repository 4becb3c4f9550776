"""Execution: cut the pending program, queue it, run it on the executor, install its results, read them."""
