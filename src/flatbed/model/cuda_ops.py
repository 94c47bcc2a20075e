"""The operations of a fused decoder on CUDA: our kernels, and plain torch where a kernel does not pay.

Sizes were measured on an H200 (benchmarks/NOTES.md).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flatbed.attention.base import AttentionSpec
from flatbed.kernels import fused as kernels
from flatbed.kernels.launch import pdl
from flatbed.memory.capacity import power_of_two
from flatbed.memory.pool import LayerCache
from flatbed.model.fusions import Linear
from flatbed.model.interface import Session

# Up to this many rows a product is bound by reading its weights, and our kernels read them once in one launch; beyond,
# the vendor's matrix products are faster one by one.
FEW_ROWS = 128
# Products with a wide inner dimension keep the vendor's kernels busy earlier.
_WIDE, _FEW_ROWS_WIDE = 2048, 64
# Three small products in one launch gain longer: 256 x 896 with q, k, v of 896, 128, 128 took 13.4 us one by one.
_FEW_ROWS_TOGETHER, _ROWS_TOGETHER = 256, 64
# Programs that a product should have: two on each multiprocessor of an H200.
_PROGRAMS = 264
_HALF = (torch.bfloat16, torch.float16)


def few_rows(x: torch.Tensor) -> bool:
    """Whether our products are the faster ones for x [rows, size]."""
    rows, size = x.shape
    return x.dtype in _HALF and rows <= (FEW_ROWS if size <= _WIDE else _FEW_ROWS_WIDE)


class Norm(IntEnum):
    """How a weight comes into an RMSNorm; see kernels/fused.py."""

    ROUNDED_FIRST = kernels.ROUNDED_FIRST.value
    ROUNDED_LAST = kernels.ROUNDED_LAST.value
    ADDED_TO_ONE = kernels.ADDED_TO_ONE.value


class Activation(IntEnum):
    """What a gate goes through: x sigmoid(x), or x times the normal distribution's function, approximated by tanh or
    not."""

    SILU = kernels.SILU.value
    GELU_TANH = kernels.GELU_TANH.value
    GELU = kernels.GELU.value


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: Norm = Norm.ROUNDED_FIRST,
    *,
    dtype: torch.dtype | None = None,
    product: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (+ residual [T, size]) → (its RMSNorm times weight [size], the sum).

    Args:
        x: [T, size], or float32 [parts, T, size] whose parts are added up first (see `product`).
        dtype: of the result; by default the weight's. The sum has the residual's, or that of x.
        product: what parts are of; by default the weight's dtype.
    """
    rows, size = x.shape[-2:]
    parts = x.shape[0] if x.dim() == 3 else 0
    product = weight.dtype if product is None else product
    out = torch.empty(rows, size, dtype=weight.dtype if dtype is None else dtype, device=x.device)
    if residual is not None:
        summed = torch.empty_like(residual)
    else:
        summed = torch.empty(rows, size, dtype=product, device=x.device) if parts else x
    block = power_of_two(size)
    kernels.add_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, out, summed, size, x.stride(0), eps,
        PARTS=parts, HAS_RESIDUAL=residual is not None, KIND=int(kind), PRODUCT=kernels.TYPES[product], BLOCK=block,
        num_warps=min(8, max(2, block // 256)), **pdl(x.device),
    )  # fmt: skip
    return out, summed


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x [T, size] times a weight, for `add_norm`: [T, width], or for few rows float32 [parts, T, width] to add up."""
    rows, size = x.shape
    if linear.bias is not None or not few_rows(x):
        return F.linear(x, linear.weight, linear.bias)
    width = linear.weight.shape[0]
    tile, depth = 32, 128
    tiles = -(-width // tile)
    parts = max(1, min(8, round(_PROGRAMS / tiles), size // depth))
    share = -(-size // (parts * depth)) * depth
    parts = -(-size // share)
    out = torch.empty(parts, rows, width, dtype=torch.float32, device=x.device)
    kernels.partial_product_kernel[(tiles, parts)](
        x, linear.weight, out, rows, size, width, share,
        ROWS=power_of_two(rows, 16), TILE=tile, DEPTH=depth, num_warps=4, num_stages=4,
        **pdl(x.device),
    )  # fmt: skip
    return out


class Angles(NamedTuple):
    """Cosines and sines of the rotary embedding.

    Attributes:
        cos, sin: [T, dim] of the step's tokens, both halves alike; or [positions, dim] of all positions.
        positions: int64 [T], where cos and sin are of all positions.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None


def rotate_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: Angles,
    cache: LayerCache,
    slot_blocks: torch.Tensor,
    slot_offsets: torch.Tensor,
    gains: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    together: int | None = None,
) -> torch.Tensor:
    """Rotates query [T, heads * dim] and key [T, kv_heads * dim], stores key and value in the pool.

    Args:
        query, key, value: rows of one head after the other; any stride over tokens.
        gains: weights [dim] of the RMSNorm of each head of q and k, and its epsilon, where there is one.
        together: tokens of a program; by default what is fastest for so many.

    Returns the rotated query [T, heads, dim]. A token whose slot block is negative is not stored.
    """
    tokens = query.shape[0]
    _, kv_heads, block_size, dim = cache.key.shape
    heads = query.shape[1] // dim
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    cos, sin, positions = angles
    query_gain, key_gain, eps = gains if gains is not None else (cos, cos, 0.0)
    # More programs than the GPU runs at once only begin and end: 8,192 tokens of 18 heads of 64 took 120 us one by one.
    if together is None:
        together = 1 if tokens <= 64 else 4 if tokens <= 512 else 32
    kernels.rotate_write_kernel[(-(-tokens // together), heads + 2 * kv_heads)](
        query, key, value, cos, sin, slot_blocks if positions is None else positions, query_gain, key_gain, out,
        cache.key, cache.value, slot_blocks, slot_offsets, tokens,
        query.stride(0), key.stride(0), value.stride(0), cos.stride(0), out.stride(0),
        cache.key.stride(0), cache.value.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF_PAD=power_of_two(dim // 2), BLOCK_SIZE=block_size,
        TOKENS=together, TABLE=positions is not None, NORM=gains is not None, num_warps=4 if together > 4 else 1,
        **pdl(query.device),
    )  # fmt: skip
    return out


def rotary(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None = None) -> Angles:
    """cos and sin [T, dim] of a step's positions, or [positions, dim] of all, as `attend` takes them."""
    return Angles(cos, sin, positions)


def attend(
    session: Session,
    layer: int,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: Angles,
    gains: tuple[torch.Tensor, torch.Tensor, float] | None,
    together: int | None = None,
) -> torch.Tensor:
    """Attention of query, key and value [T, heads * dim] that are not rotated yet; returns [T, heads * dim]."""
    cache = session.layers[layer]
    slots = session.slot_blocks, session.slot_offsets
    rotated = rotate_write(query, key, value, angles, cache, *slots, gains, together)
    heads = (len(key), cache.key.shape[1], -1)
    # The backend reads K and V from the pool; what it is given beside is not looked at.
    mixed = session.running_backend.attend(cache, spec, rotated, key.view(heads), value.view(heads))
    return mixed.view(len(mixed), -1)


def products(x: torch.Tensor, linears: tuple[Linear, Linear, Linear]) -> tuple[torch.Tensor, ...]:
    """x [T, size] times each of three weights; [T, width_i] each (for few rows: parts of one tensor)."""
    rows, size = x.shape
    few = few_rows(x)
    if not few and not (x.dtype in _HALF and size <= _WIDE and rows <= _FEW_ROWS_TOGETHER):
        return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)
    widths = [linear.weight.shape[0] for linear in linears]
    out = torch.empty(rows, sum(widths), dtype=x.dtype, device=x.device)
    together = power_of_two(rows, 16) if few else _ROWS_TOGETHER
    tile = 16 if few and size <= _WIDE else 32
    tiles = [-(-width // tile) for width in widths]
    bias = all(linear.bias is not None for linear in linears)
    kernels.products_kernel[(sum(tiles), -(-rows // together))](
        x, *(linear.weight for linear in linears), *(linear.bias if bias else x for linear in linears), out,
        rows, size, *widths, tiles[0], tiles[1],
        BIAS=bias, ROWS=together, TILE=tile, DEPTH=128, num_warps=4, num_stages=4,
        **pdl(x.device),
    )  # fmt: skip
    return out.split(widths, dim=1)


def _gated_shape(rows: int, size: int) -> tuple[int, int, int, int]:
    """Weight rows and depth of a tile, pipeline stages, warps: the fastest of a sweep on an H200."""
    if rows <= 16:
        return 32, 128, 4, 4
    if size > _WIDE:
        return 32, 64, 4, 4
    return (64, 64, 5, 4) if rows <= 64 else (64, 64, 4, 8)


def gated(x: torch.Tensor, gate: Linear, up: Linear, activation: Activation = Activation.SILU) -> torch.Tensor:
    """activation(x gate) * (x up): x [T, size] → [T, width]. Neither product has a bias."""
    rows, size = x.shape
    width = gate.weight.shape[0]
    if few_rows(x):
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        tile, depth, stages, warps = _gated_shape(rows, size)
        kernels.gated_kernel[(-(-width // tile),)](
            x, gate.weight, up.weight, out, rows, size, width,
            ACTIVATION=int(activation), ROWS=power_of_two(rows, 16), TILE=tile, DEPTH=depth, num_warps=warps,
            num_stages=stages, **pdl(x.device),
        )  # fmt: skip
        return out
    return activated_product(F.linear(x, gate.weight), F.linear(x, up.weight), activation)


def activated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """activation(gate) * up, both contiguous and of the same shape."""
    out = torch.empty_like(gate)
    block = 1024
    kernels.activated_product_kernel[(-(-out.numel() // block),)](
        gate, up, out, out.numel(), ACTIVATION=int(activation), BLOCK=block, num_warps=4, **pdl(gate.device)
    )
    return out
