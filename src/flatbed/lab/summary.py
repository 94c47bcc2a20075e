"""What records say: figures for each engine and setting, and a verdict in words.

The reference of an engine is the smallest capacity that holds the whole workload at once; below it fewer requests run
together, which takes longer for a good reason. Growth is the median of a larger capacity over that of the reference.
A difference between samples that cannot be told apart (`Stat.overlaps`) is called noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatbed.lab.engines.base import PARTS
from flatbed.lab.measure import IN_SEQUENCE, OK, setting_label
from flatbed.lab.samples import rank_sum_p

# An engine that grows by no more than this is called flat.
FLAT = 1.05

# Samples whose order would come about by chance as often as this are not told apart.
_CHANCE = 0.05

PART_NAMES = {
    "construction": "construction",
    "warm_up": "warm-up",
    "generation": "generation",
    "teardown": "teardown",
}


@dataclass(frozen=True)
class Stat:
    """A sample of seconds: its median, quartiles (the range, of fewer than four), least and greatest, size, and all."""

    median: float
    low: float
    high: float
    least: float
    greatest: float
    count: int
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat | None:
        """None for no values."""
        if not values:
            return None
        low, high = min(values), max(values)
        if len(values) >= 4:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, min(values), max(values), len(values), tuple(values))

    def overlaps(self, other: Stat) -> bool:
        """Whether the two cannot be told apart. One figure alone has no spread: nothing overlaps with it.

        Spreads that touch overlap. So do those of two or three calls that have less between them than one of them
        is wide, because so few calls show only a part of their spread; of more, those that a rank-sum test cannot tell.
        """
        if min(self.count, other.count) == 1:
            return False
        gap = max(self.low, other.low) - min(self.high, other.high)
        if gap <= 0:
            return True
        if min(self.count, other.count) < 4:
            return gap < max(self.high - self.low, other.high - other.low)
        longer, shorter = (self, other) if self.median > other.median else (other, self)
        return rank_sum_p(longer.values, shorter.values) > _CHANCE


@dataclass
class Point:
    """One engine at one setting, on one workload.

    Attributes:
        label: the varied control, as it was written.
        x: where it stands on the axis: tokens of capacity, or the token budget; None where that is not known.
        steady: of whole calls after the first.
        cold: construction, warm-up and the first call together, as the first in their process.
        parts: median seconds by phase of a steady call; None when the engine's calls could not be split.
        cold_parts: of a cold start, likewise.
        memory: the most of each figure over all calls.
        failures: what went wrong, one sentence each.
        outcomes: the kinds of these failures, as in the records.
    """

    label: str
    settings: dict[str, Any]
    x: float | None = None
    steady: Stat | None = None
    cold: Stat | None = None
    first: float | None = None
    parts: dict[str, float] | None = None
    cold_parts: dict[str, float] | None = None
    tokens_per_s: float | None = None
    first_token_s: dict[str, float] | None = None
    between_tokens_s: dict[str, float] | None = None
    preemptions: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    engine_settings: dict[str, Any] = field(default_factory=dict)
    order: str = IN_SEQUENCE
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Growth:
    """How much longer one setting takes than another.

    Attributes:
        ratio: of the medians.
        noise: whether the spreads overlap.
        once: whether one of the two is a single figure, whose spread nobody knows.
        phase: where the difference lies, in words; empty when that is not known.
    """

    before: Point
    after: Point
    ratio: float
    noise: bool
    once: bool
    phase: str


@dataclass
class Summary:
    """One engine on one workload: its points, in order, and what they say."""

    engine: str
    sweep: str
    workload: dict[str, Any]
    reference: bool
    points: list[Point]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> list[Point]:
        return [point for point in self.points if point.steady is not None]

    @property
    def failures(self) -> list[str]:
        """What went wrong, one sentence for each."""
        return [f"{point.label}: {failure}" for point in self.points for failure in point.failures]

    @property
    def outcomes(self) -> set[str]:
        """The kinds of what went wrong."""
        return set().union(*(point.outcomes for point in self.points))

    def growth(self, *, cold: bool = False) -> Growth | None:
        """The most that any setting costs over the reference; None with fewer than two figures."""
        fitting = [point for point in self._comparable if _stat(point, cold) is not None]
        if len(fitting) < 2:
            return None
        if self.sweep == "capacity":
            before, others = fitting[0], fitting[1:]
        else:  # of a budget or a schedule none is the natural one: the best counts
            before = min(fitting, key=lambda point: _median(point, cold))
            others = [point for point in fitting if point is not before]
        after = max(others, key=lambda point: _median(point, cold))
        return _growth(before, after, cold)

    @property
    def _comparable(self) -> list[Point]:
        """Points that differ in nothing but the control: with capacity, those that hold the workload at once."""
        if self.sweep != "capacity":
            return self.points
        return [point for point in self.points if not self._crowded(point)]

    @property
    def crowded(self) -> list[Point]:
        """Measured points whose capacity is too small for the whole workload at once."""
        return [point for point in self.measured if self.sweep == "capacity" and self._crowded(point)]

    def _crowded(self, point: Point) -> bool:
        return point.x is not None and point.x < self.workload["live_tokens"]

    def verdict(self, limit: float = FLAT) -> str:
        """In words, with its numbers. `limit`: up to what an engine is called flat."""
        if not self.measured:
            return f"not measured: {'; '.join(self.failures) or 'no steady call came back'}"
        if self.reference:
            return f"has no {_control(self.sweep)}: {seconds(_median(self.measured[0], False))}, shown as a reference"
        sentences = [self._steady_verdict(limit), self._cold_verdict(limit), self._crowded_verdict(), *self.failures]
        return "; ".join(filter(None, sentences))

    def _steady_verdict(self, limit: float) -> str:
        growth = self.growth()
        if growth is None:
            return "not judged: only one setting could be compared"
        where = f", {growth.phase}" if growth.phase else ""
        before, after = growth.before.label, growth.after.label
        if self.sweep != "capacity":
            if growth.ratio <= limit or growth.noise:
                return f"{_flat(growth, limit)}: {times(growth.ratio)} between {before} and {after}"
            best = f"best at {before} ({seconds(_median(growth.before, False))})"
            return f"{best}; {after} takes {times(growth.ratio)}{where}"
        span = f"{times(growth.ratio)} from {before} to {after}"
        return f"{_flat(growth, limit)}: {span}" if growth.ratio <= limit or growth.noise else f"grows: {span}{where}"

    def _cold_verdict(self, limit: float) -> str:
        growth = self.growth(cold=True)
        if growth is None or self.sweep != "capacity":
            return ""
        once = ", measured once" if growth.once else ""
        if growth.ratio <= limit or growth.noise:
            return f"cold starts {_flat(growth, limit)}: {times(growth.ratio)}{once}"
        where = f", {growth.phase}" if growth.phase else ""
        return (
            f"cold starts grow {times(growth.ratio)}, from {seconds(_median(growth.before, True))} at "
            f"{growth.before.label} to {seconds(_median(growth.after, True))} at {growth.after.label}{where}{once}"
        )

    def _crowded_verdict(self) -> str:
        fitting = [point for point in self._comparable if point.steady is not None]
        if not self.crowded or not fitting:
            return ""
        base = _median(fitting[0], False)
        said = ", ".join(f"{point.label} {times(_median(point, False) / base)}" for point in self.crowded)
        return f"too small for the whole workload at once: {said}"


def summarise(records: Iterable[Mapping[str, Any]]) -> list[Summary]:
    """One summary for each workload and engine, in the order of the records."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    everywhere: list[Mapping[str, Any]] = []  # a failure to load is one on every workload
    for record in records:
        if record["workload"] is None:
            everywhere.append(record)
        else:
            grouped.setdefault((record["workload"]["name"], record["engine"]), []).append(record)
    workloads = {name: rows[0]["workload"] for (name, _), rows in grouped.items()}
    for record in everywhere:
        for name in workloads or {"": None}:
            grouped.setdefault((name, record["engine"]), []).append(record)
    ordered = sorted(grouped.items(), key=lambda item: list(workloads).index(item[0][0]) if workloads else 0)
    return [_summary(engine, workloads.get(name, _NOTHING), rows) for (name, engine), rows in ordered]


# Stands for the workload where nothing got as far as running one.
_NOTHING: dict[str, Any] = {
    "name": "",
    "live_tokens": 0,
    "requests": 0,
    "prompt_tokens": 0,
    "new_tokens": 0,
    "longest": 0,
}


def _summary(engine: str, workload: Mapping[str, Any], records: list[Mapping[str, Any]]) -> Summary:
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_setting.setdefault(_label(record), []).append(record)
    points = [_point(label, rows) for label, rows in by_setting.items()]
    if records[0]["sweep"] != "schedule":
        points.sort(key=lambda point: math.inf if point.x is None else point.x)
    versions = next((dict(record["versions"]) for record in records if record["versions"]), {})
    return Summary(engine, records[0]["sweep"], dict(workload), bool(records[0]["reference"]), points, versions)


def _label(record: Mapping[str, Any]) -> str:
    return setting_label(record["settings"], record["sweep"], record["reference"])


_PHASES = {
    "start": "start",
    "first": "first call",
    "warm": "warm calls",
    "steady": "steady calls",
    "latency": "call for latency",
}


def _point(label: str, records: list[Mapping[str, Any]]) -> Point:
    point = Point(label, dict(records[0]["settings"]))
    for record in records:
        if record["outcome"] != OK:
            when = f" in the {_PHASES[record['phase']]}" if record["phase"] in _PHASES else ""
            point.outcomes.add(record["outcome"])
            _add(point.failures, f"{record['outcome']}{when}: {record['error']}")
        for note in record["notes"]:
            _add(point.notes, note)
    fine = [record for record in records if record["outcome"] == OK]
    _fill_times(point, fine)
    _fill_the_rest(point, [record for record in fine if record["memory"]])
    sweep = records[0]["sweep"]
    if sweep == "capacity":
        point.x = point.memory.get("capacity_tokens")
    elif sweep == "token_budget" and not records[0]["reference"]:
        point.x = records[0]["settings"]["token_budget"]
    return point


def _fill_times(point: Point, fine: list[Mapping[str, Any]]) -> None:
    steady = [record for record in fine if record["phase"] == "steady"]
    point.steady = Stat.of([record["seconds"] for record in steady])
    point.parts = _median_parts([record["parts"] for record in steady])
    starts = _cold_starts(fine)
    point.cold = Stat.of([start["seconds"] + first["seconds"] for start, first in starts])
    point.cold_parts = _median_parts([_added(start["parts"], first["parts"]) for start, first in starts])
    point.first = statistics.median([first["seconds"] for _, first in starts]) if starts else None
    rates = [record["tokens_per_s"] for record in steady if record["tokens_per_s"]]
    point.tokens_per_s = statistics.median(rates) if rates else None
    preempted = [record["preemptions"] for record in steady if record["preemptions"] is not None]
    point.preemptions = max(preempted) if preempted else None


def _fill_the_rest(point: Point, calls: list[Mapping[str, Any]]) -> None:
    for record in calls:
        point.order = record["order"]
        point.engine_settings = record["engine_settings"] or point.engine_settings
        point.first_token_s = record["first_token_s"] or point.first_token_s
        point.between_tokens_s = record["between_tokens_s"] or point.between_tokens_s
        for name, value in record["memory"].items():
            if value is not None:
                point.memory[name] = max(value, point.memory.get(name, 0))


def _cold_starts(records: list[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each start with the first call that followed it."""
    fresh = [record for record in records if record.get("fresh", True)]  # older records have no such field
    starts = {record["cold_round"]: record for record in fresh if record["phase"] == "start"}
    firsts = {record["cold_round"]: record for record in fresh if record["phase"] == "first"}
    return [(starts[turn], firsts[turn]) for turn in starts if turn in firsts]


def _added(start: Mapping[str, float] | None, call: Mapping[str, float] | None) -> dict[str, float] | None:
    if start is None or call is None:
        return None
    return {part: start.get(part, 0.0) + call.get(part, 0.0) for part in PARTS}


def _median_parts(parts: list[Any]) -> dict[str, float] | None:
    if not parts or any(one is None for one in parts):
        return None
    return {part: statistics.median(one.get(part, 0.0) for one in parts) for part in PARTS}


def _stat(point: Point, cold: bool) -> Stat | None:
    return point.cold if cold else point.steady


def _known(point: Point, cold: bool) -> Stat:
    """The figure of a point that is known to have one."""
    stat = _stat(point, cold)
    assert stat is not None
    return stat


def _median(point: Point, cold: bool) -> float:
    return _known(point, cold).median


def _growth(before: Point, after: Point, cold: bool) -> Growth:
    one, other = _known(before, cold), _known(after, cold)
    parts = (before.cold_parts, after.cold_parts) if cold else (before.parts, after.parts)
    phase = where_it_grows(*parts) if other.median > one.median else ""
    once = min(one.count, other.count) == 1
    return Growth(before, after, other.median / one.median, one.overlaps(other), once, phase)


def where_it_grows(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> str:
    """Which phases a difference lies in: "all of it in warm-up", "most of it (80%) in construction", ..."""
    if before is None or after is None:
        return "not split by phase"
    grown = {part: after[part] - before[part] for part in PARTS if after[part] > before[part]}
    total = sum(grown.values())
    if total <= 0:
        return ""
    (part, most), *rest = sorted(grown.items(), key=lambda item: item[1], reverse=True)
    name, share = PART_NAMES[part], most / total
    if share >= 0.95:
        return f"all of it in {name}"
    if share >= 0.6:
        return f"most of it ({share:.0%}) in {name}"
    second, less = rest[0]
    return f"{share:.0%} of it in {name}, {less / total:.0%} in {PART_NAMES[second]}"


def times(ratio: float) -> str:
    """A ratio as it is written: `1.01x`, `19x`."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def seconds(value: float) -> str:
    """Seconds with three digits that count: `0.144 s`, `31.6 s`."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value * 1e3:.2f} ms" if value < 0.01 else f"{value:.{digits}f} s"


def _flat(growth: Growth, limit: float) -> str:
    """How to call a growth that is none."""
    return "flat" if growth.ratio <= limit else "no growth beyond the noise (the spreads overlap)"


def _control(sweep: str) -> str:
    return sweep.replace("_", " ")


def _add(sentences: list[str], sentence: str) -> None:
    if sentence not in sentences:
        sentences.append(sentence)
