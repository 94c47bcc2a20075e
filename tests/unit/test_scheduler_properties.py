"""Random workloads against the scheduler: whatever the settings, each request's output is the one it has alone.

How many workloads a run executes stands in `WORKLOADS`, 2,600 in all; the last test counts them. The environment
variable FLATBED_WORKLOADS multiplies that for a longer soak. When a test fails, hypothesis prints the smallest workload
that does, and a `@reproduce_failure` line. What is checked, step by step, is in mock_device.py.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mock_device import VOCABULARY, Job, Settings, Simulation

WORKLOADS = {
    "anything": 900,
    "tight and ahead": 700,
    "twins": 400,
    "memory refused": 300,
    "weights change and steps fail": 300,
}
_FACTOR = int(os.environ.get("FLATBED_WORKLOADS", "1"))
_executed: Counter[str] = Counter()


@dataclass(frozen=True)
class Arrival:
    """A job, the step it arrives in, and after how many further steps it is cancelled (None: never)."""

    step: int
    prompt: int
    extra: int
    max_new_tokens: int
    seed: int
    eos: frozenset[int]
    stop_after: int | None
    cancelled_after: int | None
    fragile: bool


@dataclass(frozen=True)
class Workload:
    """Everything that one simulation depends on.

    Attributes:
        prompts: lengths and kinds of the prompts that the arrivals choose from. Prompts of one kind begin alike.
        noise: seed of when results are fetched early.
        events: (step, "weights" | "trim" | "failure").
    """

    settings: Settings
    prompts: tuple[tuple[int, int], ...]
    arrivals: tuple[Arrival, ...]
    noise: int
    events: tuple[tuple[int, str], ...] = field(default=())


def _prompt(kind: int, length: int, extra: int) -> list[int]:
    tokens = [random.Random(f"{kind} {at}").randrange(3) for at in range(length)]
    return tokens + [extra] * (extra > 0)


def simulate(name: str, workload: Workload) -> Simulation:
    """Runs a workload to its end. Arrivals that could never fit are cut down to what does."""
    _executed[name] += 1
    setup = workload.settings
    room = setup.block_size * (setup.num_blocks if setup.grow_limit is None else setup.grow_limit)
    simulation = Simulation(setup, random.Random(workload.noise))
    arrivals = sorted(workload.arrivals, key=lambda arrival: arrival.step)
    cancellations = []
    events = sorted(workload.events)
    clock, most = 0, 1000 + 20 * room * len(arrivals)
    while arrivals or cancellations or events or simulation.scheduler.has_work or simulation.flight:
        clock += 1
        assert clock < most, "does not come to an end"
        while arrivals and arrivals[0].step <= clock:
            a = arrivals.pop(0)
            kind, length = workload.prompts[a.prompt % len(workload.prompts)]
            prompt = _prompt(kind, min(length, room), a.extra)[:room]
            new = min(a.max_new_tokens, room + 1 - len(prompt))
            job = Job(prompt, new, eos=a.eos, seed=a.seed, stop_after=a.stop_after, fragile=a.fragile)
            sequence = simulation.submit(job)
            if a.cancelled_after is not None:
                cancellations.append((clock + a.cancelled_after, sequence))
        for due in [c for c in cancellations if c[0] <= clock]:
            cancellations.remove(due)
            simulation.end(due[1], "cancelled")
        while events and events[0][0] <= clock:
            _, event = events.pop(0)
            if event == "weights":
                simulation.change_weights()
            elif event == "failure":
                simulation.fail_step()
            else:
                while simulation.flight:
                    simulation.commit()
                simulation.trim()
        simulation.step()
    simulation.check_results()
    simulation.trim()
    assert simulation.scheduler.pool.watermark == 0
    return simulation


# ---- what is drawn ---------------------------------------------------------------------------------------------------

_SETTINGS = st.builds(
    Settings,
    num_blocks=st.integers(1, 24),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    token_budget=st.sampled_from([1, 2, 3, 5, 8, 17, 64, 4096]),
    max_requests=st.sampled_from([1, 2, 4, 16]),
    prefill_first=st.booleans(),
    prefix_cache=st.sampled_from([True, True, True, False]),
    depth=st.integers(1, 3),
    keeps_released=st.booleans(),
)
_EVENT = st.tuples(st.integers(1, 40), st.sampled_from(["weights", "trim", "failure"]))
_EVENTS = st.lists(_EVENT, max_size=4).map(tuple)


def _arrivals(
    *,
    least: int = 1,
    most: int = 12,
    extra: tuple[int, ...] = (0, 0, 1, 2),
    last: int = 25,
    new: tuple[int, int] = (1, 24),
) -> st.SearchStrategy[tuple[Arrival, ...]]:
    seldom = st.sampled_from([*[None] * 12, 1, 2, 5, 12])
    arrival = st.builds(
        Arrival,
        step=st.integers(0, last),
        prompt=st.integers(0, 3),
        extra=st.sampled_from(extra),
        max_new_tokens=st.integers(*new),
        seed=st.integers(0, 2),
        eos=st.sampled_from([frozenset()] * 4 + [frozenset([0]), frozenset([1, VOCABULARY - 1])]),
        stop_after=seldom,
        cancelled_after=seldom,
        fragile=st.sampled_from([False] * 7 + [True]),
    )
    return st.lists(arrival, min_size=least, max_size=most).map(tuple)


def _prompts(longest: int = 60, kinds: int = 3) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    return st.lists(st.tuples(st.integers(1, kinds), st.integers(1, longest)), min_size=1, max_size=4).map(tuple)


_NOISE = st.integers(0, 2**16)


def _many(name: str) -> settings:
    return settings(
        max_examples=WORKLOADS[name] * _FACTOR,
        deadline=None,
        derandomize=False,
        print_blob=True,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


# ---- the properties --------------------------------------------------------------------------------------------------


@_many("anything")
@given(st.builds(Workload, _SETTINGS, _prompts(), _arrivals(least=2), _NOISE))
def test_every_output_is_the_one_of_a_run_alone(workload: Workload) -> None:
    simulate("anything", workload)


@_many("tight and ahead")
@given(
    st.builds(Workload, _SETTINGS, _prompts(longest=12), _arrivals(least=4, most=14, last=6, new=(4, 40)), _NOISE),
    st.integers(4, 10),
    st.integers(1, 4),
    st.sampled_from([4, 7, 16, 64]),
)
def test_preemption_with_steps_under_way(workload: Workload, num_blocks: int, block_size: int, budget: int) -> None:
    setup = replace(
        workload.settings, num_blocks=num_blocks, block_size=block_size, token_budget=budget, max_requests=16
    )
    simulate("tight and ahead", replace(workload, settings=setup))


@_many("twins")
@given(st.builds(Workload, _SETTINGS, _prompts(longest=40, kinds=1), _arrivals(least=4, most=14, extra=(0,)), _NOISE))
def test_twins_and_common_beginnings(workload: Workload) -> None:
    setup = replace(workload.settings, prefix_cache=True, num_blocks=max(3, workload.settings.num_blocks))
    simulate("twins", replace(workload, settings=setup))


@_many("memory refused")
@given(
    st.builds(Workload, _SETTINGS, _prompts(longest=30), _arrivals(least=3), _NOISE, _EVENTS),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), max_size=3),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_memory_that_cannot_be_had_now_or_ever(
    workload: Workload, short: list[tuple[int, int]], grow_limit: int | None
) -> None:
    periods = tuple((first, first + length) for first, length in short)
    limit = None if grow_limit is None else min(grow_limit, workload.settings.num_blocks)
    setup = replace(workload.settings, short=periods, grow_limit=limit)
    simulate("memory refused", replace(workload, settings=setup))


@_many("weights change and steps fail")
@given(st.builds(Workload, _SETTINGS, _prompts(longest=40, kinds=2), _arrivals(least=3), _NOISE, _EVENTS))
def test_forgotten_prefixes_and_failed_steps_leave_nothing_behind(workload: Workload) -> None:
    simulate("weights change and steps fail", workload)


def test_at_least_2000_workloads_were_executed() -> None:
    if len(_executed) < len(WORKLOADS):
        pytest.skip("counts only when the whole file runs")
    assert sum(_executed.values()) >= 2000, dict(_executed)
