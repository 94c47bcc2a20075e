"""Python time of a scheduler step: `plan()` and `commit()` with many running requests, all of them decoding.

    python benchmarks/scheduler.py [--running 1024] [--block-size 32] [--steps 400] [--repeats 3]

Two regimes. In both, completions are 256 to 1024 tokens long and requests stand at random places within their blocks:
each step crosses about running / block_size block boundaries, where blocks are allocated, and about three requests in
two steps end and free theirs. The prefix cache is on.

    steady     decode only: those that ended are replaced in every 16th step, which is not timed
    turnover   whoever ends is replaced at once, so that nearly every timed step also admits and prefills someone

What is timed is the scheduler alone, not the making of tokens: on the clock, and as processor time of this thread,
which says what the Python costs on a machine that does other things too. The repeat with the smallest median counts.
The target is a median of 300 microseconds in steady decode at 1,024 (DESIGN.md, section 7), on a machine like the one
that scheduler.json is from. What another machine needs for a *yardstick*, a fixed piece of Python of the same kind,
says how much slower or faster it is at this moment. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import random
import time
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np

from flatbed.scheduling.plan import Sequence
from flatbed.scheduling.scheduler import Scheduler

TARGET_US = 300.0
# The yardstick's time on the machine that scheduler.json is from. Not taken there, but from another one, which needed
# 334 us for the step that took 228 us there (the best of three runs of each, idle) and 165 us for the yardstick.
YARDSTICK_US = 113.0
REGIMES = ("steady", "turnover")
REPLACE_EVERY = {"steady": 16, "turnover": 1}


@dataclass(frozen=True)
class Timing:
    """Microseconds per step, and what the steps did.

    Attributes:
        median_us, mean_us, p99_us: plan and commit together, on the clock.
        plan_us, commit_us: medians of each.
        cpu_us: median of the processor time of both.
        steps: timed steps.
        allocations: blocks that changed hands in them.
        finished: requests that ended in them.
    """

    median_us: float
    mean_us: float
    p99_us: float
    plan_us: float
    commit_us: float
    cpu_us: float
    steps: int
    allocations: int
    finished: int


def measure(regime: str, *, running: int = 1024, block_size: int = 32, steps: int = 400, seed: int = 0) -> Timing:
    """Times `steps` steps over `running` decoding requests."""
    noise = random.Random(seed)
    scheduler = Scheduler(10**9, block_size, token_budget=running + 4096, max_requests=running)
    count = 0

    def submit(new: int) -> None:
        nonlocal count
        count += 1
        prompt = [noise.randrange(50_000) for _ in range(noise.randint(16, 16 + 2 * block_size))]
        scheduler.submit(Sequence(str(count), 0, prompt, new, frozenset([50_001]), scheduler.group(prompt)))

    def length() -> int:
        return noise.randint(256, 1024)

    for _ in range(running):  # those that run already have part of their completion behind them
        submit(noise.randint(1, length()))
    allocated = 0
    allocate = scheduler.pool.allocate

    def counted() -> int | None:
        nonlocal allocated
        allocated += 1
        return allocate()

    scheduler.pool.allocate = counted  # type: ignore[method-assign]

    def step(timed: list[tuple[float, float, float]] | None) -> int:
        nonlocal allocated
        before = allocated
        worked = time.thread_time()
        begin = time.perf_counter()
        plan = scheduler.plan()
        middle = time.perf_counter()
        worked -= time.thread_time()
        assert plan is not None
        tokens = np.array([noise.randrange(50_000) for _ in plan.sampled], np.int64)
        worked += time.thread_time()
        resumed = time.perf_counter()
        landed = scheduler.commit(plan, tokens)
        end = time.perf_counter()
        worked -= time.thread_time()
        if timed is not None:
            assert len(plan.sampled) > 0.9 * running
            timed.append((middle - begin, end - resumed, -worked))
        else:
            allocated = before
        return len(landed.finished)

    ended = 0

    def replace() -> None:
        nonlocal ended
        for _ in range(ended):
            submit(length())
        ended = 0

    for _ in range(2 * block_size):  # all are admitted, and the first blocks are behind them
        ended += step(None)
        replace()
    scheduler.check()
    timed: list[tuple[float, float, float]] = []
    allocated = finished = 0
    every = REPLACE_EVERY[regime]
    while len(timed) < steps:
        if every > 1 and ended and len(timed) % every == 0:
            replace()
            ended += step(None)
        ended_now = step(timed)
        finished += ended_now
        ended += ended_now
        if every == 1:
            replace()
    scheduler.check()
    parts = 1e6 * np.array(timed)
    total = parts[:, :2].sum(1)
    return Timing(
        median_us=round(float(np.median(total)), 1),
        mean_us=round(float(total.mean()), 1),
        p99_us=round(float(np.percentile(total, 99)), 1),
        plan_us=round(float(np.median(parts[:, 0])), 1),
        commit_us=round(float(np.median(parts[:, 1])), 1),
        cpu_us=round(float(np.median(parts[:, 2])), 1),
        steps=steps,
        allocations=allocated,
        finished=finished,
    )


def yardstick(repeats: int = 40) -> float:
    """Microseconds of processor time, the median of `repeats`, for what a step does, but fixed: 1,024 lists grow by an
    element, arrays of 1,024 are indexed, and blocks of 32 tokens are hashed, taken from a heap and put back."""
    noise = random.Random(0)
    lists: list[list[int]] = [[] for _ in range(1024)]
    owners = np.empty(1024, object)
    owners[:] = lists
    order = np.array(noise.sample(range(1024), 1024))
    numbers = np.arange(1024)
    free = list(range(512))
    words = [noise.randrange(50_000) for _ in range(64 * 32)]
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        kept = owners[order].tolist()
        deque(map(list.append, kept, numbers.tolist()), maxlen=0)
        for _ in range(8):
            numbers[order] = numbers[order] % 32 + 1
        seen = {}
        for at in range(0, len(words), 32):
            seen[at, tuple(words[at : at + 32])] = heapq.heappop(free)
        for block in seen.values():
            heapq.heappush(free, block)
        times.append(time.thread_time() - begin)
    return round(1e6 * float(np.median(times)), 1)


def best(regime: str, *, repeats: int = 3, running: int = 1024, block_size: int = 32, steps: int = 400) -> Timing:
    """The repeat with the smallest median."""
    timings = [measure(regime, running=running, block_size=block_size, steps=steps, seed=i) for i in range(repeats)]
    return min(timings, key=lambda timing: timing.median_us)


def main() -> None:
    parser = argparse.ArgumentParser(description="Python time of a scheduler step")
    parser.add_argument("--running", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results = {}
    for regime in REGIMES:
        timing = best(regime, repeats=args.repeats, running=args.running, block_size=args.block_size, steps=args.steps)
        results[regime] = asdict(timing)
        print(
            f"{regime:9} {timing.median_us:6.0f} us median ({timing.plan_us:.0f} plan, {timing.commit_us:.0f} commit), "
            f"{timing.mean_us:.0f} mean, {timing.p99_us:.0f} p99, {timing.cpu_us:.0f} processor time"
        )
        print(f"{'':9} in {timing.steps} steps: {timing.allocations} allocations, {timing.finished} requests finished")
    print(
        json.dumps(
            {
                "benchmark": "scheduler",
                "running": args.running,
                "block_size": args.block_size,
                "target_us": TARGET_US,
                "yardstick_us": yardstick(),
                "machine": platform.machine(),
                "processor": _processor(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "regimes": results,
            }
        )
    )


def _processor() -> str:
    """The CPU's name where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


if __name__ == "__main__":
    main()
