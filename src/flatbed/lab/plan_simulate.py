"""What a capacity means for a workload, found by running Flatbed's scheduler over it with no model behind.

The scheduler is plain Python over ints, so a workload's blocks, waits and preemptions are exactly those of a Flatbed
engine. For other engines, which go about it in much the same way, they are an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flatbed.lab.workloads import Workload
from flatbed.memory.capacity import blocks_for
from flatbed.scheduling.plan import Sequence
from flatbed.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Simulation:
    """What happened.

    Attributes:
        steps: forward passes.
        live_blocks: the most blocks that held tokens of running requests at one moment.
        running: the most samples that ran at once.
        preemptions: samples that were put back and computed again.
        refused: requests that can never fit.
    """

    steps: int
    live_blocks: int
    running: int
    preemptions: int
    refused: int


def simulate(
    workload: Workload,
    *,
    block_size: int,
    token_budget: int,
    max_requests: int,
    blocks: int | None = None,
    prefill_first: bool = False,
) -> Simulation:
    """Runs a workload through the scheduler, all requests being there at the beginning.

    Args:
        workload: every completion takes all of its tokens.
        block_size: tokens in a block.
        blocks: of the pool; None is as many as could ever be of use.
    """
    most = workload.smallest_blocks(block_size)
    pool = most if blocks is None else blocks
    scheduler = Scheduler(
        pool, block_size, token_budget=token_budget, max_requests=max_requests, prefill_first=prefill_first
    )
    refused = 0
    for number, request in enumerate(workload.requests):
        if blocks_for(len(request.prompt) + request.new_tokens - 1, block_size) > pool:
            refused += 1
            continue
        prompt = list(request.prompt)
        group = scheduler.group(prompt)
        for sample in range(workload.n):
            scheduler.submit(Sequence(str(number), sample, prompt, request.new_tokens, frozenset(), group))
    steps = running = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        if plan is None:
            raise RuntimeError("the scheduler has work and plans nothing")
        steps += 1
        running = max(running, scheduler.running)
        scheduler.commit(plan, np.zeros(len(plan.sampled), np.int64))
    return Simulation(steps, scheduler.pool.peak_held, running, scheduler.preemptions, refused)
