"""The command line: one module for each command, put together in `main`. Only here is anything printed."""
