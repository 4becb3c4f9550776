"""What was recorded: instructions, the prefix tree of programs, inferred results. No device tensors here."""
