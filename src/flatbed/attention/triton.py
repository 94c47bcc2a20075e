"""The Triton backend: decode and ragged prefill read the pool in place, on one launch each.

The functions over tensors (`write_kv`, `decode_attention`, `prefill_attention`) know nothing of steps or batches, so
that a captured CUDA graph can call them with its own static buffers::

      eager step    begin: one copy  [tables │ lengths │ tiles of queries]
                    each layer:  write_kv   decode_attention (first rows)   prefill_attention (the rest)
      graph step    DecodePlan.update(lengths)   each layer:  write_kv   decode_attention

Both paths divide the K/V of a decode on the device, in `DecodePlan.update`: one small launch a step for each window
size, none of whose sizes follow the capacity.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.attention.base import AttentionBackend, AttentionSpec, Availability, Batch, LayerCache
from flatbed.memory.capacity import power_of_two
from flatbed.memory.transfer import upload_together

if TYPE_CHECKING:
    from types import ModuleType

_LOG2E = math.log2(math.e)
_ITEM_FIELDS = 8
_TILE_FIELDS = 4


def _kernels() -> ModuleType:
    """The kernels; imported at first use, because Triton is optional."""
    from flatbed.kernels import attention

    return attention


def _can_pdl(device: torch.device) -> bool:
    from flatbed.kernels.launch import can_pdl

    return can_pdl(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few programs, one after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeShape:
    """Launch constants of the decode kernel: `ways` softmaxes side by side, each reading `tokens` at a time.

    ways * tokens divides _PLAN_TILE, and tokens the block size.
    """

    ways: int
    tokens: int
    warps: int
    stages: int


@functools.cache
def _decode_shape(key_dim: int, value_dim: int, itemsize: int) -> DecodeShape:
    dim = power_of_two(max(key_dim, value_dim))
    if itemsize == 4:
        # Products are not on the tensor cores, where each warp would need all numbers in its own registers.
        return DecodeShape(1, 16, 4 if dim <= 128 else 8, 2)
    # Small programs: many of them on a multiprocessor hide each other's beginnings and ends. On an H200, with 4 warps
    # instead of 2, 1,024 x 96 tokens took 25.8 us instead of 19.2 (dim 64) and 137 instead of 104 (dim 128).
    return DecodeShape(2, 16, 2, 4 if dim <= 64 else 3 if dim <= 128 else 2)


@dataclass(frozen=True)
class PrefillShape:
    """Which prefill kernel runs, and its launch constants.

    Attributes:
        queries: of one sequence in a program; `prefill_tiles` divides chunks by it.
        tile: keys at a time.
        rows: (query, head) pairs of a program.
        warps, stages: of the portable kernel.
        short: whether the portable kernel masks all tiles in one loop.
        hopper: the kernel in kernels/hopper.py instead, with rows / 64 warp groups, `stages` buffers and `ahead`.
    """

    queries: int
    tile: int
    rows: int
    warps: int
    stages: int
    hopper: bool = False
    ahead: bool = False
    short: bool = False


# From so many tokens on, by head size, the Hopper kernel is faster than the portable one (its programs take longer to
# begin and end). H200, us a layer, Hopper against portable:
#   14/2 heads of 64    16 x 2,000 tokens 381 : 364     8 x 4,000 574 : 643
#   32/8 heads of 128   256 x 550 3,024 : 2,863         64 x 1,000 1,683 : 1,774     8 x 4,000 1,942 : 2,640
_HOPPER_LEAST = {64: 2560, 128: 1024}
# Up to so many tokens, small tiles in one loop are faster: 64 x 40 tokens 8.5 us against 10.5 (dim 64).
_SHORT_MOST = 64


def prefill_shape(spec: AttentionSpec, heads: int, cache: LayerCache, longest: int) -> PrefillShape:
    """The kernel for prefill chunks of sequences of at most `longest` tokens, and how it is launched."""
    _, kv_heads, block_size, key_dim = cache.key.shape
    value_dim, dtype = cache.value.shape[-1], cache.key.dtype
    plain = spec.window is None and spec.softcap is None and spec.sinks is None
    fits = key_dim == value_dim and key_dim in (64, 128) and 128 % min(block_size, 128) == 0 and block_size % 16 == 0
    fits = fits and (block_size <= 128 or block_size % 128 == 0) and dtype.itemsize == 2
    hopper = plain and fits and longest >= _HOPPER_LEAST[key_dim] and _hopper(cache.key.device)
    short = longest <= _SHORT_MOST
    return _prefill_shape(heads // kv_heads, key_dim, value_dim, dtype.itemsize, hopper, short)


@functools.cache
def _prefill_shape(group: int, key_dim: int, value_dim: int, itemsize: int, hopper: bool, short: bool) -> PrefillShape:
    dim = power_of_two(max(key_dim, value_dim))
    if hopper and group <= 64:
        if dim == 64:
            return PrefillShape(192 // group, 128, 192, 4, 2, hopper=True, ahead=True)
        return PrefillShape(128 // group, 128, 128, 4, 2, hopper=True)

    def portable(tile: int, rows: int, warps: int, stages: int) -> PrefillShape:
        rows = power_of_two(group, rows)
        return PrefillShape(rows // group, tile, rows, warps, stages, short=short)

    if itemsize == 4:  # not on the tensor cores: registers decide
        return portable(32 if dim <= 64 else 16, 32, 4 if dim <= 128 else 8, 2)
    if dim > 128:
        return portable(32, 64, 4, 2)
    if short or dim == 128:
        return portable(64, 64, 4, 2)
    return portable(64, 128, 8, 3)


@functools.cache
def _hopper(device: torch.device) -> bool:
    """Whether kernels/hopper.py runs here: compute capability 9, and a Triton whose Gluon it was written for."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return (3, 6) <= version <= (3, 9)


# Numbers of partial results that a warp holds at a time when it combines them.
_JOINED = 2048
# Plans divide K/V at multiples of so many tokens.
_PLAN_TILE = 128
# The fewest tiles that are worth a program of their own. With 4 instead of 1, one request of 2,000 tokens took 9.5 us
# instead of 7.0 (heads of 64) and 17.1 instead of 10.1 (128), 16 of 1,600 11.1 instead of 9.2.
_LEAST_TILES = 1
# Up to so many rows the kernel after decode attention may be launched while it runs; with more, its waiting programs
# are in the way: 256 x 900 took 40 us instead of 33.
_PDL_ROWS = 64


def decode_items(rows: int, columns: int, device: torch.device) -> int:
    """How many items a plan for `rows` sequences should have room for: enough that long contexts fill the GPU.

    `columns` is the programs of one item: K/V heads, times parts of the query heads of each. Where whole rows already
    give every multiprocessor two programs, dividing them serves only to even out their lengths.
    """
    multiprocessors = _multiprocessors(device)
    spread = multiprocessors if rows * columns >= 2 * multiprocessors else 2 * multiprocessors
    return rows + -(-spread // columns)


def _check_block_size(block_size: int) -> None:
    if block_size % 16:
        raise ValueError(f"the Triton kernels need a block_size that is a multiple of 16, got {block_size}")


# ---- write ----------------------------------------------------------------------------------------------------------


def write_kv(
    cache: LayerCache, key: torch.Tensor, value: torch.Tensor, slot_blocks: torch.Tensor, slot_offsets: torch.Tensor
) -> None:
    """Stores key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] in the pool; one launch.

    Args:
        cache: the layer's pool.
        key, value: any strides over tokens and heads; the last dimension contiguous. Converted to the pool's dtype.
        slot_blocks, slot_offsets: integers [T]: the block of each token and its place there. A token whose block is
            negative (padding) is not stored.
    """
    tokens, kv_heads, key_dim = key.shape
    if tokens == 0:
        return
    key, value = _last_contiguous(key), _last_contiguous(value)
    padded = power_of_two(max(key_dim, value.shape[-1]))
    rows = max(1, 2048 // padded)
    _kernels().write_kernel[(-(-tokens * kv_heads // rows),)](
        key,
        value,
        cache.key,
        cache.value,
        slot_blocks,
        slot_offsets,
        tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.key.stride(0),
        cache.value.stride(0),
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value.shape[-1],
        BLOCK_SIZE=cache.key.shape[2],
        ROWS=rows,
        PADDED=padded,
        num_warps=4,
    )


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- decode ---------------------------------------------------------------------------------------------------------


class DecodePlan:
    """How the K/V of a decode batch is divided among programs, and the memory in which partial results meet.

    The same in all layers that have the same window and the same heads. All tensors are made once: `update` and
    `decode_attention` may be captured in a CUDA graph, which then stays right for any lengths and tables. One plan
    serves one stream.

    Attributes:
        rows: sequences.
        max_items: programs per K/V head.
        items: int32 [max_items, 8]: row, first token, end, first token seen, the row's first item, the row's items,
            0, 0.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int | None = None,
        max_items: int | None = None,
        workspace: DecodeWorkspace | None = None,
        early: bool = False,
    ) -> None:
        """
        Args:
            rows: sequences of the batch (a graph's bucket); padding rows have length 0.
            dtype: of the pool and of the queries.
            max_items: see `decode_items`, the default.
            workspace: shared with other plans of the same stream; one of its own by default.
            early: whether the attention kernel may start before the kernel launched before it has ended, where the
                device can do so. Only if other kernels come between `update` and `decode_attention`: what `update`
                wrote is read without waiting.
        """
        self.rows = rows
        self.window = window
        self.early = early and _can_pdl(device)
        # The query heads of one K/V head fill the 16 lines of a tensor core's tile; more of them are divided evenly.
        self.parts = -(-heads // kv_heads // 16)
        self.lines = -(-heads // kv_heads // self.parts)
        columns = kv_heads * self.parts
        self.max_items = decode_items(rows, columns, device) if max_items is None else max_items
        if self.max_items <= rows:
            raise ValueError(f"max_items must be more than the {rows} rows, got {self.max_items}")
        self.least = _LEAST_TILES
        self.items = torch.zeros(self.max_items, _ITEM_FIELDS, dtype=torch.int32, device=device)
        self.workspace = DecodeWorkspace(device) if workspace is None else workspace
        self.workspace.reserve(rows * columns, self.max_items * columns * self.lines, value_dim)

    def update(self, lengths: torch.Tensor) -> None:
        """Divides anew for integers lengths [rows]: tokens in the pool, this step's included. One launch."""
        _kernels().plan_kernel[(self.rows + 1,)](
            lengths,
            self.items,
            self.rows,
            self.max_items,
            self.window or 0,
            self.least,
            TILE=_PLAN_TILE,
            ROWS=power_of_two(self.rows, 128),
            num_warps=4,
        )


class DecodeWorkspace:
    """Memory for partial results of `decode_attention`, as large as the largest plan that reserved room in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.stats = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, arrivals: int, lines: int, value_dim: int) -> None:
        """Grows, never shrinks. What a graph has captured must not grow any more: make the largest plan first."""
        if self.partials.numel() < lines * value_dim:
            self.partials = torch.empty(lines * value_dim, dtype=torch.float32, device=self.device)
        if self.stats.numel() < lines * 2:
            self.stats = torch.empty(lines * 2, dtype=torch.float32, device=self.device)
        if self.arrived.numel() < arrivals:
            self.arrived = torch.zeros(arrivals, dtype=torch.int32, device=self.device)


def decode_attention(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    tables: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence over the pool; one launch.

    Args:
        query: [rows, heads, key_dim], any strides over rows and heads.
        cache: the layer's pool, of the same dtype.
        spec: its window must be the plan's.
        tables: int32 [rows, width], the last dimension contiguous; block ids. Only entries of live tokens are read.
        plan: updated with this step's lengths. A row of length 0 gives 0 and reads nothing.
        out: [rows, heads, value_dim] to write to; made when None.
    """
    rows, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = cache.value.shape
    _check_block_size(block_size)
    query = _last_contiguous(query)
    if out is None:
        out = query.new_empty(rows, heads, value_dim)
    if rows == 0:
        return out
    if rows != plan.rows or (spec.window or 0) != (plan.window or 0):
        raise ValueError(f"the plan is for {plan.rows} rows and window {plan.window}, not for {rows} and {spec.window}")
    scale, softcap = _scales(spec)
    shape = _decode_shape(key_dim, value_dim, query.dtype.itemsize)
    value_pad, lines_pad = power_of_two(value_dim), power_of_two(plan.lines)
    _kernels().decode_kernel[(plan.max_items * kv_heads * plan.parts,)](
        query,
        cache.key,
        cache.value,
        out,
        tables,
        plan.items,
        plan.workspace.partials,
        plan.workspace.stats,
        plan.workspace.arrived,
        query if spec.sinks is None else spec.sinks,
        scale,
        softcap,
        plan.max_items,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        cache.key.stride(0),
        cache.value.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        SOFTCAP=spec.softcap is not None,
        SINKS=spec.sinks is not None,
        PARTS=plan.parts,
        LINES=plan.lines,
        KEY_PAD=power_of_two(key_dim),
        VALUE_PAD=value_pad,
        WAYS=shape.ways,
        TOKENS=shape.tokens,
        JOIN=max(1, _JOINED * shape.warps // (value_pad * lines_pad)),
        LINES_PAD=lines_pad,
        STAGES=shape.stages,
        num_warps=shape.warps,
        EARLY=plan.early,
        PDL=plan.early and rows <= _PDL_ROWS,
        **({"launch_pdl": True} if plan.early else {}),
    )
    return out


def _scales(spec: AttentionSpec) -> tuple[float, float]:
    """`scale` and `softcap` as the kernels take them."""
    if spec.softcap is None:
        return spec.scale * _LOG2E, 0.0
    return spec.scale / spec.softcap, spec.softcap


# ---- prefill --------------------------------------------------------------------------------------------------------


def prefill_tiles(
    query_starts: NDArray[np.int64], lengths: NDArray[np.int64], first_sequence: int, queries: int
) -> NDArray[np.int32]:
    """Divides the chunks of sequences first_sequence .. into tiles of at most `queries` queries.

    Returns int32 [n, 4]: sequence, the first query's token in the batch, its position, number of queries. The longest
    sequences come first, and of each the latest queries: programs start in this order, so the last to start are the
    shortest, and programs that run together read the same keys.
    """
    counts = np.diff(query_starts)[first_sequence:]
    order = np.argsort(-lengths[first_sequence:], kind="stable")
    tiles = -(-counts[order] // queries)
    sequence = np.repeat(order + first_sequence, tiles)
    # Within a sequence from its last tile down to 0.
    index = np.repeat(np.cumsum(tiles), tiles) - 1 - np.arange(len(sequence))
    begin = index * queries
    count = query_starts[sequence + 1] - query_starts[sequence]
    table = np.empty((len(sequence), _TILE_FIELDS), np.int32)
    table[:, 0] = sequence
    table[:, 1] = query_starts[sequence] + begin
    table[:, 2] = lengths[sequence] - count + begin
    table[:, 3] = np.minimum(count - begin, queries)
    return table


def prefill_attention(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    shape: PrefillShape,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of ragged chunks of queries, which may follow earlier context, over the pool; one launch.

    Args:
        query: [T, heads, key_dim], any strides over tokens and heads.
        cache: the layer's pool, of the same dtype.
        tables: int32 [sequences, width], the last dimension contiguous.
        tiles: int32 [n, 4] of `prefill_tiles`, on the device, made for `shape.queries`.
        shape: of `prefill_shape`, for the same spec and cache.
        out: [T, heads, value_dim]; the tokens of the tiles are written, all others stay.
    """
    if tiles.shape[0] == 0:
        return out
    query = _last_contiguous(query)
    (_prefill_hopper if shape.hopper else _prefill_portable)(query, cache, spec, tables, tiles, shape, out)
    return out


def _prefill_portable(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    shape: PrefillShape,
    out: torch.Tensor,
) -> None:
    _, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = cache.value.shape
    scale, softcap = _scales(spec)
    _kernels().prefill_kernel[(tiles.shape[0] * kv_heads,)](
        query,
        cache.key,
        cache.value,
        out,
        tables,
        tiles,
        query if spec.sinks is None else spec.sinks,
        scale,
        softcap,
        spec.window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        cache.key.stride(0),
        cache.value.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        SOFTCAP=spec.softcap is not None,
        SINKS=spec.sinks is not None,
        WINDOW=spec.window is not None,
        ROWS=shape.rows,
        KEY_PAD=power_of_two(key_dim),
        VALUE_PAD=power_of_two(value_dim),
        TILE=shape.tile,
        SHORT=shape.short,
        STAGES=shape.stages,
        num_warps=shape.warps,
    )


def _prefill_hopper(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    shape: PrefillShape,
    out: torch.Tensor,
) -> None:
    from flatbed.kernels import hopper

    _, kv_heads, block_size, dim = cache.key.shape
    box = min(block_size, shape.tile)
    hopper.prefill_hopper_kernel[(tiles.shape[0] * kv_heads,)](
        query,
        hopper.rows_of(cache.key, box),
        hopper.rows_of(cache.value, box),
        out,
        tables,
        tiles,
        spec.scale * _LOG2E,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        cache.key.stride(0) // dim,
        cache.value.stride(0) // dim,
        KV_HEADS=kv_heads,
        GROUP=query.shape[1] // kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        TILE=shape.tile,
        CONSUMERS=shape.rows // 64,
        BUFFERS=shape.stages,
        AHEAD=shape.ahead,
        num_warps=4,
    )


# ---- the backend ----------------------------------------------------------------------------------------------------


class TritonAttention(AttentionBackend):
    """Attention by Triton kernels on a CUDA device (and, in tests, under Triton's interpreter on the CPU)."""

    name: ClassVar[str] = "triton"
    needs_clean_blocks: ClassVar[bool] = False
    reads_pool: ClassVar[bool] = True

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        if device.type != "cuda":
            return Availability(False, f"needs a CUDA device, not {device.type}")
        if importlib.util.find_spec("triton") is None:
            return Availability(False, "the package triton is not installed")
        if not torch.cuda.is_available():
            return Availability(False, "no CUDA device is to be seen")
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return Availability(False, f"needs compute capability 8.0, and the device has {major}.{minor}")
        return Availability(True, "Triton and a CUDA device are there")

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._tables = torch.empty(0)
        self._lengths = torch.empty(0)
        self._longest = 0  # of the sequences that prefill
        self._plans: dict[tuple[Any, ...], DecodePlan] = {}
        self._workspace: DecodeWorkspace | None = None
        # Tile lists of this step by queries per tile; begin() uploads those that earlier steps asked for.
        self._tiles: dict[int, torch.Tensor] = {}
        self._wanted_tiles: set[int] = set()

    def begin(self, batch: Batch, block_size: int) -> None:
        _check_block_size(block_size)
        self._batch = batch
        self._longest = int(batch.lengths[batch.decodes :].max(initial=0))
        width = max(1, int(-(-batch.lengths.max(initial=0) // block_size)))
        parts: list[NDArray[Any]] = [batch.tables[:, :width], batch.lengths]
        parts += [self._make_tiles(queries) for queries in sorted(self._wanted_tiles)]
        tables, lengths, *tiles = upload_together(parts, batch.device)
        self._tables, self._lengths = tables, lengths
        self._tiles = dict(zip(sorted(self._wanted_tiles), tiles, strict=True))
        self._plans = {}

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        batch = self._current
        write_kv(cache, key, value, batch.slot_blocks, batch.slot_offsets)

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch = self._current
        tokens, heads, key_dim = query.shape
        _, kv_heads, _, value_dim = cache.value.shape
        out = query.new_empty(tokens, heads, value_dim)
        decodes = batch.decodes
        if decodes:
            plan = self._plan(heads, kv_heads, key_dim, value_dim, spec.window, query)
            decode_attention(query[:decodes], cache, spec, self._tables[:decodes], plan, out[:decodes])
        if decodes < len(batch.lengths):
            self._prefill(cache, spec, query, out)
        return out

    def _prefill(self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the step's chunks, into their tokens' part of `out` [T, heads, value_dim]."""
        shape = prefill_shape(spec, query.shape[1], cache, self._longest)
        if shape.queries not in self._tiles:
            self._wanted_tiles.add(shape.queries)
            (self._tiles[shape.queries],) = upload_together([self._make_tiles(shape.queries)], query.device)
        prefill_attention(query, cache, spec, self._tables, self._tiles[shape.queries], shape, out)

    @property
    def _current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("attention was called outside of a step")
        return self._batch

    def _make_tiles(self, queries: int) -> NDArray[np.int32]:
        batch = self._current
        return prefill_tiles(batch.query_starts, batch.lengths, batch.decodes, queries)

    def _plan(
        self, heads: int, kv_heads: int, key_dim: int, value_dim: int, window: int | None, query: torch.Tensor
    ) -> DecodePlan:
        """This step's plan for layers of one kind, made in the first of them."""
        kind = (heads, kv_heads, key_dim, value_dim, window, query.dtype)
        if kind not in self._plans:
            batch = self._current
            if self._workspace is None:
                self._workspace = DecodeWorkspace(query.device)
            plan = DecodePlan(
                batch.decodes,
                heads,
                kv_heads,
                key_dim,
                value_dim,
                query.dtype,
                query.device,
                window=window,
                workspace=self._workspace,
            )
            plan.update(self._lengths[: batch.decodes])
            self._plans[kind] = plan
        return self._plans[kind]
