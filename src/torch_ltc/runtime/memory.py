"""How much memory the live buffers hold: a running total, kept when buffers get their data and when they die."""

from __future__ import annotations

import threading
import weakref

import torch

from torch_ltc.runtime.buffer import Buffer


class MemoryCount:
    """Bytes held now and at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[weakref.ref[Buffer], int] = {}
        self.current_bytes = 0
        self.peak_bytes = 0

    def hold(self, buffer: Buffer) -> None:
        """Count this buffer, which has just got its data, until it dies."""
        data = buffer.data
        # The same as `size_bytes` in nearly all cases, for a tenth of the time.
        if isinstance(data, torch.Tensor) and buffer.spec.contiguous and not buffer.grown_bytes:
            size_bytes = data.nbytes
        else:
            size_bytes = buffer.size_bytes
        reference = weakref.ref(buffer, self._release)
        with self._lock:
            self._held[reference] = size_bytes
            self.current_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _release(self, reference: weakref.ref[Buffer]) -> None:
        # Called while a buffer is freed, possibly inside `hold`: a plain dict operation, no lock.
        self.current_bytes -= self._held.pop(reference, 0)

    def figures(self) -> dict[str, int]:
        """Current and peak bytes, under the names other devices use."""
        return {
            "allocated_bytes.all.current": self.current_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
            "reserved_bytes.all.current": self.current_bytes,
            "reserved_bytes.all.peak": self.peak_bytes,
            "allocation.all.current": len(self._held),
        }

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak_bytes = self.current_bytes


memory = MemoryCount()
