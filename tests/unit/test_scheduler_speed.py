"""A scheduler step in steady decode at 1,024 running requests takes at most 0.3 ms of Python (median).

That is on a machine like the one the target was set on; others are compared with it by a yardstick.
"""

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


@pytest.mark.timing
@pytest.mark.parametrize(("regime", "target_us"), [("steady", 300), ("turnover", 500)])
def test_the_median_step_meets_its_target(regime: str, target_us: float) -> None:
    """Processor time, relative to that of a yardstick before and after, and the best of several runs: a machine that is
    slower, or does something else meanwhile, is slower at both.

    Where nearly every step also admits and prefills somebody (turnover), it may take longer.
    """
    benchmark = load_benchmark()
    assert regime != "steady" or target_us == benchmark.TARGET_US
    tried = []
    for seed in range(ATTEMPTS):
        before = benchmark.yardstick()
        timing = benchmark.measure(regime, steps=150, seed=seed)
        slower = (before + benchmark.yardstick()) / 2 / benchmark.YARDSTICK_US
        assert timing.allocations > 0.8 * 32 * 150, "the workload crosses too few block boundaries"
        assert timing.finished > 100, "too few requests end"
        if timing.cpu_us <= target_us * slower:
            return
        tried.append(f"{timing.cpu_us} us on a machine {slower:.2f} times as slow as the target's")
    pytest.fail(f"the target is {target_us} us: {'; '.join(tried)}")
