"""The semantics of PyTorch that a backend must keep, as small cases: each runs on eager and on the device."""
