"""Differential fuzzing: random PyTorch programs on the device and on eager, which must not differ in anything."""
