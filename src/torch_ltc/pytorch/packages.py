"""Private interfaces of AOTInductor. A file of its own: it loads Inductor, for seconds."""

from torch._inductor import aoti_compile_and_package

__all__ = ["aoti_compile_and_package"]
