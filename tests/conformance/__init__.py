"""The conformance suite: in-box backends pass it, wrong ones do not."""
