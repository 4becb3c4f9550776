"""The intermediate representation: instructions, programs, the prefix tree, specs, text, differences, verifier."""
