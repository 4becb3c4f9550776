"""Attacks on what SECURITY.md says is checked."""
