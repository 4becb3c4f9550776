"""Tests of what shows the inside: sources, explanations, the ledger."""
