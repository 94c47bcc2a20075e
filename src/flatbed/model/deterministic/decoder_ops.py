"""The operations of a fused decoder on CUDA with a fixed order for each row: the same functions as cuda_ops.py.

Norms, rotary embedding and SiLU are those of cuda_ops.py, which launches them in the same way however many rows there
are (or is told to). Products are those of products.py.
"""

from __future__ import annotations

import functools

import torch

from flatbed.model import cuda_ops
from flatbed.model.cuda_ops import add_norm, rotary
from flatbed.model.deterministic.products import device_product
from flatbed.model.fusions import Linear


def product(x: torch.Tensor, one: Linear) -> torch.Tensor:
    """x [T, size] times a weight; [T, width]."""
    return device_product(x, one.weight.t(), one.bias)


def products(x: torch.Tensor, linears: tuple[Linear, Linear, Linear]) -> tuple[torch.Tensor, ...]:
    """x [T, size] times each of three weights; [T, width_i] each."""
    return tuple(product(x, one) for one in linears)


def gated(x: torch.Tensor, gate: Linear, up: Linear) -> torch.Tensor:
    """silu(x gate) * (x up): x [T, size] → [T, width]."""
    return cuda_ops.activated_product(product(x, gate), product(x, up))


# One token a program: the norm of a head is a sum, which threads could share otherwise among tiles of tokens.
attend = functools.partial(cuda_ops.attend, together=1)

__all__ = ["add_norm", "attend", "gated", "product", "products", "rotary"]
