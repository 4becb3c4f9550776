"""Run what was recorded, later: buffers, the pending program, sync, cache, executor, random numbers."""
