"""Which backing serves which device, and how much memory is free there."""

from __future__ import annotations

import torch

from flatbed.memory import host
from flatbed.memory.elastic import ElasticBacking, availability
from flatbed.memory.growing import GrowingBacking
from flatbed.memory.pool import Backing


def make_backing(capacity_bytes: int, device: torch.device) -> Backing:
    """Memory for a pool of `capacity_bytes` on `device`, committed as it is used."""
    if device.type == "cpu":
        return host.HostBacking(capacity_bytes)
    if device.type == "cuda" and availability(device)[0]:
        return ElasticBacking(capacity_bytes, device)
    return GrowingBacking(capacity_bytes, device)


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that could be used on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_bytes()
