"""The exact rank-sum test against all orders of small samples."""

from __future__ import annotations

import itertools
import math

import pytest

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
