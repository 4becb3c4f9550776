"""Private interfaces behind `torch.compile`. A file of its own: it loads Dynamo, for a second."""

from torch._dynamo.backends.common import aot_autograd

__all__ = ["aot_autograd"]
