"""How much memory each engine takes for K/V, and what it can hold: the arithmetic, from a config alone.

Each engine counts capacity in a unit of its own, here always called a block:

============  ======================================================================================================
Flatbed       `block_size` tokens in every layer: `memory.capacity.KVLayout`, the very object that the engine uses
Transformers  `num_blocks`: `page_size` tokens in every layer; really taken in sectors (see `TransformersArithmetic`)
vLLM          `num_gpu_blocks`: `block_size` tokens in the layers of one group (see `VllmArithmetic`)
============  ======================================================================================================

Demand is a `Counter` of lengths: {tokens that a sample has at its end: how many such samples}.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flatbed.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from flatbed.lab.plan_layers import CHUNKED, FULL, MLA, SLIDING, AttentionLayer, ModelLayers
from flatbed.lab.units import told_bytes
from flatbed.memory.capacity import KVLayout, LayerShape, blocks_for, round_up

Lengths = Mapping[int, int]

_FLOAT32 = _INT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class TypeBytes:
    """What one attention type takes in one engine.

    Attributes:
        kind: see `plan_layers`.
        layers: how many there are.
        token_bytes: of one token, over these layers.
        block_tokens: tokens in one of the engine's blocks, in these layers.
        block_bytes: of such a block, over these layers.
        most_tokens: tokens of one request that are kept at the most; None keeps all.
    """

    kind: str
    layers: int
    token_bytes: int
    block_tokens: int
    block_bytes: int
    most_tokens: int | None


class Arithmetic(ABC):
    """The arithmetic of one engine for one model.

    Attributes:
        name: of the engine.
        block_tokens: tokens that one block holds in a model with one attention type.
        block_bytes: memory of one block.
        itemsize: bytes of a number in the cache.
        refusal: why the engine cannot run this model; None when nothing that is known here is against it.
    """

    name: ClassVar[str]
    block_tokens: int
    block_bytes: int
    itemsize: int
    refusal: str | None = None

    def __init__(self, model: ModelLayers, itemsize: int) -> None:
        self.model = model
        self.itemsize = itemsize

    @abstractmethod
    def types(self) -> list[TypeBytes]:
        """What each attention type takes."""

    @abstractmethod
    def needed(self, lengths: Lengths) -> int:
        """Blocks that hold all these samples at once, each at its end, nothing shared."""

    @abstractmethod
    def allocated(self, blocks: int) -> int:
        """Bytes of the pool with that many blocks."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V over all layers, before any window is full."""
        return sum(kind.token_bytes for kind in self.types())

    def buffers(self, blocks: int) -> int:
        """Bytes of buffers that the engine sets aside besides a pool of that many blocks, as far as they are known."""
        return 0

    def wanted(self, needed: int) -> int | None:
        """The blocks to set where `needed` are needed at once; None is all that fit."""
        return needed

    def taken(self, blocks: int, needed: int) -> int:
        """Bytes that a pool of `blocks` takes when no more than `needed` are ever of use."""
        return self.allocated(blocks)

    def tokens(self, blocks: int) -> int:
        """Tokens that so many blocks hold, as if every layer kept all of them."""
        return blocks * self.block_tokens

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens, as if every layer kept all of them."""
        return blocks_for(tokens, self.block_tokens)

    @abstractmethod
    def when_longer(self, possible: int) -> str:
        """What becomes of a request of more than `possible` tokens, in words."""

    @abstractmethod
    def remarks(self, blocks: int, needed: int) -> list[str]:
        """What else has to be known of such a pool, a sentence each."""

    def most_blocks(self, memory: int) -> int:
        """The most blocks whose pool and buffers fit into `memory` bytes; 0 when not even one does."""
        return _largest(lambda blocks: self.allocated(blocks) + self.buffers(blocks) <= memory, memory)

    def at_once(self, blocks: int, length: int) -> int:
        """How many samples of `length` tokens such a pool holds at once."""
        return _largest(lambda count: self.needed({length: count}) <= blocks, blocks * self.block_tokens)

    def longest(self, blocks: int) -> int:
        """The most tokens that one request can have, prompt and completion together, as far as the pool goes."""
        limit = self.model.max_positions or blocks * self.block_tokens * len(self.model.layers)
        return _largest(lambda length: self.needed({length: 1}) <= blocks, limit)


def _by_kind(layers: tuple[AttentionLayer, ...]) -> dict[tuple[str, int | None], list[AttentionLayer]]:
    kinds: dict[tuple[str, int | None], list[AttentionLayer]] = defaultdict(list)
    for layer in layers:
        kinds[layer.kind, layer.window].append(layer)
    return kinds


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` that `fits`, which holds up to some count and for none above; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ------------------------------------------------------------------------------------------------------------- Flatbed


class FlatbedArithmetic(Arithmetic):
    """Every layer keeps K/V of the whole sequence, keys and values as attention is given them: a sliding window is
    not cut off, and MLA is expanded."""

    name = "flatbed"

    def __init__(self, model: ModelLayers, itemsize: int, *, block_size: int = EngineConfig.block_size) -> None:
        super().__init__(model, itemsize)
        shapes = (LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in model.layers)
        self.layout = KVLayout(tuple(shapes), block_size, itemsize)
        self.block_tokens = block_size
        self.block_bytes = self.layout.block_bytes

    def types(self) -> list[TypeBytes]:
        rows = []
        for (kind, _), layers in _by_kind(self.model.layers).items():
            token = self.itemsize * sum(layer.numbers for layer in layers)
            rows.append(TypeBytes(kind, len(layers), token, self.block_tokens, token * self.block_tokens, None))
        return rows

    def needed(self, lengths: Lengths) -> int:
        # The last token of a completion is never attended to.
        return sum(count * self.layout.blocks_for(max(1, length - 1)) for length, count in lengths.items())

    def allocated(self, blocks: int) -> int:
        return blocks * self.block_bytes

    def wanted(self, needed: int) -> int | None:
        return None  # a ceiling costs nothing

    def taken(self, blocks: int, needed: int) -> int:
        return self.allocated(min(blocks, needed))

    def when_longer(self, possible: int) -> str:
        return "a longer one gets an error of its own, its neighbours go on"

    def remarks(self, blocks: int, needed: int) -> list[str]:
        return [
            "capacity is a ceiling that costs neither time nor memory: memory is taken as tokens come, at most "
            f"{told_bytes(self.taken(blocks, needed))} for this workload"
        ]


# -------------------------------------------------------------------------------------------------------- Transformers


class TransformersArithmetic(Arithmetic):
    """Transformers' paged cache, 5.20 to 5.25: `generation/continuous_batching/cache.py`, `PagedAttentionCache`.

    A page is `page_size` tokens of one layer; all layers of one attention type have their pages side by side (the
    allocator's block). Memory is handed to the types in sectors, which hold a whole number of blocks of each::

        sector = lcm(pages of the full layers, pages of the sliding layers, 128 bytes)
        tensor = (sectors + 2) * sector             the first two are read and written by padding

    `num_blocks` of the config counts blocks of all layers together and is rounded up to whole sectors. A sliding layer
    keeps `window` tokens of a request, rounded up to pages. Everything is sized by the config's num_key_value_heads
    and head_dim alone: layers that share K/V get room that nothing writes to. MLA keeps its latent vector and the
    rotated part of the key from 5.25 on, and expands them to heads in each step; before, such a model could not be run,
    which was seen in the first forward pass.

    Args:
        page_size: tokens in a page.
        token_budget: `max_batch_tokens`.
        flash: attention that reads K/V by itself; SDPA and eager need a mask over the whole pool.
        asynchronous: two sets of buffers (the default on CUDA with flash attention).
        max_blocks_per_request: width of the block tables of the fast decode path; 0 where there is none.
        max_requests: `max_requests_per_batch`.
        logits_to_keep: the model computes logits only where they are asked for (nearly all do).
        logprobs: `return_logprobs`.
        version: of Transformers; None is the newest that is known here.
    """

    name = "transformers"
    LATENT_CACHE = (5, 25)  # keeps what MLA needs since then
    ALIGNMENT = 128
    TRASH_SECTORS = 2
    PAGE_SIZE = 256
    MAX_BATCH_TOKENS = 8192
    MAX_REQUESTS = 1024
    MAX_BLOCKS_PER_REQUEST = 32
    FIFO_MARGIN = 0.15  # FIFOScheduler's safety_margin
    MEMORY_PERCENT = 0.9  # max_memory_percent, without logits processors
    _STATIC_ROWS = 7  # of ContinuousBatchingIOs._bulk_input_tensor

    def __init__(
        self,
        model: ModelLayers,
        itemsize: int,
        *,
        page_size: int = PAGE_SIZE,
        token_budget: int | None = None,
        flash: bool = True,
        asynchronous: bool | None = None,
        max_blocks_per_request: int | None = None,
        max_requests: int = MAX_REQUESTS,
        logits_to_keep: bool = True,
        logprobs: bool = False,
        version: str | None = None,
    ) -> None:
        super().__init__(model, itemsize)
        old = version is not None and tuple(map(int, version.split(".")[:2])) < self.LATENT_CACHE
        self.refusal = _transformers_refusal(model, latent_cache=not old)
        self.block_tokens = page_size
        self.token_budget = self.MAX_BATCH_TOKENS if token_budget is None else token_budget
        self.max_requests = max_requests
        self.flash = flash
        self.logits_to_keep = logits_to_keep
        self.logprobs = logprobs
        self._sets = 2 if (flash if asynchronous is None else asynchronous) else 1
        dim = model.head_dim or max(layer.key_dim for layer in model.layers)
        self.head_dim = dim
        self._latent = next((layer for layer in model.layers if layer.latent is not None), None)
        page = 2 * model.kv_heads * dim * itemsize * page_size
        self._layers = Counter(
            (SLIDING, layer.window) if layer.kind == SLIDING else (FULL, None) for layer in model.layers
        )
        pages = dict.fromkeys(self._layers, page)
        if self._latent is not None and self._latent.latent is not None:
            pages[FULL, None] = self._latent.latent * itemsize * page_size
        self._type_block = {kind: pages[kind] * count for kind, count in self._layers.items()}
        self.sector_bytes = math.lcm(*self._type_block.values(), self.ALIGNMENT)
        self.block_bytes = sum(self._type_block.values())
        has_table = flash and all(kind != SLIDING for kind, _ in self._layers)
        given = self.MAX_BLOCKS_PER_REQUEST if max_blocks_per_request is None else max_blocks_per_request
        self.max_blocks_per_request = given if has_table else 0

    def types(self) -> list[TypeBytes]:
        return [
            TypeBytes(kind, self._layers[kind, window], block // self.block_tokens, self.block_tokens, block, window)
            for (kind, window), block in self._type_block.items()
        ]

    def sectors(self, blocks: int) -> int:
        """Sectors that `num_blocks` becomes (`PagedAttentionMemoryHandler.num_sectors_from_config`)."""
        return max(1, math.ceil(blocks * self.block_bytes / self.sector_bytes))

    def needed(self, lengths: Lengths) -> int:
        sectors = 0
        for (_, window), block in self._type_block.items():
            kept = {length: length if window is None else min(length, window) for length in lengths}
            pages = sum(count * blocks_for(kept[length], self.block_tokens) for length, count in lengths.items())
            sectors += math.ceil(pages * block / self.sector_bytes)
        # The fewest `num_blocks` that become that many sectors.
        return (sectors - 1) * self.sector_bytes // self.block_bytes + 1

    def allocated(self, blocks: int) -> int:
        return (self.sectors(blocks) + self.TRASH_SECTORS) * self.sector_bytes

    def buffers(self, blocks: int) -> int:
        """What `PagedAttentionMemoryHandler.compute_memory_footprint` counts besides the pool: logits, activations at
        the peak of one layer, index buffers, block tables and, without flash attention, masks. `num_blocks` is refused
        with a MemoryError when pool and buffers are more than max_memory_percent of what is free."""
        rows = self.token_budget * self._batch_token_bytes + self._readable(blocks) * self._cache_token_bytes
        return self._logits_bytes + rows + self.mask_bytes(blocks)

    def mask_bytes(self, blocks: int) -> int:
        """Of masks [token budget, readable tokens + token budget]."""
        columns = self._readable(blocks) + self.token_budget
        return self.masks * self._sets * self.itemsize * self.token_budget * columns

    def wanted(self, needed: int) -> int | None:
        return self._with_margin(needed)

    def _with_margin(self, needed: int) -> int:
        # The fifo scheduler lets no new request in when less than this share of the pool is free.
        return math.ceil(needed / (1 - self.FIFO_MARGIN))

    def when_longer(self, possible: int) -> str:
        return "a longer one stops the loop: the call logs an error and returns without the requests that are not done"

    def remarks(self, blocks: int, needed: int) -> list[str]:
        said = []
        if needed <= blocks < self._with_margin(needed):
            said.append("the fifo scheduler keeps 15 % of the pool free; new requests may have to wait for that")
        said.append(
            "a larger pool costs time in every call that is not persistent: it is zeroed, and up to 5.20 the warm-up "
            "attends over all of it"
        )
        if self.masks:
            size = told_bytes(self.mask_bytes(blocks))
            said.append(f"without flash attention, masks over the whole pool take {size}")
        return said

    @property
    def masks(self) -> int:
        """Masks over the whole pool; none with flash attention."""
        if self.flash:
            return 0
        return 2 if any(kind == SLIDING for kind, _ in self._layers) else 1

    def _readable(self, blocks: int) -> int:
        """Tokens of the type that gets most of them out of a sector."""
        per_sector = max(self.sector_bytes // block for block in self._type_block.values()) * self.block_tokens
        return self.sectors(blocks) * per_sector

    @property
    def _numbers_at_peak(self) -> int:
        """Numbers of keys and values that a token has at the peak of a layer: as they are read from the pool and,
        without flash attention, repeated for every query head; of MLA as they are expanded to heads."""
        model, latent = self.model, self._latent
        if latent is None or latent.latent is None:
            return self.head_dim * (2 * model.kv_heads if self.flash else 2 * model.heads + model.kv_heads)
        expanded = latent.key_dim - latent.rotary + latent.value_dim + latent.key_dim
        if self.flash and latent.value_dim != latent.key_dim:
            expanded += latent.key_dim  # values, padded to the size of keys
        return latent.latent + model.heads * expanded

    @property
    def _batch_token_bytes(self) -> int:
        model, groups = self.model, len(self._layers)
        attention = self.itemsize * (
            model.hidden_size + self.head_dim * (model.heads + 2 * model.kv_heads) + self._numbers_at_peak
        )
        head = 0 if self.logits_to_keep else self._logit_row
        outputs = 2 if self.logprobs else 1
        indices = _INT32 * (self._STATIC_ROWS + outputs + groups * self.max_blocks_per_request) + 2 * _INT64 * groups
        return max(attention, head) + self._sets * indices

    @property
    def _cache_token_bytes(self) -> int:
        return self._numbers_at_peak * self.itemsize + self._sets * len(self._layers) * _INT64

    @property
    def _logit_row(self) -> int:
        return self.model.hidden_size * self.itemsize + self.model.vocab_size * _FLOAT32

    @property
    def _logits_bytes(self) -> int:
        return self.max_requests * self._logit_row if self.logits_to_keep else 0


def _transformers_refusal(model: ModelLayers, *, latent_cache: bool) -> str | None:
    if not latent_cache and any(layer.kind == MLA for layer in model.layers):
        return (
            "before 5.25 its paged cache has room for num_key_value_heads x head_dim numbers, and this model hands it "
            "a latent vector: the first forward pass fails and no tokens come back"
        )
    if model.head_dim is None:
        return "its paged cache knows one head_dim, and the layers of this model have several"
    unknown = [name for name, _ in model.other] + [layer.kind for layer in model.layers if layer.kind == CHUNKED]
    if unknown:
        return f"its paged cache has full and sliding attention, and this model has layers of kind {unknown[0]}"
    return None


# ---------------------------------------------------------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class _Spec:
    """One layer's `KVCacheSpec`: vllm/v1/kv_cache_interface.py."""

    kind: str
    window: int | None
    token_bytes: int
    block_size: int

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes


class VllmArithmetic(Arithmetic):
    """vLLM 0.24: `v1/kv_cache_interface.py` and `v1/core/kv_cache_utils.py`.

    The page of a layer is `block_size * kv_heads * (key + value dim) * bytes` (FullAttentionSpec, SlidingWindowSpec),
    for MLA `block_size * (kv_lora_rank + rotary dim) * bytes` (MLAAttentionSpec: one head, the latent vector only). A
    layer that shares K/V has none.

    With one attention type, a block has a page of every layer. With several, layers go into groups of equal size
    (`_get_kv_cache_groups_uniform_page_size`), a block has one page of each layer of one group, and a request takes
    blocks for every group::

        Gemma 3, 4 full and 22 sliding layers:   groups of 4:  full x 1, sliding x 6 (two places of the last are empty)

    A sliding layer holds at most `window - 1 + max_num_batched_tokens` tokens of a request, and one block more, since
    the window need not begin where a block does (`SlidingWindowSpec.max_admission_blocks_per_request`). One block of
    the pool is never used (`BlockPool.null_block`).

    Args:
        block_size: tokens in a block; MLA backends take 64.
        token_budget: `max_num_batched_tokens`.
    """

    name = "vllm"
    BLOCK_SIZE = 16  # CacheConfig.DEFAULT_BLOCK_SIZE
    MLA_BLOCK_SIZE = 64
    NULL_BLOCKS = 1

    def __init__(
        self, model: ModelLayers, itemsize: int, *, block_size: int | None = None, token_budget: int | None = None
    ) -> None:
        super().__init__(model, itemsize)
        self.token_budget = DEFAULT_TOKEN_BUDGET if token_budget is None else token_budget
        latent = any(layer.kind == MLA for layer in model.layers)
        self.block_tokens = block_size or (self.MLA_BLOCK_SIZE if latent else self.BLOCK_SIZE)
        specs = [self._spec(layer) for layer in model.own]
        try:
            self.groups = _groups(specs)
        except ValueError as error:
            self.groups = [specs]
            self.refusal = str(error)
        if model.other:
            self.refusal = f"its layers of kind {model.other[0][0]} keep a state that is not counted here"
        uniform = len(self.groups) == 1
        # Pools of several groups have a place for each layer of the largest.
        self.block_bytes = (
            sum(spec.page_bytes for spec in self.groups[0])
            if uniform
            else max(len(group) for group in self.groups) * self.groups[0][0].page_bytes
        )

    def _spec(self, layer: AttentionLayer) -> _Spec:
        numbers = layer.numbers if layer.latent is None else layer.latent
        return _Spec(layer.kind, layer.window, numbers * self.itemsize, self.block_tokens)

    def types(self) -> list[TypeBytes]:
        rows: dict[tuple[str, int | None], list[_Spec]] = defaultdict(list)
        for group in self.groups:
            for spec in group:
                rows[spec.kind, spec.window].append(spec)
        return [
            TypeBytes(
                kind,
                len(specs),
                sum(spec.token_bytes for spec in specs),
                specs[0].block_size,
                sum(spec.page_bytes for spec in specs),
                None if window is None else self._most_tokens(kind, window),
            )
            for (kind, window), specs in rows.items()
        ]

    def _most_tokens(self, kind: str, window: int) -> int:
        return window + self.token_budget - (1 if kind == SLIDING else 0)

    def needed(self, lengths: Lengths) -> int:
        blocks = self.NULL_BLOCKS
        for group in self.groups:
            spec = group[0]
            for length, count in lengths.items():
                held = blocks_for(length, spec.block_size)
                if spec.window is not None:
                    extra = 1 if spec.kind == SLIDING else 0
                    held = min(held, blocks_for(self._most_tokens(spec.kind, spec.window), spec.block_size) + extra)
                blocks += count * held
        return blocks

    def allocated(self, blocks: int) -> int:
        return blocks * self.block_bytes

    def tokens(self, blocks: int) -> int:
        return (blocks - self.NULL_BLOCKS) // len(self.groups) * self.block_tokens

    def blocks_of(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_tokens) * len(self.groups) + self.NULL_BLOCKS

    def when_longer(self, possible: int) -> str:
        return f"vLLM does not start with a max_model_len above {possible:,}, and raises for a longer request"

    def remarks(self, blocks: int, needed: int) -> list[str]:
        return ["the whole pool is taken at start, and kept until the engine is gone"]


def _groups(specs: list[_Spec]) -> list[list[_Spec]]:
    """Layers by group. Raises ValueError where vLLM cannot give all layers pages of one size."""
    kinds = {(spec.kind, spec.window) for spec in specs}
    if len(kinds) == 1:
        return [specs]  # whatever their sizes: `UniformTypeKVCacheSpecs`
    largest = max(spec.page_bytes for spec in specs)
    same: dict[_Spec, list[_Spec]] = defaultdict(list)
    for spec in specs:  # `unify_kv_cache_spec_page_size`
        if largest % spec.page_bytes:
            raise ValueError(
                f"it needs pages of one size in all layers, and {spec.page_bytes} does not divide {largest} bytes"
            )
        scaled = _Spec(spec.kind, spec.window, spec.token_bytes, spec.block_size * (largest // spec.page_bytes))
        same[scaled].append(scaled)
    fewest, most = (pick(len(layers) for layers in same.values()) for pick in (min, max))
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for layers in same.values():
        count = round_up(len(layers), size) // size
        groups += [layers[i::count] for i in range(count)]
    return groups
