"""The exact rank-sum test against all orders of small samples."""

from __future__ import annotations

import itertools
import math
import random
import time
from unittest import mock

import pytest

from flatbed.lab import samples
from flatbed.lab.samples import rank_sum_p


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (4, 2), (5, 5)])
def test_the_chance_is_that_of_all_orders(n: int, m: int) -> None:
    whole = range(n + m)
    wins = {
        chosen: sum(a > b for a in chosen for b in whole if b not in chosen)
        for chosen in itertools.combinations(whole, n)
    }
    for chosen, won in wins.items():
        expected = sum(other >= won for other in wins.values()) / math.comb(n + m, n)
        rest = [float(b) for b in whole if b not in chosen]
        assert rank_sum_p([float(a) for a in chosen], rest) == pytest.approx(expected)


def test_equal_figures_say_nothing() -> None:
    assert rank_sum_p([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) >= 0.5
    assert rank_sum_p([2.0] * 5, [1.0] * 5) == pytest.approx(1 / math.comb(10, 5))
    assert rank_sum_p([1.0] * 5, [2.0] * 5) == 1


def test_many_figures_take_no_time_and_say_nearly_the_same() -> None:
    draw = random.Random(0)
    for shift in (0.0, 0.5, 1.0):
        longer, shorter = ([draw.gauss(mean, 1) for _ in range(16)] for mean in (shift, 0.0))
        exact = rank_sum_p(longer, shorter)
        with mock.patch.object(samples, "_EXACT", 0):
            assert rank_sum_p(longer, shorter) == pytest.approx(exact, abs=0.005)
    start = time.perf_counter()
    assert rank_sum_p([2.0] * 1000, [1.0] * 1000) < 1e-9
    assert time.perf_counter() - start < 5
