"""Whether two samples of seconds differ, or only look as if they did."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EXACT = 16  # figures, beyond which counting orders takes too long


def rank_sum_p(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """The chance that `longer` would stand as high among all the figures as it does if both were of one kind.

    The one-sided rank-sum test (Mann and Whitney, 1947): no assumption about how the figures are distributed, which
    outliers of a busy machine would break. Equal figures count half. The least that n and m figures can give is
    1 / C(n + m, n): 0.05 for three and three, 0.004 for five and five. Exact for up to 16 figures each, and by the
    normal distribution, which is close by then, beyond.
    """
    n, m = len(longer), len(shorter)
    wins = sum((a > b) + (a == b) / 2 for a in longer for b in shorter)
    if max(n, m) > _EXACT:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return 0.5 * math.erfc((wins - 0.5 - n * m / 2) / deviation / math.sqrt(2))
    ways = _ways(n, m)
    return sum(ways[math.ceil(wins) :]) / sum(ways)


def _ways(n: int, m: int) -> list[int]:
    """In how many orders of n and m figures u pairs have the one of the n above that of the m, for u from 0 to n m."""
    # Taking the greatest of all away: it is one of the n, which is above all m, or one of the m, which is above none.
    rows: dict[tuple[int, int], list[int]] = {}
    for i in range(n + 1):
        for j in range(m + 1):
            if i == 0 or j == 0:
                rows[i, j] = [1]
                continue
            made = [0] * (i * j + 1)
            for u, count in enumerate(rows[i - 1, j]):
                made[u + j] += count
            for u, count in enumerate(rows[i, j - 1]):
                made[u] += count
            rows[i, j] = made
    return rows[n, m]
