"""One workload under the profiler, and where its time went: what `flatbed trace` asks a process of its own for.

Only that process needs torch; what it answers with is a `Trace`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatbed.errors import ConfigError, FlatbedError
from flatbed.lab.engines.base import Adapter
from flatbed.lab.trace_events import DECODE, PREFILL, Breakdown, Recording, break_down, read_trace
from flatbed.lab.trace_names import UNKNOWN
from flatbed.lab.trace_watch import BETWEEN, CONSTRUCTION, TEARDOWN, WARM_UP, Attended, Watch, watching
from flatbed.lab.workloads import Workload

PHASES = (CONSTRUCTION, WARM_UP, PREFILL, DECODE, BETWEEN, TEARDOWN)


class TraceError(FlatbedError):
    """The engine could not be run under the profiler. The message says what went wrong."""


@dataclass(frozen=True)
class Lengths:
    """What attention was given in one phase, over all forward passes; in each of `layers` layers.

    Attributes: see `trace_watch.Attended`.
        forwards: how many passes there were.
    """

    phase: str
    kind: str
    window: int | None
    layers: int
    forwards: int
    queries: int
    keys: int
    live: int
    pairs: int
    live_pairs: int
    copied: int | None


@dataclass(frozen=True)
class NameShare:
    """One kernel's or operator's part: its name, its category, milliseconds and how often it ran."""

    name: str
    category: str
    milliseconds: float
    count: int


@dataclass(frozen=True)
class Trace:
    """Where the time of one run went.

    Attributes:
        engine, model, settings, versions: what was run.
        workload: its facts.
        device: its name.
        on_device: whether kernels of a GPU were recorded; otherwise it is operators on the CPU.
        gpu_only: nothing of what the CPU did was recorded, so that nothing slowed it down.
        warm: a first call had been made before.
        seconds, tokens: of the call, under the profiler.
        window: milliseconds from the first mark (or event) to the last.
        phases: {phase: {category: milliseconds}}; all of it sums up to `window`.
        names: by name, the longest first.
        lengths: K/V lengths; empty when the engine is not one that can be watched.
        notes: what has to be known of the figures.
        file: the profiler's trace (Chrome format), or None.
    """

    engine: str
    model: str
    settings: dict[str, Any]
    versions: dict[str, str]
    workload: dict[str, Any]
    device: str
    on_device: bool
    gpu_only: bool
    warm: bool
    seconds: float
    tokens: int
    window: float
    phases: dict[str, dict[str, float]]
    names: list[NameShare]
    lengths: list[Lengths]
    notes: list[str] = field(default_factory=list)
    file: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The trace as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trace:
        """The inverse of `to_json`."""
        names = [NameShare(**one) for one in value["names"]]
        lengths = [Lengths(**one) for one in value["lengths"]]
        return cls(**{**value, "names": names, "lengths": lengths})

    def category(self, name: str) -> float:
        """Milliseconds of a category over all phases."""
        return sum(categories.get(name, 0.0) for categories in self.phases.values())

    def unclassified(self) -> list[NameShare]:
        """What no pattern knows, the longest first."""
        return [one for one in self.names if one.category == UNKNOWN]

    def ratio(self, kind: str) -> float | None:
        """Keys that attention of a kind was given over those that were live, in all layers; None when none was live."""
        rows = [row for row in self.lengths if row.kind == kind]
        live = sum(row.live * row.layers for row in rows)
        return sum(row.keys * row.layers for row in rows) / live if live else None


# ---------------------------------------------------------------------------------------------- in the caller's process


def trace_adapter(
    adapter: Adapter, workload: Workload, *, out: Path | None = None, gpu_only: bool = False, warm: bool = False
) -> Trace:
    """Runs a workload on an adapter whose weights are loaded, under the profiler.

    Raises ConfigError for `gpu_only` without a GPU, TraceError when the run ended badly.
    """
    import torch
    from torch.profiler import record_function

    from flatbed.models import resolve_device

    device = resolve_device(adapter.setup.device)
    on_gpu = device.type == "cuda"
    if gpu_only and not on_gpu:
        raise ConfigError("recording the GPU alone needs one; leave --gpu-only out")
    profiler, notes = _profiler(on_gpu, gpu_only)
    watch = Watch(None if gpu_only else record_function)
    if warm:
        adapter.construct(workload)
        adapter.warm_up()
        adapter.run(workload)
    with watching(adapter, watch), profiler:
        if not warm:
            with watch.phase(CONSTRUCTION):
                adapter.construct(workload)
            with watch.phase(WARM_UP):
                adapter.warm_up()
        with watch.call():
            result = adapter.run(workload.varied(1) if warm else workload)
            if on_gpu:
                torch.cuda.synchronize()
    if result.error is not None:
        raise TraceError(result.error)
    with tempfile.TemporaryDirectory() if out is None else contextlib.nullcontext(out.parent) as folder:
        path = Path(folder) / "trace.json" if out is None else out
        profiler.export_chrome_trace(str(path))
        recorded = read_trace(path)
    marks = watch
    if not _one_clock(recorded, watch):
        notes.append("the profiler's clock is not the host's: phases, and the kinds of attention, cannot be told")
        marks = Watch()
    breakdown = break_down(recorded, marks.phases, marks.kinds, marks.regions, marked=marks.marked, rest=BETWEEN)
    return Trace(
        engine=adapter.spec.text,
        model=adapter.setup.model,
        settings=adapter.settings.to_json(),
        versions={},  # added by whoever started this process
        workload=workload.facts(),
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        on_device=recorded.on_device,
        gpu_only=gpu_only,
        warm=warm,
        seconds=result.seconds,
        tokens=result.tokens,
        window=breakdown.window / 1e3,
        phases=_milliseconds(breakdown),
        names=_names(breakdown),
        lengths=_lengths(watch.attended),
        notes=[*notes, *_notes(recorded.on_device, on_gpu, gpu_only, recorded.unlaunched, watch)],
        file=None if out is None else str(out),
    )


def _profiler(on_gpu: bool, gpu_only: bool) -> tuple[Any, list[str]]:
    """torch's profiler, and what it cannot do here. It records every thread: Transformers has one for generation."""
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    device = [ProfilerActivity.CUDA] if on_gpu else []
    if gpu_only:
        return profile(activities=device), []
    activities = [ProfilerActivity.CPU, *device]
    try:
        return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)), []
    except TypeError:
        told = "this torch records operators of one thread only; those of a generation thread are missing"
        return profile(activities=activities), [told]


def _one_clock(recorded: Recording, watch: Watch) -> bool:
    """Whether marks and events lie in the same stretch of time."""
    if not recorded.events or not watch.phases:
        return True
    marked = min(span.start for span in watch.phases), max(span.end for span in watch.phases)
    return recorded.events[0].start < marked[1] and marked[0] < max(event.end for event in recorded.events)


def _notes(on_device: bool, on_gpu: bool, gpu_only: bool, unlaunched: int, watch: Watch) -> list[str]:
    notes = []
    if on_device and not gpu_only:
        notes.append("recording the CPU slows it down, so idle is overstated; --gpu-only shows it as it is")
    if not on_gpu:
        notes.append("times are those of torch's operators on the CPU; idle is all that is outside of them (Python)")
    elif not on_device:
        notes.append("the profiler recorded nothing of the GPU")
    if unlaunched:
        notes.append(f"of {unlaunched:,} kernels no launch was recorded; they count to the phase in which they ran")
    if not watch.attended:
        notes.append("what K/V lengths this engine gives to attention is not known here")
    return notes


def _milliseconds(breakdown: Breakdown) -> dict[str, dict[str, float]]:
    return {
        phase: {category: microseconds / 1e3 for category, microseconds in categories.items()}
        for phase, categories in breakdown.by_phase.items()
    }


def _names(breakdown: Breakdown) -> list[NameShare]:
    shares = [
        NameShare(name, category, part.microseconds / 1e3, part.count)
        for (name, category), part in breakdown.names.items()
    ]
    return sorted(shares, key=lambda one: -one.milliseconds)


def _lengths(attended: list[Attended]) -> list[Lengths]:
    groups: dict[tuple[str, str, int | None, int], list[Attended]] = {}
    for one in attended:
        groups.setdefault((one.phase, one.kind, one.window, one.layers), []).append(one)
    rows = []
    for (phase, kind, window, layers), members in groups.items():
        copied = [one.copied for one in members if one.copied is not None]
        rows.append(
            Lengths(
                phase,
                kind,
                window,
                layers,
                forwards=len(members),
                queries=sum(one.queries for one in members),
                keys=sum(one.keys for one in members),
                live=sum(one.live for one in members),
                pairs=sum(one.pairs for one in members),
                live_pairs=sum(one.live_pairs for one in members),
                copied=sum(copied) if copied else None,
            )
        )
    order = {phase: number for number, phase in enumerate(PHASES)}
    return sorted(rows, key=lambda row: (order.get(row.phase, len(order)), row.kind != PREFILL, row.window or 0))
