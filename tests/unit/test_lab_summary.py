"""What records say: statistics, verdicts in words with their numbers, and the gate. Records are made up."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest

from flatbed.errors import ConfigError
from flatbed.lab.figures import _wrapped, colours, spread
from flatbed.lab.gate import check_limit, judge
from flatbed.lab.measure import SCHEMA
from flatbed.lab.report import compose, figure, write
from flatbed.lab.summary import Stat, Summary, seconds, summarise, times, where_it_grows

WORKLOAD = {
    "name": "article", "requests": 64, "samples": 64, "n": 1, "prompt_tokens": 2699, "new_tokens": 8192, "longest": 192,
    "live_tokens": 10000, "temperature": 0.0, "logprobs": False, "fixed_lengths": True, "arrives_over_time": False,
    "synthetic": True,
}  # fmt: skip
TOKENS = {"8 blocks": 2048, "64 blocks": 16384, "10%": 10**6, "50%": 5 * 10**6, "90%": 9 * 10**6}


def record(engine: str, capacity: str | None, phase: str, took: float | None, **more: Any) -> dict[str, Any]:
    tokens = None if capacity is None else TOKENS[capacity]
    memory = {"capacity_tokens": tokens, "committed": 1 << 20, "live": 1 << 19, "reserved": 1 << 30, "peak": 1 << 31}
    base = {
        "schema": SCHEMA, "time": "2026-12-01T00:00:00", "sweep": "capacity", "engine": engine, "reference": False,
        "settings": {"capacity": capacity, "token_budget": None, "schedule": None}, "engine_settings": {},
        "workload": WORKLOAD, "phase": phase, "repeat": 0, "cold_round": 0, "order": "in turns", "outcome": "ok",
        "error": None, "seconds": took, "parts": None if took is None else {"generation": took}, "load_s": None,
        "tokens": 8192, "tokens_per_s": 8192 / took if took else None, "first_token_s": None,
        "between_tokens_s": None, "preemptions": 0, "memory": None if phase == "start" else memory, "notes": [],
        "setup": {"model": "m", "dtype": "auto"}, "versions": {"flatbed": "0.1.0"},
        "plan": {"warm": 0, "repeats": 3, "cold_repeats": 1, "command": "flatbed bench"},
        "machine": {"cpu": "a cpu", "cores": 2, "memory_bytes": 1 << 34},
    }  # fmt: skip
    return {**base, **more}


def calls(engine: str, capacity: str, times_: list[float], cold: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    return [
        record(engine, capacity, "start", 0.0, parts={"construction": 0.0, "warm_up": 0.0}),
        record(engine, capacity, "first", cold, **more),
        *(record(engine, capacity, "steady", took, **more) for took in times_),
    ]


def one(records: list[dict[str, Any]]) -> Summary:
    (summary,) = summarise(records)
    return summary


def test_statistics() -> None:
    stat = Stat.of([3.0, 1.0, 2.0, 4.0, 100.0])
    assert stat is not None
    assert (stat.median, stat.low, stat.high, stat.least, stat.greatest, stat.count) == (3.0, 2.0, 4.0, 1.0, 100.0, 5)
    few = Stat.of([2.0, 1.0])
    assert few is not None
    assert (few.low, few.high) == (1.0, 2.0)
    assert Stat.of([]) is None
    assert stat.overlaps(few)
    alone = Stat.of([2.0])
    assert alone is not None
    assert not alone.overlaps(stat)


def test_flat() -> None:
    summary = one([*calls("e", "64 blocks", [1.0, 1.01, 0.99]), *calls("e", "90%", [1.01, 1.02, 1.0])])
    assert summary.verdict() == "flat: 1.01x from 64 blocks to 90%; cold starts flat: 1.00x, measured once"
    assert judge([summary], 1.05).failed == ()


def test_growth_names_its_phase() -> None:
    parts = [{"warm_up": w, "generation": 1.0} for w in (0.6, 30.0)]
    summary = one(
        [
            *calls("e", "64 blocks", [1.6, 1.61, 1.59], 3.0, parts=parts[0]),
            *calls("e", "50%", [19.0, 19.1, 19.2], 20.0, parts={"warm_up": 18.0, "generation": 1.0}),
            *calls("e", "90%", [31.0, 31.1, 30.9], 33.0, parts=parts[1]),
        ]
    )
    assert summary.verdict() == (
        "grows: 19x from 64 blocks to 90%, all of it in warm-up; cold starts grow 11x, from 3.00 s at 64 blocks to "
        "33.0 s at 90%, all of it in warm-up, measured once"
    )
    result = judge([summary], 1.05)
    assert result.failed == (
        "e on article: steady calls grow 19x from 64 blocks to 90%, all of it in warm-up (the gate is 1.05)",
    )
    assert judge([summary], 20).failed == ()


def test_a_difference_inside_the_spread_is_noise() -> None:
    noisy = [*calls("e", "64 blocks", [1.0, 1.2, 0.8, 1.1]), *calls("e", "90%", [1.3, 0.9, 1.15, 1.25])]
    summary = one(noisy)
    assert "no growth beyond the noise (the spreads overlap): 1.14x from 64 blocks to 90%" in summary.verdict()
    assert judge([summary], 1.05).failed == ()
    clear = one([*calls("e", "64 blocks", [1.0, 1.01, 0.99, 1.0]), *calls("e", "90%", [1.2, 1.21, 1.19, 1.2])])
    assert judge([clear], 1.05).failed != ()
    assert compose(noisy).sections[0].verdicts[0].kind == "noise"


def test_cold_starts_are_gated_when_they_were_repeated() -> None:
    def starts(capacity: str, each: list[float]) -> list[dict[str, Any]]:
        steady = [record("e", capacity, "steady", 1.0) for _ in range(3)]
        return steady + [
            record("e", capacity, phase, took, cold_round=turn, parts={"construction": took if phase == "start" else 0})
            for turn, cold in enumerate(each)
            for phase, took in (("start", cold), ("first", 1.0))
        ]

    once = one([*starts("64 blocks", [1.0]), *starts("90%", [9.0])])
    assert "cold starts grow 5.0x" in once.verdict()
    assert "measured once" in once.verdict()
    assert judge([once], 1.05).failed == ()
    twice = one([*starts("64 blocks", [1.0, 1.1]), *starts("90%", [9.0, 9.1])])
    (failed,) = judge([twice], 1.05).failed
    assert (
        failed
        == "e on article: cold starts grow 4.9x from 64 blocks to 90%, all of it in construction (the gate is 1.05)"
    )


def test_capacities_too_small_for_the_workload_are_no_reference() -> None:
    summary = one(
        [
            *calls("e", "8 blocks", [5.0, 5.0, 5.0]),
            *calls("e", "64 blocks", [1.0, 1.0, 1.0]),
            *calls("e", "90%", [1.0, 1.01, 1.02]),
        ]
    )
    assert summary.verdict().startswith("flat: 1.01x from 64 blocks to 90%")
    assert "too small for the whole workload at once: 8 blocks 5.0x" in summary.verdict()
    assert judge([summary], 1.05).failed == ()


def test_what_failed_is_told_and_leaves_the_rest() -> None:
    failed = record("e", "90%", "first", None, outcome="out of memory", error="too much", memory=None)
    summary = one([*calls("e", "64 blocks", [1.0] * 3), *calls("e", "10%", [1.0] * 3), failed])
    assert summary.verdict().startswith("flat: 1.00x from 64 blocks to 10%")
    assert summary.verdict().endswith("90%: out of memory in the first call: too much")
    assert summary.outcomes == {"out of memory"}
    alone = one([*calls("e", "64 blocks", [1.0] * 3), failed])
    assert "not judged: only one setting could be compared" in alone.verdict()
    (unjudged,) = judge([alone], 1.05).unjudged
    assert unjudged.startswith("e on article: not judged")


def test_an_engine_that_never_started() -> None:
    missing = record("e", "64 blocks", "load", None, workload=None, outcome="missing", error="e is not installed")
    only = one([missing])
    assert only.verdict() == "not measured: 64 blocks: missing: e is not installed"
    both = summarise([missing, *calls("f", "64 blocks", [1.0] * 2), *calls("f", "90%", [1.0] * 2)])
    assert [(s.engine, s.workload["name"]) for s in both] == [("f", "article"), ("e", "article")]
    assert compose([missing]).sections[0].name == "Nothing ran"


def test_references() -> None:
    summary = one([record("generate", None, "steady", 4.0, reference=True)])
    assert summary.verdict() == "has no capacity: 4.00 s, shown as a reference"
    assert judge([summary], 1.0) == judge([], 1.0)


def test_budgets_are_judged_by_the_best() -> None:
    def budget(tokens: int, took: float) -> list[dict[str, Any]]:
        settings = {"capacity": None, "token_budget": tokens, "schedule": None}
        more = {"sweep": "token_budget", "settings": settings}
        return [record("e", "90%", "steady", took, **more) for _ in range(3)]

    summary = one([*budget(8192, 1.0), *budget(256, 2.0), *budget(1024, 0.8)])
    assert [point.x for point in summary.points] == [256, 1024, 8192]
    assert summary.verdict() == "best at 1024 (0.800 s); 256 takes 2.5x, all of it in generation"
    assert judge([summary], 2).failed != ()
    assert judge([summary], 3).failed == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"construction": 1, "generation": 1}, {"construction": 9, "generation": 1}, "all of it in construction"),
        (
            {"construction": 0, "generation": 1},
            {"construction": 7, "generation": 4},
            "most of it (70%) in construction",
        ),
        ({"warm_up": 0, "generation": 1}, {"warm_up": 5, "generation": 6}, "50% of it in warm-up, 50% in generation"),
        ({"warm_up": 1, "teardown": 1}, {"warm_up": 0, "teardown": 3}, "all of it in teardown"),
        (None, {"generation": 1}, "not split by phase"),
    ],
)
def test_where_it_grows(before: Any, after: Any, said: str) -> None:
    whole = {"construction": 0, "warm_up": 0, "generation": 0, "teardown": 0}
    filled = [None if parts is None else {**whole, **parts} for parts in (before, after)]
    assert where_it_grows(*filled) == said


@pytest.mark.parametrize("limit", [0.99, 0, -1, float("nan")])
def test_a_gate_that_nothing_passes(limit: float) -> None:
    with pytest.raises(ConfigError, match="the gate must be at least 1"):
        check_limit(limit)


def test_numbers_as_they_are_written() -> None:
    assert [times(r) for r in (1.006, 1.5, 4.44, 19.2)] == ["1.01x", "1.50x", "4.4x", "19x"]
    assert [seconds(s) for s in (0.0004, 0.1443, 1.663, 31.62, 131.2)] == [
        "0.40 ms",
        "0.144 s",
        "1.66 s",
        "31.6 s",
        "131 s",
    ]
    assert [figure(v) for v in (0.14432, 1.663, 31.62, 12345.6)] == ["0.1443", "1.663", "31.62", "12,346"]


def test_names_beside_a_plot_do_not_lie_on_each_other() -> None:
    moved = spread([0.1, 0.5, 0.51, 0.52, 0.9], gap=0.05)
    assert [b - a >= 0.05 - 1e-9 for a, b in pairwise(moved)] == [True] * 4
    assert (moved[0], moved[-1]) == (0.1, pytest.approx(0.9))
    assert sum(moved[1:4]) == pytest.approx(0.5 + 0.51 + 0.52)


def test_long_names_are_broken_where_they_may_be() -> None:
    assert _wrapped("flatbed:triton") == "flatbed:triton"
    assert _wrapped("vllm@0.24.0:FLASH_ATTN,enable_prefix_caching=false,max_model_len=4096").split("\n") == [
        "vllm@0.24.0:FLASH_ATTN,",
        "enable_prefix_caching=false,",
        "max_model_len=4096",
    ]


def test_flatbed_has_its_own_colour() -> None:
    palette = colours(["generate", "flatbed:triton", "flatbed", "vllm"])
    assert len(set(palette.values())) == 4
    assert palette["flatbed:triton"] == "#0f9d8a"


def test_without_matplotlib_the_report_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    write([*calls("e", "64 blocks", [1.0] * 3), *calls("e", "90%", [1.0] * 3)], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.html"}
    for name in ("report.md", "report.html"):
        assert "The plots are missing: matplotlib is not installed" in (tmp_path / name).read_text()


def test_what_engines_say_is_text_and_not_markup(tmp_path: Any) -> None:
    failed = record("e", "90%", "first", None, outcome="failed", error="<script>alert(1)</script> a|b", memory=None)
    write([*calls("e", "64 blocks", [1.0] * 3), failed], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; a|b" in page
    (row,) = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| e | 90%")]
    assert row.count(" | ") == 13
    assert "a\\|b" in row
