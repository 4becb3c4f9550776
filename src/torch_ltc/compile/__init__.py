"""Compilation: tier policy, specialization cache, compile jobs, the compiler process, the disk cache."""
