"""The number of this process's device among those of the machine.

A process has one device. Its number is that of the GPU that it stands for; where programs run on the CPU, that of the
process among those that `torchrun` started here, so that a script for several GPUs runs there as it is.
"""

from __future__ import annotations

import torch

__all__ = ["ordinal"]


class _Ordinal:
    """The number, and how many there are. PyTorch's devices without the extension have the number 0, and no other."""

    __slots__ = ("count", "device", "index")

    def __init__(self) -> None:
        self.set(0, 1)

    def set(self, index: int, count: int) -> None:
        """Number the device anew."""
        self.index, self.count = index, count
        # By the slot: its name is not claimed yet when this module is imported. One object: who chose it can be told.
        self.device = torch.device("privateuseone", index)

    def is_own(self, index: int | None) -> bool:
        """True for a number that names this process's device; None and -1 name whichever there is."""
        return index is None or index in (-1, self.index)

    def refusal(self, device: object) -> str:
        """The text of the error for a device that this process does not have."""
        return f"there is no device {device} here: torch_ltc has one device, ltc:{self.index}, in each process"


ordinal = _Ordinal()
