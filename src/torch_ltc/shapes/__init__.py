"""Shape inference: sizes, strides, dtypes and aliasing of the results of a call, without running it."""
