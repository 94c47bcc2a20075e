"""From the CPU to the device without waiting: through pinned memory, several arrays in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Triton's kernels are compiled for addresses that are multiples of so many bytes.
_ALIGNMENT = 16


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the CPU from which, or to which, copies of that device need not be waited for."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of `values` on the device. To CUDA it goes through pinned memory, and the CPU does not wait for it."""
    if device.type != "cuda":
        return torch.from_numpy(values).to(device)
    pinned = staging(values.shape, torch.from_numpy(values[:0]).dtype, device)
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True)


def upload_together(parts: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copies integer arrays to the device as int32 tensors of the same shapes, in one transfer."""
    numbers = _ALIGNMENT // 4
    starts = np.cumsum([0, *(-(-part.size // numbers) * numbers for part in parts)])
    staged = staging((int(starts[-1]),), torch.int32, device)
    flat = staged.numpy()
    for part, start in zip(parts, starts, strict=False):
        flat[start : start + part.size] = part.reshape(-1)
    on_device = staged.to(device, non_blocking=True)
    return [
        on_device[int(start) : int(start) + part.size].view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]
