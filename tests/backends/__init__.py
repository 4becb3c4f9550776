"""Tests of each backend."""
