"""Host memory that costs nothing until it is written: anonymous pages, which the kernel commits at first touch."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import torch

from flatbed.memory.capacity import round_up
from flatbed.memory.pool import Backing

# Without it the kernel counts the whole reservation against what it may promise, and a later fork fails. Python's
# mmap has the name from 3.13 on; the value is Linux's.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

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
        self._map = mmap.mmap(-1, self.reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
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
        # The pages go now. The addresses go with the last tensor over them: torch keeps the mapping alive, but
        # closing it under a tensor that somebody still holds would leave that tensor without memory.
        self.shrink(0)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        del self._map


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
