"""CUDA graphs and run-ahead without CUDA: what `flatbed.model.graphs` asks of torch.cuda, emulated on the CPU.

Attention and the cache's writes are torch operations here, because the interpreter would take seconds for each step;
their kernels have tests of their own. Sampling is done by the kernels.

A capture records every operator that torch runs and every kernel that Triton's interpreter is given, with the very
tensors they were given. A replay runs them again over these tensors, and puts each result where the capture's result
lies. So it is blind, as a real graph is, to all that Python decided meanwhile: what is not in a static tensor stays as
it was when it was captured. And as graphs of one memory pool use the same memory, a replay spoils what the others have
left there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

import flatbed
from flatbed.attention.base import AttentionSpec, LayerCache
from flatbed.model import graphs, runner, steps

_MADE_EMPTY = {"aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class _Recorder(TorchDispatchMode):
    """Appends to the tape whatever is run, after it was run."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator.name() == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing: a value is read by the CPU")
        result = operator(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self._graph.made_here.append(made)
        if operator.name() not in _MADE_EMPTY:
            self._graph.tape.append(lambda: _again(operator, args, kwargs, result))
        return result


def _again(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Runs an operator once more; its results go to where they went the first time."""
    for former, new in zip(tree_leaves(result), tree_leaves(operator(*args, **kwargs)), strict=True):
        if isinstance(former, torch.Tensor) and former.data_ptr() != new.data_ptr():
            former.copy_(new)


class Graph:
    """A `torch.cuda.CUDAGraph`.

    Attributes:
        captured: how many there ever were.
        tape: what a replay does, in order.
        made_here: tensors that the capture made, in the memory of its pool.
    """

    captured: int = 0

    def __init__(self) -> None:
        self.tape: list[Callable[[], None]] = []
        self.made_here: list[torch.Tensor] = []
        self._others: list[Graph] = []
        Graph.captured += 1

    def share(self, pool: Any) -> None:
        """Its memory is that of this pool."""
        self._others = _graphs_of.setdefault(pool, [])
        self._others.append(self)

    def replay(self) -> None:
        for other in self._others:
            for tensor in other.made_here if other is not self else ():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        for action in self.tape:
            action()


_graphs_of: dict[Any, list[Graph]] = {}
_recording: list[Graph] = []
_handles = itertools.count()


@contextlib.contextmanager
def _capture(graph: Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    graph.share(pool)
    _recording.append(graph)
    try:
        with _Recorder(graph):
            yield
    finally:
        _recording.pop()


class _Stream:
    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class _Event:
    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Plan:
    """A `DecodePlan`: what is made of the lengths once a step."""

    def __init__(self, rows: int, *sizes: Any, window: int | None, early: bool) -> None:
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def update(self, lengths: torch.Tensor) -> None:
        self.lengths.copy_(lengths)


def _decode(
    query: torch.Tensor, cache: LayerCache, spec: AttentionSpec, tables: torch.Tensor, plan: _Plan
) -> torch.Tensor:
    """See `decode_attention`; work of static shapes, over all that the tables have room for."""
    rows, heads, _ = query.shape
    kv_heads, block_size = cache.key.shape[1:3]
    room = tables.shape[1] * block_size
    held = torch.arange(tables.shape[1]) * block_size < plan.lengths[:, None]
    tables = torch.where(held, tables, 0)  # what lies beyond is anything
    key, value = (
        part[tables.long()].transpose(1, 2).reshape(rows, kv_heads, room, -1).repeat_interleave(heads // kv_heads, 1)
        for part in (cache.key, cache.value)
    )
    at = torch.arange(room)
    seen = at < plan.lengths[:, None]
    if spec.window is not None:
        seen &= at >= plan.lengths[:, None] - spec.window
    scores = torch.einsum("rhd,rhtd->rht", query, key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = torch.where(seen[:, None], scores, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[None, :, None].expand(rows, heads, 1).to(scores)], -1)
    weights = scores.softmax(-1)[..., :room]
    seen = seen[:, None, :, None]
    mixed = (torch.where(seen, weights[..., None], 0) * torch.where(seen, value, 0)).sum(2)
    return torch.where(plan.lengths[:, None, None] > 0, mixed, 0)


def _write(
    cache: LayerCache, key: torch.Tensor, value: torch.Tensor, slot_blocks: torch.Tensor, slot_offsets: torch.Tensor
) -> None:
    """See `write_kv`."""
    for part, new in ((cache.key, key), (cache.value, value)):
        for i in range(len(new)):
            block, offset = slot_blocks[i : i + 1].long().clamp(min=0), slot_offsets[i : i + 1].long()
            kept = torch.where(slot_blocks[i] >= 0, new[i : i + 1], part[block, :, offset])
            part[block, :, offset] = kept


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on graphs can be captured here."""
    run = InterpretedFunction.run

    def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def launch() -> None:
            with _disable_current_modes():
                run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        launch()
        if _recording:
            _recording[-1].tape.append(launch)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    # A fused decoder is either of our kernels, or not made for graphs (the CPU's).
    monkeypatch.setattr(runner, "_operations", lambda *args, **kwargs: None)
    monkeypatch.setattr(graphs, "DecodePlan", _Plan)
    monkeypatch.setattr(graphs, "decode_attention", _decode)
    monkeypatch.setattr(graphs, "write_kv", _write)
    for name, stand_in in {
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": Graph,
        "graph": _capture,
        "current_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, next(_handles)),
        "memory_snapshot": list,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # A result has to be taken before the next step is run, which here is at once.
    start = steps._InTheAir.__init__

    def landed(flight: Any, plan: Any, out: torch.Tensor, *args: Any) -> None:
        start(flight, plan, out.clone(), *args)

    monkeypatch.setattr(steps._InTheAir, "__init__", landed)


def engine(model: Any, *, processes: bool = True, **settings: Any) -> flatbed.Engine:
    """An engine that runs ahead and captures graphs; after `emulate`."""
    made = flatbed.Engine(model, **{"capacity": "64 blocks", "block_size": 16, **settings})
    made._steps = steps.DeviceSteps(made._runner, made._sampler)
    made._steps.processes = processes
    return made
