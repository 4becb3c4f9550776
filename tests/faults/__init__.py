"""Fault injection: each call across an interface fails once, and everything else goes on."""
