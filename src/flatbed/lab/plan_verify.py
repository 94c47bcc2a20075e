"""`flatbed plan --verify`: the planned capacity, half and double of it, on the workload and on two variants of it.

Both variants have about as many tokens as the workload: a capacity that was chosen well in tokens should hold for them.

==============  =================================================================================================
the workload    as it was planned for
long            an eighth of the requests, prompts eight times as long (as near the model's limit as they fit)
concurrent      four times the requests, prompts and completions a quarter as long
==============  =================================================================================================

The three settings of an engine share a process and take turns, so that what differs between processes and what drifts
on the machine meets all alike; calls go on until a setting that looks slower is told from the fastest one, or is not.
(Engines that hold their capacity, vLLM say, run one after the other: of a drift there nothing can be seen.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import EngineSpec, Settings, Setup, adapter_class
from flatbed.lab.measure import Experiment, Spawn, measure
from flatbed.lab.plan import EnginePlan, Plan
from flatbed.lab.samples import rank_sum_p
from flatbed.lab.summary import FLAT, Point, Stat, Summary, summarise
from flatbed.lab.workloads import LabRequest, Workload

HALF, PLANNED, DOUBLE = "half", "planned", "double"
LONGER, MORE = 8, 4

REPEATS, MOST_REPEATS = 3, 15

# A setting is called slower when calls that are no slower would look like it no more often than this.
_CHANCE = 0.01
_LEAST_TO_TELL = 5  # calls of each of two settings, below which no order of them is as rare as that


@dataclass(frozen=True)
class Verdict:
    """What one setting did on one workload.

    Attributes:
        engine, workload: which.
        setting: HALF, PLANNED or DOUBLE of the planned capacity.
        tokens: that capacity.
        seconds: median of the steady calls; None when it was not measured.
        times: `seconds` over those of the fastest of the three settings.
        preempted: samples that were put back in one call; None when the engine does not tell.
        held: all requests were completed, none was preempted, and it was not found slower than another setting.
        why: what it was that did not hold, a few words each.
        noise: it looks slower than another setting, and `calls` calls cannot tell that from noise.
        calls: how many steady calls it made.
    """

    engine: str
    workload: str
    setting: str
    tokens: int
    seconds: float | None
    times: float | None
    preempted: int | None
    held: bool
    why: tuple[str, ...]
    noise: bool = False
    calls: int = 0


def variants(workload: Workload, longest: int | None) -> list[Workload]:
    """The workload, its long and its concurrent variant, for a model of so many positions."""
    fewer = workload.requests[: max(1, len(workload.requests) // LONGER)]
    long = [LabRequest(_longer(r, longest), r.new_tokens, r.arrival_s) for r in fewer]
    more = [
        LabRequest(_rotated(r.prompt, turn)[: max(1, len(r.prompt) // MORE)], max(1, r.new_tokens // MORE), r.arrival_s)
        for turn in range(MORE)
        for r in workload.requests
    ]
    return [
        workload,
        replace(workload, name=f"{workload.name}, long", requests=tuple(long)),
        replace(workload, name=f"{workload.name}, concurrent", requests=tuple(more)),
    ]


def _longer(request: LabRequest, longest: int | None) -> list[int]:
    prompt = [token for turn in range(LONGER) for token in _rotated(request.prompt, turn)]
    return prompt if longest is None else prompt[: longest - request.new_tokens]


def _rotated(prompt: Sequence[int], turn: int) -> list[int]:
    """Another prompt of the same tokens, so that no prefix cache takes it for the first."""
    at = turn % len(prompt)
    return [*prompt[at:], *prompt[:at]]


def verify(
    plan: Plan,
    setup: Setup,
    workload: Workload,
    longest: int | None,
    *,
    repeats: int = REPEATS,
    most_repeats: int = MOST_REPEATS,
    time_limit: float = 600.0,
    pythons: Mapping[str, str] | None = None,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    spawn: Spawn | None = None,
) -> list[Verdict]:
    """Measures each planned engine, in processes of its own.

    Args:
        setup: where to run; its `longest` is set here.
        longest: positions of the model.
        repeats: steady calls of each setting, at least 2.
        most_repeats: up to how many are made until a difference is told from noise.
        pythons, environments, say, spawn: see `measure.Experiment` and `measure.measure`.

    Raises ConfigError when no engine of the plan can run the model, or one call is to be judged without a second.
    """
    if repeats < 2:
        raise ConfigError(f"--repeats must be at least 2 here, got {repeats}: one figure alone has no spread")
    if most_repeats < repeats:
        raise ConfigError(f"--most-repeats must be at least the {repeats} of --repeats, got {most_repeats}")
    able = [engine for engine in plan.engines if engine.refusal is None]
    if not able:
        raise ConfigError("there is nothing to verify: no engine of the plan can run this model")
    workloads = variants(workload, longest)
    setup = replace(setup, longest=max(one.longest for one in workloads))
    verdicts: list[Verdict] = []
    for engine in able:
        spec = EngineSpec.parse(engine.engine)
        capacities = _capacities(engine)
        turns = adapter_class(spec).holding(spec) != "always"
        experiment = Experiment(
            "capacity",
            setup,
            [spec],
            [Settings(capacity=_text(tokens), token_budget=plan.token_budget) for tokens in capacities.values()],
            workloads,
            repeats=repeats if turns else max(repeats, min(most_repeats, _LEAST_TO_TELL)),
            settled=settled,
            most_repeats=most_repeats,
            shared=True,
            order="turns" if turns else "sequence",
            time_limit=time_limit,
            latency=False,
            pythons=_of(spec, pythons or {}),
            environments=_of(spec, environments or {}),
        )
        for summary in summarise(measure(experiment, say=say, spawn=spawn)):
            verdicts += _judged(summary, capacities)
    return verdicts


def _capacities(engine: EnginePlan) -> dict[str, int]:
    """The capacities to try, in tokens: what a block is differs from engine to engine."""
    return {HALF: max(engine.block_tokens, engine.tokens // 2), PLANNED: engine.tokens, DOUBLE: 2 * engine.tokens}


def _text(tokens: int) -> str:
    return f"{tokens} tokens"


def _of(spec: EngineSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in (spec.name, spec.key)}


def _judged(summary: Summary, capacities: Mapping[str, int]) -> list[Verdict]:
    steady = [point.steady for point in summary.points if point.steady is not None]
    fastest = min(steady, key=lambda stat: stat.median, default=None)
    points = {point.label: point for point in summary.points}
    return [
        _judge(summary, setting, tokens, points[_text(tokens)], fastest)
        for setting, tokens in capacities.items()
        if _text(tokens) in points
    ]


def _judge(summary: Summary, setting: str, tokens: int, point: Point, fastest: Stat | None) -> Verdict:
    why = list(point.failures)
    if point.preemptions:
        why.append(f"{point.preemptions:,} preempted")
    seconds = times = None
    noise = False
    if point.steady is not None and fastest is not None:
        seconds = point.steady.median
        times = seconds / fastest.median
        slower = _slower(point.steady.values, fastest.values)
        noise = slower is None
        if slower:
            why.append(f"{times:.2f} times as long as the fastest setting")
    held = seconds is not None and not why
    name = summary.workload["name"]
    calls = 0 if point.steady is None else point.steady.count
    preempted = point.preemptions
    return Verdict(summary.engine, name, setting, tokens, seconds, times, preempted, held, tuple(why), noise, calls)


def _slower(seconds: Sequence[float], fastest: Sequence[float]) -> bool | None:
    """Whether a setting takes more than FLAT times as long as the fastest one; None when that cannot be told."""
    if statistics.median(seconds) <= FLAT * statistics.median(fastest):
        return False
    return True if rank_sum_p([one / FLAT for one in seconds], fastest) <= _CHANCE else None


def settled(samples: Sequence[Sequence[float]]) -> bool:
    """Whether each of the settings, by the seconds of its calls, is told from the fastest or does not look slower."""
    fastest = min(samples, key=statistics.median)
    return all(_slower(seconds, fastest) is not None for seconds in samples)


def conclusions(verdicts: Sequence[Verdict]) -> list[str]:
    """Whether each engine's planned setting held, a sentence each."""
    said = []
    for engine in dict.fromkeys(verdict.engine for verdict in verdicts):
        planned = [verdict for verdict in verdicts if verdict.engine == engine and verdict.setting == PLANNED]
        good = "; ".join(verdict.workload for verdict in planned if verdict.held and not verdict.noise)
        open_ = "; ".join(
            f"{one.workload} ({one.times:.2f} times as long as the fastest setting, in the noise of {one.calls} calls)"
            for one in planned
            if one.held and one.noise
        )
        bad = "; ".join(f"{one.workload} ({'; '.join(one.why) or 'not measured'})" for one in planned if not one.held)
        told = (("held on", good), ("cannot be told on", open_), ("did not hold on", bad))
        parts = [f"{word} {names}" for word, names in told if names]
        setting = f"{planned[0].tokens:,} tokens" if planned else "as planned"
        said.append(f"{engine}, {setting}: {', '.join(parts) or 'not measured'}")
    return said


def held(verdicts: Sequence[Verdict]) -> bool:
    """Whether no planned setting was found not to hold, on any workload."""
    return all(verdict.held for verdict in verdicts if verdict.setting == PLANNED)
