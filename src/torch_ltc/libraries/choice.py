"""Whether libraries that choose a device by themselves choose this one, and a line where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch_ltc.errors import LtcWarning

__all__ = ["always_in_libraries", "choice", "use_in_libraries"]


class _Choice:
    """The choice in force: "no", "asked" (unless the code says `cpu`), or "always", under `ltc run`."""

    def __init__(self) -> None:
        self.mode: Literal["no", "asked", "always"] = "no"
        self._told: set[str] = set()

    def takes(self, asked_for_cpu: bool) -> bool:
        """True when a library that would choose for itself is to take this device."""
        return self.mode == "always" or (self.mode == "asked" and not asked_for_cpu)

    def tell(self, library: str, device: object) -> None:
        """Say once that a library stays on another device."""
        if library not in self._told:
            self._told.add(library)
            warnings.warn(
                f"{library} runs on {device}: torch_ltc.use_in_libraries() before it makes it choose ltc",
                LtcWarning,
                stacklevel=4,
            )


choice = _Choice()


class use_in_libraries:
    """Have accelerate, transformers and Lightning choose the device `ltc` where they choose one by themselves; for the
    rest of the process, or for a block: `with use_in_libraries():`.

    Code that asks for the CPU, as `TrainingArguments(use_cpu=True)`, gets it. Under `ltc run` this is in force, and the
    CPU that a script asks for is the device.
    """

    def __init__(self) -> None:
        self._before = choice.mode
        if choice.mode == "no":
            choice.mode = "asked"

    def __enter__(self) -> None:
        """It is in force already."""

    def __exit__(self, *raised: object) -> None:
        choice.mode = self._before


@contextmanager
def always_in_libraries() -> Iterator[None]:
    """Inside, libraries take the device even where the code asks for the CPU."""
    before, choice.mode = choice.mode, "always"
    try:
        yield
    finally:
        choice.mode = before
