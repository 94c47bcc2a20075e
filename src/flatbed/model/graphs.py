"""CUDA graphs of a decode step: forward and sampling of up to `bucket` rows, one launch for the CPU.

A graph is captured when a step first needs it. Everything that changes from step to step lies in one static tensor,
filled by one copy from pinned memory before the replay::

      inputs int32:  rows │ positions │ lengths │ slot blocks │ slot offsets │ temperature │ uniform │ tables
                     └────────────────── [bucket, or 4] each, floats as bits ──────────────────────┘ [bucket, width]

Rows of the bucket that no sequence uses have length 0 and a negative slot block: they read and write nothing. Neither
capture nor replay touches memory of capacity size.

Graphs of one engine never run at once, so they share their memory: what a step leaves behind (logits, and what was
drawn) is kept by nobody, and the next replay may write over it. It has to be read in stream order before that::

      graph memory   graph of 64 rows  │ hidden states │ logits ────────────── │ out │
                     graph of 40 rows  │ hidden │ logits ──────── │ out │                    the same addresses
      processing     ProcessingGraph of either         memory of its own: it runs while logits and out are needed
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.attention.base import AttentionBackend, AttentionSpec, Availability, Batch, LayerCache
from flatbed.attention.triton import DecodePlan, decode_attention, write_kv
from flatbed.memory.capacity import power_of_two
from flatbed.memory.transfer import staging
from flatbed.model.interface import Session
from flatbed.sampling.device import Redraw, draw
from flatbed.sampling.sampler import UNPROCESSED

# Numbers of 4 bytes that a field takes at least.
_ALIGNED = 4
_FIELDS = ("rows", "positions", "lengths", "slot_blocks", "slot_offsets", "temperature", "uniform")

# Called with ids and positions int64 [1, n] and the rows that need logits int64 [n]; returns logits [n, vocabulary].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def bucket_of(rows: int) -> int:
    """The graph size for that many rows: few sizes, and never more than a quarter (from 16 on) in vain."""
    if rows <= 8:
        return power_of_two(rows)
    step = max(8, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // step) * step


class StaticDecode(AttentionBackend):
    """Decode attention over a graph's static tensors."""

    name: ClassVar[str] = "triton-graph"
    needs_clean_blocks: ClassVar[bool] = False
    reads_pool: ClassVar[bool] = True

    def __init__(self, views: dict[str, torch.Tensor], tables: torch.Tensor) -> None:
        self._views = views
        self._tables = tables
        self._plans: dict[tuple[Any, ...], DecodePlan] = {}

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        return Availability(device.type == "cuda", "part of the Triton backend")

    def restart(self) -> None:
        """A new step begins: the work of each kind of layer that is known is divided anew."""
        for plan in self._plans.values():
            plan.update(self._views["lengths"])

    def begin(self, batch: Batch, block_size: int) -> None:
        raise RuntimeError("a graph's batch lies in its static tensors")

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        write_kv(cache, key, value, self._views["slot_blocks"], self._views["slot_offsets"])

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, key_dim = query.shape
        kv_heads, value_dim = cache.value.shape[1], cache.value.shape[-1]
        kind = (heads, kv_heads, key_dim, value_dim, spec.window)
        if kind not in self._plans:
            self._plans[kind] = DecodePlan(
                rows, heads, kv_heads, key_dim, value_dim, cache.key.dtype, query.device,
                window=spec.window, early=True,
            )  # fmt: skip
            # Made in a first pass that compiles kernels and that nobody reads the results of; a capture finds it.
            self._plans[kind].update(self._views["lengths"])
        return decode_attention(query, cache, spec, self._tables, self._plans[kind])


# Makes a graph's backend over its static tensors: the fields by name, and the tables.
MakeBackend = Callable[[dict[str, torch.Tensor], torch.Tensor], StaticDecode]


@dataclass
class StepRows:
    """What one decode step puts into a graph, for n rows.

    Attributes:
        rows, positions: int [n].
        tables: int32 [n, width]; entries beyond a row's blocks are not read.
        temperature, uniform: float32 [n].
    """

    rows: NDArray[Any]
    positions: NDArray[Any]
    tables: NDArray[np.int32]
    temperature: NDArray[np.float32]
    uniform: NDArray[np.float32]


class DecodeGraph:
    """One captured graph.

    Attributes:
        logits: [bucket, vocabulary] of the last replay, until the next of any graph.
        out: int32 [bucket, 4] of the last replay (see `sampling.device.draw`), likewise.
        processing: what follows a replay where a row asks for more than a temperature; None until one did.
    """

    def __init__(
        self,
        bucket: int,
        width: int,
        forward: Forward,
        session: Session,
        layers: tuple[LayerCache, ...],
        last_tokens: torch.Tensor,
        block_size: int,
        make_backend: MakeBackend,
        stream: torch.cuda.Stream,
    ) -> None:
        """`stream`: what is captured on."""
        self.bucket, self.width = bucket, width
        self._block_size = block_size
        self._spare_row = len(last_tokens) - 1
        device = last_tokens.device
        # Kernels are compiled for addresses that are multiples of 16 bytes, and anew for those that are not.
        self._span = max(bucket, _ALIGNED)
        count = len(_FIELDS) * self._span
        self._inputs = torch.zeros(count + bucket * width, dtype=torch.int32, device=device)
        views = {name: self._inputs[i * self._span :][:bucket] for i, name in enumerate(_FIELDS)}
        views["temperature"] = views["temperature"].view(torch.float32)
        views["uniform"] = views["uniform"].view(torch.float32)
        backend = make_backend(views, self._inputs[count:].view(bucket, width))
        every = torch.arange(bucket, device=device)
        self.fill(StepRows(*(np.zeros(0, np.int32),) * 2, np.zeros((0, 1), np.int32), *(np.zeros(0, np.float32),) * 2))

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            backend.restart()
            session.begin(backend, layers, views["slot_blocks"], views["slot_offsets"], positions=width * block_size)
            ids = last_tokens[views["rows"].long()]
            logits = forward(ids[None], views["positions"].long()[None], every)
            return logits, draw(logits, views["temperature"], views["uniform"], views["rows"], last_tokens)

        self.processing: ProcessingGraph | None = None
        self._views, self._last_tokens = views, last_tokens
        self._step = step
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()  # compiles kernels and makes what must not be made while capturing
        torch.cuda.current_stream(device).wait_stream(stream)
        self._stream = stream

    def capture(self, pool: Any) -> None:
        """Records the step. Raises RuntimeError when the model does what cannot be recorded."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=self._stream):
            logits, out = self._step()
        self.logits, self.out = _borrowed(logits), _borrowed(out)

    def redraw(self, processing: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Draws rows of the last replay anew (see `Redraw`)."""
        views = self._views
        inputs = (self.logits, views["temperature"], views["uniform"], views["rows"], self._last_tokens)
        Redraw(*inputs, processing, seen)(self.out)

    def capture_processing(self, seen: torch.Tensor | None, pool: Any) -> None:
        """Records `redraw` as `processing`."""
        self.processing = ProcessingGraph(self, seen, pool, self._stream)

    def run_eagerly(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The step as it was last filled, launch by launch instead of as a graph: logits and `out`."""
        return self._step()

    def fill(self, step: StepRows) -> None:
        """Copies a step's inputs to the device; the rest of the bucket is made to do nothing."""
        n, count = len(step.rows), len(_FIELDS) * self._span
        staged = staging(self._inputs.shape, torch.int32, self._inputs.device)
        flat = staged.numpy()
        fields = flat[:count].reshape(len(_FIELDS), self._span)
        fields[:] = 0
        fields[0, n:] = self._spare_row
        fields[3, n:] = -1
        if n:
            index = np.arange(n)
            fields[0, :n] = step.rows
            fields[1, :n] = step.positions
            fields[2, :n] = step.positions + 1
            fields[3, :n] = step.tables[index, step.positions // self._block_size]
            fields[4, :n] = step.positions % self._block_size
            fields[5, :n] = step.temperature.view(np.int32)
            fields[6, :n] = step.uniform.view(np.int32)
            tables = flat[count:].reshape(self.bucket, self.width)
            tables[:n, : step.tables.shape[1]] = step.tables
        self._inputs.copy_(staged, non_blocking=True)

    def replay(self, step: StepRows) -> None:
        """Runs the step; results are in `logits` and `out` in stream order."""
        self.fill(step)
        self._graph.replay()


class ProcessingGraph:
    """Draws those rows of a decode graph anew that ask for a penalty, top-k, top-p or min-p; to be replayed after it.

    A graph of its own: steps without such rows pay nothing for it, and the forward need not be captured once more.

    Attributes:
        seen: what it was captured over (see `SeenTokens`).
    """

    def __init__(self, decode: DecodeGraph, seen: torch.Tensor | None, pool: Any, stream: torch.cuda.Stream) -> None:
        self.seen = seen
        self._inputs = torch.empty(decode.bucket, len(UNPROCESSED), dtype=torch.int32, device=decode.out.device)
        self._fill(np.empty((0, len(UNPROCESSED)), np.int32))
        decode.redraw(self._inputs, seen)  # compiles the kernels; no row asks for anything yet
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            decode.redraw(self._inputs, seen)

    def _fill(self, processing: NDArray[np.int32]) -> None:
        staged = staging(self._inputs.shape, torch.int32, self._inputs.device)
        wishes = staged.numpy()
        wishes[: len(processing)] = processing
        wishes[len(processing) :] = UNPROCESSED
        self._inputs.copy_(staged, non_blocking=True)

    def replay(self, processing: NDArray[np.int32]) -> None:
        """Draws anew; `processing` int32 [n, 4] of the n rows of the last replay (see `Redraw`)."""
        self._fill(processing)
        self._graph.replay()


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which it does not keep from being used again."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())


def _pool_bytes(pools: Collection[Any]) -> int:
    """Memory of graph pools, which nothing but their graphs can use; what a first run leaves in the cache, all can."""
    segments, ids = torch.cuda.memory_snapshot(), {tuple(pool) for pool in pools}
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in ids)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are captured on, one for all: the vendor's products take 32 MiB for each that they meet,
    and what a first run leaves in the cache can only be used again on its own."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """The graphs of one engine: captured when first needed, dropped when what they were captured over has changed.

    Attributes:
        make_backend: for the graphs that are captured from now on.
    """

    def __init__(self, forward: Forward, session: Session, last_tokens: torch.Tensor, block_size: int) -> None:
        self.make_backend: MakeBackend = StaticDecode
        self._forward = forward
        self._session = session
        self._last_tokens = last_tokens
        self._block_size = block_size
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._layers: tuple[LayerCache, ...] = ()
        self._pools: dict[str, Any] = {}  # of the graphs, and of what may follow them
        self.memory_bytes = 0
        self.refused: str | None = None  # why this model cannot be captured

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, rows: int, blocks: int, layers: tuple[LayerCache, ...]) -> DecodeGraph | None:
        """The graph for `rows` rows whose longest table has `blocks` blocks, over this pool.

        None where the model does what a graph cannot hold (it copies from the CPU, or looks at values to decide what to
        do, as some mixtures of experts do): its steps then run launch by launch.
        """
        if self.refused is not None:
            return None
        if layers is not self._layers:
            self.drop()
            self._layers = layers
        key = (bucket_of(rows), power_of_two(blocks, 16))
        if key not in self._graphs:
            graph = DecodeGraph(
                *key, self._forward, self._session, layers, self._last_tokens, self._block_size, self.make_backend,
                _capture_stream(self._last_tokens.device),
            )  # fmt: skip
            try:
                graph.capture(self._pool("decode"))
            except RuntimeError as error:
                self.drop()
                self.refused = str(error)
                return None
            self._graphs[key] = graph
            self.memory_bytes = _pool_bytes(self._pools.values())
        return self._graphs[key]

    def processing(self, graph: DecodeGraph, seen: torch.Tensor | None) -> ProcessingGraph:
        """What follows `graph` in a step with rows that ask for more than a temperature, over these seen tokens."""
        if graph.processing is None or graph.processing.seen is not seen:
            graph.capture_processing(seen, self._pool("processing"))
            self.memory_bytes = _pool_bytes(self._pools.values())
        assert graph.processing is not None
        return graph.processing

    def drop(self) -> None:
        """Forgets all graphs."""
        self._graphs.clear()
        self._pools.clear()
        self.memory_bytes = 0

    def _pool(self, name: str) -> Any:
        if name not in self._pools:
            self._pools[name] = torch.cuda.graph_pool_handle()
        return self._pools[name]
