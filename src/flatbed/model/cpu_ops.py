"""The operations of a fused decoder on the CPU, in float32: oneDNN's products with what follows them built in.

The same functions as cuda_ops.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flatbed.attention.base import AttentionSpec
from flatbed.model.fusions import Linear, linear
from flatbed.model.interface import Session


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (+ residual) [T, size] → (its RMSNorm times weight [size], the sum)."""
    summed = x if residual is None else x + residual
    return F.rms_norm(summed, (summed.shape[-1],), weight, eps), summed


def products(x: torch.Tensor, linears: tuple[Linear, Linear, Linear]) -> tuple[torch.Tensor, ...]:
    """x [T, size] times each of three weights; [T, width_i] each."""
    return tuple(linear(x, one) for one in linears)


def product(x: torch.Tensor, one: Linear) -> torch.Tensor:
    """x [T, size] times a weight; [T, width]."""
    return linear(x, one)


def gated(x: torch.Tensor, gate: Linear, up: Linear) -> torch.Tensor:
    """silu(x gate) * (x up): x [T, size] → [T, width]; two products and nothing between them."""
    gate_out = linear(x, gate, then="swish")
    return torch.ops.mkldnn._linear_pointwise.binary(x, gate_out, up.weight, up.bias, "mul")


def rotary(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, dim] as `attend` takes them: [T, 1, dim], the first half of sin negated.

    Then x * cos + roll(x, dim / 2) * sin is the rotation, in three operations instead of seven.
    """
    half = sin.shape[-1] // 2
    return cos[:, None], torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)[:, None]


def attend(
    session: Session,
    layer: int,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    gains: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Attention of query, key and value [T, heads * dim] that are not rotated yet; returns [T, heads * dim]."""
    tokens, dim = len(query), session.layers[layer].key.shape[-1]
    q, k, v = (x.view(tokens, -1, dim) for x in (query, key, value))
    if gains is not None:
        q, k = F.rms_norm(q, (dim,), gains[0], gains[2]), F.rms_norm(k, (dim,), gains[1], gains[2])
    cos, sin = angles
    q, k = (torch.addcmul(x * cos, x.roll(dim // 2, -1), sin) for x in (q, k))
    return session.attend(layer, spec, q, k, v).view(tokens, -1)
