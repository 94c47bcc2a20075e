"""Host memory that costs nothing until it is written: anonymous pages, which the kernel commits at first touch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from flatbed.memory.capacity import round_up
from flatbed.memory.pool import Backing

# Memory is counted as committed, and given back, in steps of this many bytes.
CHUNK = 2 << 20


class HostBacking(Backing):
    """Addresses for the whole capacity; pages come with the first write and go back with `shrink`.

    Reserving is one system call whatever the size, and no page is resident before it is used. The mapping is made
    without swap reservation, so that a capacity of 90 % of the machine's memory is accepted.
    """

    stable = True

    def __init__(self, capacity_bytes: int) -> None:
        self.reserved = round_up(capacity_bytes, CHUNK)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, self.reserved, flags=flags)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.committed = 0

    @property
    def buffer(self) -> torch.Tensor:
        return self._bytes

    def grow(self, nbytes: int) -> bool:
        self.committed = max(self.committed, min(round_up(nbytes, CHUNK), self.reserved))
        return True

    def shrink(self, nbytes: int) -> None:
        keep = min(round_up(nbytes, CHUNK), self.reserved)
        if keep < self.committed:
            self._map.madvise(mmap.MADV_DONTNEED, keep, self.committed - keep)
            self.committed = keep

    def close(self) -> None:
        # The mapping itself goes when the last tensor over it does; its pages go now.
        self.shrink(0)


def free_bytes() -> int:
    """Bytes that this process could use now: what the kernel calls available, within the control group's limit."""
    amounts = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        amounts.append(int(fields["MemAvailable"].split()[0]) * 1024)
    else:
        amounts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        amounts.append(max(0, int(text) - int(used.read_text())))
    return min(amounts)
