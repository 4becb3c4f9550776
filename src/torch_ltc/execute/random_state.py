"""The device's random generator: a physical generator whose state advances in program order.

Seeding takes effect where it stands in the program: work recorded before it draws from the old state.
"""

from __future__ import annotations

import torch

from torch_ltc.config import settings


class DeviceRandom:
    """Owner of the generator. Its state is read and written on the executor's thread only."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._seed: int | None = None

    @property
    def generator(self) -> torch.Generator:
        """The physical generator that programs draw from."""
        if self._generator is None:
            # Its own, also on CUDA: PyTorch seeds the default one at once, not where the seed stands in the program.
            self._generator = torch.Generator(device=settings.device_type)
            # The seed the user gave before the device was first used, so that the same seed gives the same numbers.
            self._generator.manual_seed(torch.initial_seed() if self._seed is None else self._seed)
        return self._generator

    def seed_before_use(self, seed: int) -> bool:
        """Remember `seed` if nothing was drawn yet; False when the generator exists and must be seeded in order."""
        if self._generator is not None:
            return False
        self._seed = seed
        return True


device_random = DeviceRandom()
