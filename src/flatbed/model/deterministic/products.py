"""Matrix products in which a row of the result depends on that row alone.

A library chooses its code by the number of rows. On the CPU it is asked, for every shape of weight, with which numbers
of rows it gives the same bits for the same row, wherever the row stands; only those are used from then on, and rows are
divided and padded to them::

      rows    1   2   4   8   16   32   64   128   256        found for a weight of 576 x 1,536 (oneDNN, AVX-512)
      bits    a │ b   b   b    b    b    b     b     b        used: 2, 4, ... 256

      11 rows ─▶ ████████████▒▒▒▒▒   16 rows, 5 of them padding        300 rows ─▶ 256 + 44 in 64

The question is asked with numbers whose sum is zero but for rounding, so that another order of additions shows in every
digit (and in few digits too: bfloat16 would hide it in a sum of ordinary numbers).

On CUDA a kernel of ours has two sizes of tiles, for few rows and for many, which add up in the same order; whether the
device's matrix units see it the same way is asked once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from flatbed.model.fusions import Linear, linear, onednn_works

# Numbers of rows that a product on the CPU may be divided into.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Larger products than this (multiplications) are not tried; at these sizes nothing is gained by more rows.
_MOST_WORK = 1 << 31
# How many different results a question is decided by, and how many rows of a weight differ.
_RESULTS, _DIFFERENT = 2048, 61
# Batches of equal products that a question is asked with.
_BATCHES = (1, 2, 7, 40)


class Products:
    """Products on one device. Remembers, for the CPU, which numbers of rows may be used for which shape."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, tuple[int, ...]] = {}

    def rows(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] times weight [K, N] (any strides), plus bias [N]: [T, N], each row from its row of x alone."""
        if x.device.type == "cuda":
            return device_product(x, weight, bias)
        done = self._library_rows(x, weight)
        # Added by itself: a library may begin a sum with it, or end it, depending on the number of rows.
        return done if bias is None else done + bias

    def _library_rows(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        key = (*weight.shape, weight.stride(), weight.dtype, weight.data_ptr() % 64)
        sizes = self._agreeing(key, lambda: _sizes_of(weight))
        # Every piece begins where memory was allocated for it: what libraries do depends on alignment as well.
        if len(x) in sizes and x.is_contiguous() and x.data_ptr() % 64 == 0:
            return _library(x, weight)
        pieces = [_library(piece, weight)[:count] for piece, count in _padded(x, sizes)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x.new_empty(0, weight.shape[1])

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [B, M, K] times b [B, K, N]: [B, M, N], each row from its row of a and its matrix of b alone. CPU."""
        sizes = self.batched_sizes(a.shape[2], b.shape[2], a.dtype, b.stride(1) == 1)
        if a.shape[1] in sizes:
            return torch.bmm(a, b)
        pieces = [torch.bmm(piece, b)[:, :count] for piece, count in _padded(a, sizes, 1)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def batched_sizes(self, size: int, width: int, dtype: torch.dtype, transposed: bool) -> tuple[int, ...]:
        """The numbers of rows that `batched` uses for K = size and N = width, ascending; b with K contiguous is
        `transposed`."""
        key = ("batched", size, width, dtype, transposed)
        return self._agreeing(key, lambda: _batched_sizes(size, width, dtype, transposed))

    def _agreeing(self, key: Hashable, ask: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        key = (key, torch.get_num_threads())
        if key not in self._sizes:
            self._sizes[key] = ask()
        return self._sizes[key]


def _library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product by oneDNN where it has one (see fusions.py), else by the BLAS that torch was built with."""
    turned = weight.t()
    if weight.dtype == torch.float32 and turned.is_contiguous() and onednn_works():
        return linear(x, Linear(turned, None))
    return torch.mm(x, weight)


def _padded(x: torch.Tensor, sizes: tuple[int, ...], dim: int = 0) -> list[tuple[torch.Tensor, int]]:
    """x in pieces of `sizes` (ascending) along a dimension, each in memory of its own, and how much of each is x's."""
    pieces = []
    total, start = x.shape[dim], 0
    while start < total:
        rest = total - start
        size = next((size for size in sizes if size >= rest), sizes[-1])
        count = min(rest, size)
        shape = list(x.shape)
        shape[dim] = size
        piece = x.new_zeros(shape) if count < size else x.new_empty(shape)
        piece.narrow(dim, 0, count).copy_(x.narrow(dim, start, count))
        pieces.append((piece, count))
        start += count
    return pieces


# ---- which numbers of rows agree ------------------------------------------------------------------------------------


def zero_sums(rows: int, size: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] and weight rows [_DIFFERENT, size] whose products are zero but for rounding: the second half
    cancels the first, in another order."""
    draw = torch.Generator().manual_seed(seed)
    half = size // 2
    order = torch.randperm(half, generator=draw)

    def make(count: int, sign: int) -> torch.Tensor:
        first = torch.randn(count, half, generator=draw)
        return torch.cat([first, sign * first[:, order], torch.zeros(count, size - 2 * half)], 1).to(dtype)

    return make(rows, -1), make(_DIFFERENT, 1)


def _sizes_of(weight: torch.Tensor) -> tuple[int, ...]:
    """The numbers of rows with which the library's product with weights like this one [K, N] gives the same bits."""
    size, width = weight.shape
    x, columns = zero_sums(min(16, -(-_RESULTS // width)), size, weight.dtype, seed=size)
    like = _like(weight)
    like.copy_(columns[torch.arange(width) % _DIFFERENT].t())
    return _agreeing_sizes(lambda count: _same_everywhere(lambda rows: _library(rows, like), x, count), size * width)


def _batched_sizes(size: int, width: int, dtype: torch.dtype, transposed: bool) -> tuple[int, ...]:
    x, columns = zero_sums(4, size, dtype, seed=size)
    b = columns[torch.arange(width) % _DIFFERENT]

    def results(count: int) -> torch.Tensor | None:
        found = []
        for batch in _BATCHES:
            several = b.expand(batch, -1, -1).contiguous().transpose(1, 2)
            several = several if transposed else several.contiguous()

            def product(rows: torch.Tensor, several: torch.Tensor = several) -> torch.Tensor:
                every = torch.bmm(rows.expand(len(several), -1, -1).contiguous(), several)
                # Of all products of a batch, which are the same, one; NaN, which equals nothing, where they are not.
                return torch.where((every == every[:1]).all(0), every[0], torch.nan)

            found.append(_same_everywhere(product, x, count))
        first = found[0]
        agree = first is not None and all(one is not None and torch.equal(one, first) for one in found)
        return first if agree else None

    return _agreeing_sizes(results, size * width)


def _like(weight: torch.Tensor) -> torch.Tensor:
    """Memory of the same shape, strides and alignment."""
    room = 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
    flat = torch.empty(room + 64 // weight.itemsize, dtype=weight.dtype)
    shift = (weight.data_ptr() - flat.data_ptr()) % 64 // weight.itemsize
    return flat.as_strided(weight.shape, weight.stride(), shift)


def _same_everywhere(
    product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int
) -> torch.Tensor | None:
    """The products of x [R, K] among `count` rows: [R, N]; None where they depend on the place among those rows."""
    found: dict[int, torch.Tensor] = {}
    for start in range(0, len(x), count):
        at = (torch.arange(count) + start) % len(x)
        for i, row in zip(at.tolist(), product(x[at]), strict=True):
            if not torch.equal(found.setdefault(i, row), row):
                return None
    return torch.stack([found[i] for i in range(len(x))])


def _agreeing_sizes(results: Callable[[int], torch.Tensor | None], work: int) -> tuple[int, ...]:
    """The largest set of row numbers whose results are equal; of equally large ones, that of the larger numbers."""
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for size in _SIZES:
        if size > 16 and size * work > _MOST_WORK:
            break
        found = results(size)
        if found is None:
            continue
        for known, sizes in groups:
            if torch.equal(known, found):
                sizes.append(size)
                break
        else:
            groups.append((found, [size]))
    _, best = max(groups, key=lambda group: (len(group[1]), group[1]))
    return tuple(best)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiles:
    """Launch constants of the product kernel: rows, columns and depth of a tile, warps, pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# From so many rows on, products are divided into larger tiles.
MANY_ROWS = 129


def _tiles(width: int, dtype: torch.dtype, many: bool) -> _Tiles:
    if dtype.itemsize == 4:  # not on the tensor cores: registers decide
        return _Tiles(32, 32, 32, 4, 2)
    if many:
        return _Tiles(128, 128, 64, 8, 3)
    # Narrow products in narrow tiles: so that there are enough programs to keep memory busy.
    return _Tiles(64, 16 if width <= 2048 else 32 if width <= 8192 else 64, 64, 4, 4)


def device_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [K, N] plus bias [N], in x's dtype; one launch.

    Sums are float32 (float32 inputs are multiplied exactly), from the first number of a row to the last.
    """
    many = len(x) >= MANY_ROWS and large_tiles_agree(x.device, x.dtype)
    return _launch(x, weight, bias, _tiles(weight.shape[1], x.dtype, many))


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: _Tiles) -> torch.Tensor:
    from flatbed.kernels.deterministic import product_kernel
    from flatbed.kernels.launch import pdl

    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, size), width = x.shape, weight.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    grid = (-(-width // tiles.columns), -(-rows // tiles.rows))
    product_kernel[grid](
        x, weight, x if bias is None else bias, out, rows, size, width, x.stride(0), *weight.stride(),
        BIAS=bias is not None, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl(x.device),
    )  # fmt: skip
    return out


@functools.cache
def large_tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large tiles give the same bits as small ones here; the small ones serve for everything if not."""
    x, columns = zero_sums(MANY_ROWS, 1024, dtype, seed=0)
    x, weight = x.to(device), columns.to(device).t()
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    few = [_launch(x, weight, None, _tiles(width, dtype, False)) for width in (1024, 4096, 16384)]
    many = _launch(x, weight, None, _tiles(1024, dtype, True))
    return all(torch.equal(one.view(bits), many.view(bits)) for one in few)
