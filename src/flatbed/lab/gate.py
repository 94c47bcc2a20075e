"""Whether engines pass: nothing may grow with its capacity by more than a limit. For CI, and for pytest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatbed.errors import ConfigError
from flatbed.lab import worker
from flatbed.lab.engines.base import EngineSpec, Settings, Setup, adapter_class
from flatbed.lab.measure import Experiment, InProcess, measure
from flatbed.lab.summary import FLAT, Summary, seconds, summarise, times
from flatbed.lab.workloads import Workload, make


@dataclass(frozen=True)
class GateResult:
    """What a gate says.

    Attributes:
        failed: what grew by more than the limit, one sentence each.
        unjudged: what could not be judged, and why.
    """

    failed: tuple[str, ...]
    unjudged: tuple[str, ...]


def check_limit(limit: float) -> None:
    """Raises ConfigError for a limit that nothing could pass."""
    if not limit >= 1:
        raise ConfigError(f"the gate must be at least 1, got {limit:g}")


def judge(summaries: Iterable[Summary], limit: float) -> GateResult:
    """Which engines grow by more than `limit`, beyond their noise.

    Steady calls are judged always, cold starts when each was measured more than once (one figure has no spread).
    References have nothing to judge.
    """
    failed, unjudged = [], []
    for summary in summaries:
        if summary.reference:
            continue
        name = f"{summary.engine} on {summary.workload['name']}"
        if summary.growth() is None:
            unjudged.append(f"{name}: {summary.verdict(limit)}")
        for cold, what in ((False, "steady calls"), (True, "cold starts")):
            growth = summary.growth(cold=cold)
            if growth is None or growth.ratio <= limit or growth.noise or (cold and growth.once):
                continue
            where = f", {growth.phase}" if growth.phase else ""
            failed.append(
                f"{name}: {what} grow {times(growth.ratio)} from {growth.before.label} to {growth.after.label}{where} "
                f"(the gate is {limit:g})"
            )
    return GateResult(tuple(failed), tuple(unjudged))


def assert_flat(
    model: Any,
    *,
    engine: str = "flatbed",
    workload: str | Workload = "article",
    capacities: Sequence[str] = ("64 blocks", "50%", "90%"),
    limit: float = FLAT,
    repeats: int = 5,
    warm: int = 1,
    scale: float = 1.0,
    device: str = "auto",
    dtype: str = "auto",
) -> str:
    """Asserts, in pytest say, that an engine's time does not grow with its capacity. Returns the verdict.

    Everything runs in this process, the capacities in turn where the engine holds no memory of their size.

    Args:
        model: a loaded Transformers model, or the name of one (see `flatbed.lab.models`).
        engine: as for `flatbed bench --engine`.
        workload: a name or file as for `--workload`, or a `Workload`.
        limit: the most that the median call may grow over the smallest capacity that holds the workload.
        repeats, warm: calls that count, and calls before them that do not.
        scale: shrinks a named workload.
        device, dtype: for a model that is given by name.

    Raises AssertionError with the verdict and all figures when it grows by more, or when any of it failed; ConfigError
    for what cannot be understood.
    """
    from flatbed.lab import models

    check_limit(limit)
    by_name = isinstance(model, str)
    config = models.load_config(model) if by_name else model.config
    longest = models.longest_of(config)
    work = (
        workload
        if isinstance(workload, Workload)
        else make(workload, models.vocabulary_of(config), longest, None, scale)
    )
    loaded = models.load(model, device, dtype) if by_name else (model, None)
    name = model if by_name else type(model).__name__
    setup = Setup(name, str(loaded[0].device), str(loaded[0].dtype).removeprefix("torch."), work.longest)
    spec = EngineSpec.parse(engine)
    experiment = Experiment(
        "capacity",
        setup,
        [spec],
        [Settings(capacity) for capacity in capacities],
        [work],
        warm=warm,
        repeats=repeats,
        latency=False,
        order="sequence" if adapter_class(spec).holding(spec) == "always" else "turns",
    )
    records = measure(experiment, spawn=lambda *what: InProcess(worker.Session(*what, loaded=loaded)))
    (summary,) = summarise(records)
    result = judge([summary], limit)
    problems = [*result.failed, *result.unjudged, *summary.failures]
    if problems:
        rows = "\n".join(
            f"  {p.label:>16}  {'not measured' if p.steady is None else seconds(p.steady.median)}"
            for p in summary.points
        )
        raise AssertionError(f"{'; '.join(problems)}\n{rows}")
    return summary.verdict(limit)
