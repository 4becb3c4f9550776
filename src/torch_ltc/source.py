"""A line of the user's code, as events, programs and recordings name it.

`record/call_site.py` finds it; here is only what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A line of user code; with `backward`, the one that called backward.

    `module` is the path of the `nn.Module` that ran there, as "Net.layers.0", empty outside of modules. `forward` is,
    for a call of a backward pass, the line of the forward call that it is the gradient of, where that is known.
    """

    file: str
    line: int
    function: str
    backward: bool = False
    module: str = ""
    forward: Source | None = None

    def __str__(self) -> str:
        if not self.file:
            return "an unknown line"
        text = f"{self.file}:{self.line} in {self.function}"
        return f"{text} (in its backward)" if self.backward else text

    def describe(self) -> str:
        """The line with the module that ran there and, for a call of a backward pass, the line of the forward call."""
        if self.forward is not None:
            return f"{self}, the gradient of {self.forward.describe()}"
        return f"{self} [{self.module}]" if self.module else str(self)


UNKNOWN = Source("", 0, "")
