"""How kernels are launched on this device."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


@functools.cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Launch arguments for a kernel that takes PDL: whether it is launched while the one before it still runs.

    Programmatic dependent launch needs compute capability 9.0 and a Triton that knows `launch_pdl`.
    """
    able = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 9
        and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
    )
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
