"""How kernels are launched on this device."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


@functools.cache
def can_pdl(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it still runs (programmatic dependent launch).

    That needs compute capability 9.0 and a Triton that knows `launch_pdl`.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 9
        and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
    )


def pdl(device: torch.device) -> dict[str, Any]:
    """Launch arguments for a kernel that takes PDL, on this device."""
    return {"PDL": True, "launch_pdl": True} if can_pdl(device) else {"PDL": False}
