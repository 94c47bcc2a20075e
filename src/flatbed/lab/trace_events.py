"""From a profiler's trace file to time by category and phase. Plain Python; no torch.

Times are microseconds since 1970 (the trace file's `baseTimeNanoseconds` added), the clock of `time.time_ns`, so that
marks made on the host can be laid over events of the device::

      host     ├── construction ──┤├─ warm-up ─┤├ prefill ┤ ├ decode ┤├ decode ┤      marks (phases, kinds, regions)
                       launch │        │ launch     │  │         │ cudaGraphLaunch
      device                  ▼ ███    ▼ ██████     ▼██▼███      ▼████████   ████     kernels
      idle     ░░░░░░░░░░░░░░░    ░░░░░      ░░░░░░░     ░░░░░░░░         ░░░

A kernel belongs to whatever the host was in when it launched it (found through the correlation id of the launch). A gap
belongs to what the host was in meanwhile: that is what the device was waiting for.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatbed.lab.trace_names import (
    ATTENTION,
    DECODE_ATTENTION,
    IDLE,
    PREFILL_ATTENTION,
    category_of,
)

PREFILL, DECODE = "prefill", "decode"
_ATTENTION_OF: dict[str | None, str] = {PREFILL: PREFILL_ATTENTION, DECODE: DECODE_ATTENTION}

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_GRAPH_LAUNCH = "GraphLaunch"


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, microseconds."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Event:
    """A kernel, a copy or an operator.

    Attributes:
        name: as the profiler tells it.
        start, end: when it ran.
        launched: when the host launched it.
        graph: it came out of a CUDA graph.
    """

    name: str
    start: float
    end: float
    launched: float
    graph: bool = False


class Timeline:
    """Spans that may lie in one another, asked for the innermost one: of all that cover a moment, the last begun."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.pieces = innermost(spans)
        self._starts = [piece.start for piece in self.pieces]

    def at(self, moment: float) -> str | None:
        """The label at that moment, or None."""
        index = bisect_right(self._starts, moment) - 1
        if index >= 0 and moment < self.pieces[index].end:
            return self.pieces[index].label
        return None

    def shares(self, start: float, end: float) -> list[tuple[str | None, float]]:
        """How much of start .. end belongs to each label, in order; None to what no span covers."""
        found: list[tuple[str | None, float]] = []
        at = start
        index = max(0, bisect_right(self._starts, start) - 1)
        while at < end:
            while index < len(self.pieces) and self.pieces[index].end <= at:
                index += 1
            if index == len(self.pieces) or self.pieces[index].start >= end:
                found.append((None, end - at))
                break
            piece = self.pieces[index]
            if piece.start > at:
                found.append((None, piece.start - at))
            stop = min(end, piece.end)
            found.append((piece.label, stop - max(at, piece.start)))
            at = stop
        return found


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cuts spans so that no two overlap: each moment goes to the last begun of those that cover it."""
    ordered = sorted((s for s in spans if s.end > s.start), key=lambda s: (s.start, -s.end))
    bounds = sorted({bound for span in ordered for bound in (span.start, span.end)})
    pieces: list[Span] = []
    open_spans: list[Span] = []
    coming = 0
    for start, end in pairwise(bounds):
        while coming < len(ordered) and ordered[coming].start <= start:
            open_spans.append(ordered[coming])
            coming += 1
        while open_spans and open_spans[-1].end <= start:
            open_spans.pop()
        # One below the top may have ended before it: spans of two threads need not lie in one another.
        cover = next((span for span in reversed(open_spans) if span.end > start), None)
        if cover is None:
            continue
        if pieces and pieces[-1].end == start and pieces[-1].label == cover.label:
            pieces[-1] = Span(pieces[-1].start, end, cover.label)
        else:
            pieces.append(Span(start, end, cover.label))
    return pieces


# ------------------------------------------------------------------------------------------------------ the trace file


@dataclass(frozen=True)
class Recording:
    """What a trace file holds.

    Attributes:
        events: of the device when there was one, in order of start; otherwise of the CPU, each piece of time being
            that of the innermost operator.
        on_device: whether they are a GPU's.
        unlaunched: how many of them no launch was found for; they count as launched when they began.
    """

    events: list[Event]
    on_device: bool
    unlaunched: int = 0


def read_trace(path: Path) -> Recording:
    """Reads a Chrome trace that `torch.profiler` exported."""
    with path.open(encoding="utf-8") as file:
        content = json.load(file)
    base = content.get("baseTimeNanoseconds", 0) / 1e3
    return recording(content["traceEvents"], base)


def recording(trace_events: Sequence[dict[str, Any]], base: float = 0.0) -> Recording:
    """The recording in a Chrome trace's events, whose times count from `base` microseconds."""
    complete = [event for event in trace_events if event.get("ph") == "X"]
    device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    if not device:
        return Recording(_cpu_events(complete, base), on_device=False)
    launches = {
        event["args"]["correlation"]: event
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    events, unlaunched = [], 0
    for event in device:
        start = base + float(event["ts"])
        launch = launches.get(event.get("args", {}).get("correlation"))
        unlaunched += launch is None
        events.append(
            Event(
                event["name"],
                start,
                start + float(event["dur"]),
                start if launch is None else base + float(launch["ts"]),
                graph=launch is not None and _GRAPH_LAUNCH in launch["name"],
            )
        )
    events.sort(key=lambda event: event.start)
    return Recording(events, on_device=True, unlaunched=unlaunched)


def _cpu_events(complete: Sequence[dict[str, Any]], base: float) -> list[Event]:
    threads: dict[Any, list[Span]] = defaultdict(list)
    for event in complete:
        if event.get("cat") == "cpu_op":
            start = base + float(event["ts"])
            threads[event["tid"]].append(Span(start, start + float(event["dur"]), event["name"]))
    pieces = [piece for spans in threads.values() for piece in innermost(spans)]
    return [Event(p.label, p.start, p.end, p.start) for p in sorted(pieces, key=lambda p: p.start)]


# ------------------------------------------------------------------------------------------------------ the accounting


@dataclass
class NameTime:
    """One name's part in one category.

    Attributes:
        microseconds: of device time, what ran beside other events included in full.
        count: events (pieces of operators, on the CPU).
    """

    microseconds: float = 0.0
    count: int = 0


@dataclass
class Breakdown:
    """Where the time of a window went.

    Attributes:
        start, end: the window, microseconds.
        by_phase: {phase: {category: microseconds}}; over all of it, the sum is the window. Where two events run at
            once, the time is that of the one that began first.
        names: {(name, category): its part}.
    """

    start: float
    end: float
    by_phase: dict[str, dict[str, float]] = field(default_factory=dict)
    names: dict[tuple[str, str], NameTime] = field(default_factory=dict)

    @property
    def window(self) -> float:
        return self.end - self.start

    def category(self, name: str) -> float:
        """Microseconds of one category in all phases."""
        return sum(phase.get(name, 0.0) for phase in self.by_phase.values())

    def add(self, phase: str, category: str, microseconds: float) -> None:
        if microseconds > 0:
            categories = self.by_phase.setdefault(phase, {})
            categories[category] = categories.get(category, 0.0) + microseconds


def break_down(
    recorded: Recording,
    phases: Iterable[Span],
    kinds: Iterable[Span],
    regions: Iterable[Span],
    *,
    marked: bool,
    rest: str,
) -> Breakdown:
    """Attributes every moment between the first and the last phase mark (or event) to a phase and a category.

    Args:
        phases: construction, warm-up, prefill, decode, in whatever order they came.
        kinds: PREFILL or DECODE for each forward pass, in whatever phase.
        regions: see `category_of`.
        marked: every region is marked wherever the host launches by itself.
        rest: the phase of what no phase mark covers.
    """
    phase_spans = list(phases)
    when, kind, region = Timeline(phase_spans), Timeline(kinds), Timeline(regions)
    edges = [(s.start, s.end) for s in phase_spans] + [(e.start, e.end) for e in recorded.events]
    if not edges:
        return Breakdown(0.0, 0.0)
    result = Breakdown(min(start for start, _ in edges), max(end for _, end in edges))
    until = result.start
    for event in recorded.events:
        category = category_of(event.name, region.at(event.launched), marked=marked and not event.graph)
        if category == ATTENTION:
            category = _ATTENTION_OF.get(kind.at(event.launched), ATTENTION)
        name = result.names.setdefault((event.name, category), NameTime())
        name.microseconds += event.end - event.start
        name.count += 1
        _idle(result, when, until, event.start, rest)
        result.add(when.at(event.launched) or rest, category, event.end - max(event.start, until))
        until = max(until, event.end)
    _idle(result, when, until, result.end, rest)
    return result


def _idle(result: Breakdown, when: Timeline, start: float, end: float, rest: str) -> None:
    if end > start:
        for label, share in when.shares(start, end):
            result.add(label or rest, IDLE, share)
