"""Watching an engine from the host while the profiler runs: what it is doing, and what K/V lengths attention is given.

An engine's own methods are wrapped for as long as a `with` block lasts; they do what they did before. Nothing here
waits for the device or copies from it.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from flatbed.lab.engines.base import import_if_there
from flatbed.lab.trace_events import DECODE, PREFILL, Span
from flatbed.lab.trace_names import ATTENTION, CACHE, SAMPLING, ZEROING

CONSTRUCTION, WARM_UP, BETWEEN, TEARDOWN = "construction", "warm-up", "between steps", "teardown"

# A sequence in a forward pass: its queries, and the keys that it has when the pass is done.
Sequences = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Attended:
    """What attention of one forward pass was given, in each layer of one sort.

    Attributes:
        phase: in which it ran.
        kind: PREFILL when any sequence has more than one query, else DECODE.
        window: of these layers; None sees all.
        layers: how many of them there are.
        queries: tokens of the forward pass, padding included.
        keys: keys that attention was given, over all sequences.
        live: of these, keys of running requests.
        pairs, live_pairs: (query, key) pairs, the causal half not taken off.
        copied: K/V rows that were copied out of the cache for it; None when it is not known.
    """

    phase: str
    kind: str
    window: int | None
    layers: int
    queries: int
    keys: int
    live: int
    pairs: int
    live_pairs: int
    copied: int | None = None


class Watch:
    """Marks, and lengths, of one run.

    Attributes:
        phases, kinds, regions: see `trace_events.break_down`.
        attended: in order.
        marked: regions are marked wherever the host launches by itself.
    """

    def __init__(self, annotate: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        """`annotate` makes a range in the profiler's own trace, for who looks at it."""
        self.phases: list[Span] = []
        self.kinds: list[Span] = []
        self.regions: list[Span] = []
        self.attended: list[Attended] = []
        self.marked = False
        self._annotate = annotate if annotate is not None else lambda name: nullcontext()
        self._open: list[str] = []

    @contextmanager
    def _mark(self, label: str, *lists: list[Span]) -> Iterator[None]:
        with self._annotate(f"flatbed trace: {label}"):
            start = time.time_ns()
            try:
                yield
            finally:
                span = Span(start / 1e3, time.time_ns() / 1e3, label)
                for one in lists:
                    one.append(span)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """CONSTRUCTION or WARM_UP; what is computed meanwhile belongs to it, whatever its kind."""
        self._open.append(name)
        try:
            with self._mark(name, self.phases):
                yield
        finally:
            self._open.remove(name)

    def call(self) -> AbstractContextManager[None]:
        """A whole call: what none of its forward passes covers is BETWEEN them."""
        return self._mark(BETWEEN, self.phases)

    def teardown(self) -> AbstractContextManager[None]:
        """The end of a call, which takes down what the call had built."""
        return self._mark(TEARDOWN, self.phases)

    def forward(self, kind: str) -> AbstractContextManager[None]:
        """A forward pass."""
        return self._mark(kind, self.kinds, *(() if self._open else (self.phases,)))

    def region(self, name: str) -> AbstractContextManager[None]:
        """Host code on whose behalf everything inside is launched."""
        return self._mark(name, self.regions)

    def attend(
        self,
        kind: str,
        given: Sequences,
        live: Sequences,
        windows: Sequence[int | None],
        *,
        dense: tuple[int, int] | None = None,
        copied: int | None = None,
    ) -> None:
        """Notes a forward pass.

        Args:
            given: what attention was told.
            live: what requests really have; empty when nobody asked for this pass.
            windows: of every layer.
            dense: queries and keys of attention that looks at all keys from all queries, whatever the sequences.
            copied: see `Attended`.
        """
        phase = self._open[-1] if self._open else kind
        for window, layers in Counter(windows).items():
            seen, real = _seen(given, window), _seen(live, window)
            queries, keys = dense if dense is not None else (sum(q for q, _ in seen), sum(k for _, k in seen))
            pairs = queries * keys if dense is not None else sum(q * k for q, k in seen)
            self.attended.append(
                Attended(
                    phase,
                    kind,
                    window,
                    layers,
                    queries,
                    keys,
                    sum(k for _, k in real),
                    pairs,
                    sum(q * k for q, k in real),
                    copied,
                )
            )


def _seen(sequences: Sequences, window: int | None) -> list[tuple[int, int]]:
    """What a layer with that window sees of the sequences."""
    if window is None:
        return list(sequences)
    return [(queries, min(keys, queries + window - 1)) for queries, keys in sequences]


def kind_of(sequences: Sequences) -> str:
    """PREFILL when any sequence has more than one query."""
    return PREFILL if any(queries > 1 for queries, _ in sequences) else DECODE


def watching(adapter: Any, watch: Watch) -> AbstractContextManager[None]:
    """Watches the engine behind an adapter; one that is not known is left alone, and only its kernels' names tell."""
    from flatbed.lab.engines.flatbed import FlatbedAdapter
    from flatbed.lab.engines.transformers import TransformersAdapter

    if isinstance(adapter, FlatbedAdapter):
        return _watching_flatbed(watch)
    if isinstance(adapter, TransformersAdapter):
        return _watching_transformers(watch)
    return nullcontext()


class _Wraps(ExitStack):
    """Wraps methods, of classes or of single objects, until it is closed."""

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Makes `owner.name(...)` call `around(original, ...)`, where there is such a method."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        own = name in vars(owner)
        setattr(owner, name, wrapped)
        self.callback(setattr, owner, name, original) if own else self.callback(delattr, owner, name)

    def inside(self, owner: Any, name: str, mark: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs `owner.name` within a mark."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with mark():
                return original(*args, **kwargs)

        self.wrap(owner, name, around)


# ------------------------------------------------------------------------------------------------------------- Flatbed


@contextmanager
def _watching_flatbed(watch: Watch) -> Iterator[None]:
    from flatbed.memory.pool import Pool
    from flatbed.model.steps import DeviceSteps, EagerSteps
    from flatbed.sampling.sampler import Sampler

    # The layers' windows, and the sequences of the plan that is being launched.
    current: tuple[Sequence[int | None], Sequences] = ((), ())
    backends: list[Any] = []

    def launch(original: Callable[..., Any], steps: Any, plan: Any) -> Any:
        nonlocal current
        backend = steps._runner._backend
        if backend not in backends:
            backends.append(backend)
            wraps.wrap(backend, "begin", begin)
            wraps.inside(backend, "write", lambda: watch.region(CACHE))
            wraps.inside(backend, "attend", lambda: watch.region(ATTENTION))
        live = _planned(plan)
        current = steps._runner.windows, live
        with watch.forward(kind_of(live)):
            return original(steps, plan)

    def begin(original: Callable[..., Any], batch: Any, block_size: int) -> Any:
        queries = batch.query_starts[1:] - batch.query_starts[:-1]
        given = list(zip(queries.tolist(), batch.lengths.tolist(), strict=True))
        windows, live = current
        watch.attend(kind_of(given), given, live, windows)
        return original(batch, block_size)

    def replay(original: Callable[..., Any], graph: Any, step: Any) -> Any:
        windows, live = current
        watch.attend(DECODE, [(1, int(position) + 1) for position in step.positions], live, windows)
        return original(graph, step)

    with _Wraps() as wraps:
        for steps in (EagerSteps, DeviceSteps):
            wraps.wrap(steps, "launch", launch)
        wraps.inside(Pool, "clear", lambda: watch.region(ZEROING))
        wraps.inside(Pool, "copy", lambda: watch.region(CACHE))
        wraps.inside(Sampler, "sample", lambda: watch.region(SAMPLING))
        graphs = _graphs()
        if graphs is not None:
            wraps.wrap(graphs.DecodeGraph, "replay", replay)
            for name in ("__init__", "capture", "capture_processing"):
                wraps.inside(graphs.DecodeGraph, name, lambda: watch.phase(WARM_UP))
        watch.marked = True
        yield


def _planned(plan: Any) -> list[tuple[int, int]]:
    """Queries and keys of each sequence of a `BatchPlan`."""
    decodes = [(1, int(position) + 1) for position in plan.positions]
    return decodes + [(chunk.end - chunk.start, chunk.end) for chunk in plan.chunks]


def _graphs() -> Any | None:
    """The module of Flatbed's CUDA graphs; None without Triton, where there are none."""
    try:
        return importlib.import_module("flatbed.model.graphs")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


# -------------------------------------------------------------------------------------------------------- Transformers


@contextmanager
def _watching_transformers(watch: Watch) -> Iterator[None]:
    """Names are those of Transformers 5.17 to 5.24."""
    package = "transformers.generation.continuous_batching"
    api, runner = import_if_there(f"{package}.continuous_api"), import_if_there(f"{package}.model_runner")
    cache, buffers = import_if_there(f"{package}.cache"), import_if_there(f"{package}.input_outputs")
    if api is None or runner is None or cache is None or buffers is None:
        yield
        return
    from transformers.modeling_utils import AttentionInterface

    def step(original: Callable[..., Any], processor: Any, *args: Any) -> Any:
        with watch.forward(kind_of(_batched(processor.inputs_and_outputs))):
            return original(processor, *args)

    def compute(original: Callable[..., Any], model_runner: Any, model: Any, batch: dict[str, Any]) -> Any:
        sequences = _batched(model_runner.inputs_and_outputs)
        warming = WARM_UP in watch._open
        _note_batch(watch, model_runner, batch, sequences, [] if warming else sequences)
        with watch.forward(kind_of(sequences)):
            return original(model_runner, model, batch)

    with _Wraps() as wraps:
        wraps.inside(api.ContinuousBatchingManager, "_create_batch_processor", lambda: watch.phase(CONSTRUCTION))
        wraps.inside(api.ContinuousBatchProcessor, "warmup", lambda: watch.phase(WARM_UP))
        for name in ("stop", "destroy"):
            wraps.inside(api.ContinuousBatchingManager, name, watch.teardown)
        wraps.wrap(api.ContinuousBatchProcessor, "_generation_step", step)
        wraps.wrap(runner.ModelRunner, "compute_batch", compute)
        wraps.inside(runner.ModelRunner, "_sample", lambda: watch.region(SAMPLING))
        wraps.inside(cache.PagedAttentionCache, "update", lambda: watch.region(CACHE))
        wraps.inside(buffers.ContinuousBatchingIOs, "_reset_static_tensors", lambda: watch.region(ZEROING))
        functions: dict[str, Any] = AttentionInterface._global_mapping
        wraps.callback(functions.update, dict(functions))
        for name, function in list(functions.items()):
            functions[name] = _in_region(function, watch)
        watch.marked = True
        yield


def _in_region(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with watch.region(ATTENTION):
            return function(*args, **kwargs)

    return wrapped


def _host(inputs: Any) -> Any:
    """The host's side of a batch's buffers: there are two sides, and two pairs of them, when it is asynchronous."""
    pairs = getattr(inputs, "io_pairs", None)
    return inputs if pairs is None else pairs[inputs.current_pair].host_io


def _batched(inputs: Any) -> list[tuple[int, int]]:
    """Queries and keys of each sequence of the batch that was prepared last."""
    # `position_offset` has been moved to the end of the batch's queries when it was prepared.
    return [(one.query_length, one.state.position_offset) for one in _host(inputs).requests_in_batch]


def _note_batch(watch: Watch, runner: Any, batch: dict[str, Any], given: Sequences, live: Sequences) -> None:
    kind, windows = kind_of(given), _windows(runner.cache)
    if batch.get("block_table") is not None:
        watch.attend(kind, given, live, windows, copied=0)
        return
    copied = max(int(index.shape[0]) for index in batch["read_index"])
    dense = None
    if batch.get("attention_mask") is not None:
        queries = int(batch["input_ids"].shape[-1])
        dense = queries, copied or queries
    watch.attend(kind, given, live, windows, dense=dense, copied=copied)


def _windows(cache: Any) -> list[int | None]:
    """The window of each layer of a `PagedAttentionCache`."""
    if hasattr(cache, "cache_allocators"):
        return [
            getattr(allocator, "sliding_window", None)
            for allocator in cache.cache_allocators.values()
            for _ in allocator.layer_indices
        ]
    return [None if window == 1 else window for window in cache.sliding_windows.values()]  # 5.17: 1 means none
