"""A scheduler step in steady decode at 1,024 running requests takes at most 0.3 ms of Python (median)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scheduler.py"
ATTEMPTS = 8


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_scheduler", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("regime", "target_us"), [("steady", 300), ("turnover", 500)])
def test_the_median_step_meets_its_target(regime: str, target_us: float) -> None:
    """Processor time, and the best of several runs: a machine that does something else meanwhile can only add to it.

    Where nearly every step also admits and prefills somebody (turnover), it may take longer.
    """
    benchmark = load_benchmark()
    assert regime != "steady" or target_us == benchmark.TARGET_US
    medians = []
    for seed in range(ATTEMPTS):
        timing = benchmark.measure(regime, steps=150, seed=seed)
        assert timing.allocations > 0.8 * 32 * 150, "the workload crosses too few block boundaries"
        assert timing.finished > 100, "too few requests end"
        medians.append(timing.cpu_us)
        if medians[-1] <= target_us:
            return
    pytest.fail(f"medians of {ATTEMPTS} runs: {medians} us, the target is {target_us}")
