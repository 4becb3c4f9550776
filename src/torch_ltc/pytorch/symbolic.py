"""Private interfaces for symbolic sizes. A file of its own: it loads sympy and parts of Dynamo, for a second."""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

__all__ = ["ConstantSource", "DimDynamic", "PythonPrinter", "ShapeEnv"]
