"""`flatbed plan --verify`: when a setting is called slower, and when that cannot be told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flatbed.lab.plan_verify import DOUBLE, HALF, PLANNED, Verdict, _judged, conclusions, held, settled
from flatbed.lab.summary import Point, Stat, Summary

CAPACITIES = {HALF: 100, PLANNED: 200, DOUBLE: 400}


def judged(half: list[float], planned: list[float], double: list[float], **more: Any) -> dict[str, Verdict]:
    points = [
        Point(f"{tokens} tokens", {}, steady=Stat.of(seconds), **more)
        for tokens, seconds in zip(CAPACITIES.values(), (half, planned, double), strict=True)
    ]
    summary = Summary("flatbed", "capacity", {"name": "article"}, False, points)
    return {verdict.setting: verdict for verdict in _judged(summary, CAPACITIES)}


def test_a_difference_of_noise_is_not_called_real() -> None:
    """A machine that does other things as well: every call takes up to half as long again, at any setting."""
    draw = random.Random(1)
    wrong = 0
    for _ in range(200):
        samples = [[draw.uniform(1.0, 1.5) for _ in range(6)] for _ in CAPACITIES]
        wrong += not all(verdict.held for verdict in judged(*samples).values())
    assert wrong <= 8, "about one in a hundred for each of two comparisons"


def test_a_real_difference_is_found_and_settles_the_matter() -> None:
    draw = random.Random(2)
    samples = [[draw.uniform(low, 1.5 * low) for _ in range(8)] for low in (2.0, 1.0, 1.0)]
    verdicts = judged(*samples)
    assert settled(samples[:2])
    assert not verdicts[HALF].held
    assert "times as long as the fastest setting" in verdicts[HALF].why[0]
    assert not verdicts[HALF].noise


def test_few_calls_do_not_tell_and_more_are_asked_for() -> None:
    few = [[1.2, 1.21, 1.22], [1.0, 1.01, 1.02]]
    assert not settled(few), "three and three stand in this order by chance once in twenty times"
    assert settled([[1.2, 1.21, 1.22, 1.2, 1.21], [1.0, 1.01, 1.02, 1.0, 1.01]])
    assert settled([[1.03, 1.04], [1.0, 1.01]]), "what does not look slower need not be told from anything"


def test_what_cannot_be_told_is_said() -> None:
    verdicts = judged([1.0, 1.1, 0.9], [1.2, 1.0, 1.3], [1.1, 1.0, 1.0])
    planned = verdicts[PLANNED]
    assert planned.noise
    assert planned.held
    assert planned.times == pytest.approx(1.2)
    (said,) = conclusions(list(verdicts.values()))
    assert said == (
        "flatbed, 200 tokens: cannot be told on article "
        "(1.20 times as long as the fastest setting, in the noise of 3 calls)"
    )
    assert held(list(verdicts.values())), "it was not found not to hold"


def test_failures_and_preemptions_do_not_hold_whatever_the_time() -> None:
    verdicts = judged([1.0] * 3, [1.0] * 3, [1.0] * 3, preemptions=2)
    assert verdicts[PLANNED].why == ("2 preempted",)
    assert not held(list(verdicts.values()))
