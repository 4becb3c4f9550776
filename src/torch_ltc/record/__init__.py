"""Recording: calls of the dispatcher become steps down the prefix tree; buffers, operands, source lines."""
