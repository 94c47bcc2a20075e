"""A plain tensor that doubles: for devices on which addresses cannot be reserved apart from memory."""

from __future__ import annotations

import torch

from flatbed.memory.pool import Backing


class GrowingBacking(Backing):
    """Holds at most twice what was ever asked for, and never more than the capacity. Growing copies and moves it."""

    stable = False

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self.reserved = capacity_bytes
        self._device = device
        self._bytes = torch.zeros(0, dtype=torch.uint8, device=device)
        self.committed = 0

    @property
    def buffer(self) -> torch.Tensor:
        return self._bytes

    def grow(self, nbytes: int) -> bool:
        have = self.committed
        if nbytes <= have:
            return True
        for size in dict.fromkeys((min(max(nbytes, 2 * have), self.reserved), nbytes)):
            try:
                larger = torch.zeros(size, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                continue
            larger[:have] = self._bytes
            self._bytes = larger
            self.committed = size
            return True
        return False

    def shrink(self, nbytes: int) -> None:
        if nbytes < self.committed:
            self._bytes = self._bytes[:nbytes].clone()
            self.committed = nbytes

    def close(self) -> None:
        self.shrink(0)
