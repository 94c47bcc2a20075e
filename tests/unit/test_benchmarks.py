"""What the benchmarks share: jobs in a watched process, and what a table says of the results."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import trl_steps
from supervised import Supervised, Tell


def prepare() -> int:
    return os.getpid()


def run(job: str, tell: Tell) -> tuple[str, int]:
    tell(job)
    if job == "raise":
        raise ValueError("no\nmore")
    if job == "die":
        os._exit(7)
    if job == "hang":
        time.sleep(60)
    return job.upper(), os.getpid()


@pytest.mark.parametrize(
    ("trouble", "told"),
    [("raise", "ValueError: no"), ("die", "its process ended with status 7"), ("hang", "not done within 1 s")],
)
def test_a_job_that_fails_is_a_result_and_the_next_gets_another_process(trouble: str, told: str) -> None:
    supervised = Supervised(prepare, run, 1.0)
    first = supervised("a")
    pid = supervised.prepared
    assert (first.result, first.failed, first.told, first.fresh) == (("A", pid), None, ["a"], True)
    failed = supervised(trouble)
    assert (failed.result, failed.failed, failed.told, failed.fresh) == (None, told, [trouble], False)
    after = supervised("b")
    assert (after.result, after.failed, after.fresh) == (("B", supervised.prepared), None, True)
    assert supervised.prepared != pid
    supervised.close()


def row(rollouts: str, mib: int, **changes: Any) -> dict[str, Any]:
    job = trl_steps.Training("grpo", 128, 8, rollouts, 5, 64, "bfloat16", "sdpa", False, False, False)
    measured = {"seconds": 2.4, "generation_s": 1.3, "training_bytes": mib << 20, "graph_bytes": 0, "outside_bytes": 0}
    return {**vars(job), "machine": "GPU", "fresh": False, **measured, **changes}


def test_training_memory_is_compared_with_the_same_training_without_generation() -> None:
    ours = row("flatbed", 1000, graph_bytes=40 << 20, outside_bytes=70 << 20)
    others = [row("none", 1, algorithm="rloo"), row("none", 2, machine="CPU"), row("generate", 3)]
    assert trl_steps.more_mib(ours, others) is None
    shared = [*others, row("none", 1000)]
    assert trl_steps.more_mib(ours, shared) == 110
    assert trl_steps.more_mib({**ours, "alone": True}, [*shared, row("none", 1020, alone=True)]) == 90


def test_verdicts_are_about_flatbed_and_the_workload_of_the_targets() -> None:
    assert trl_steps.verdict(row("flatbed", 0), 99.0) == "memory met, steps met, generation missed"
    assert trl_steps.verdict(row("flatbed", 0, new_tokens=512), 101.0) == "memory missed"
    assert trl_steps.verdict(row("generate", 0), 0.0) == ""
    assert trl_steps.verdict(row("flatbed", 0, failed="it"), None) == ""
