"""A device, a model and a driver for tests of the scheduler: no torch, and every slot of the pool can be looked into.

The *model* is a function of one request's whole token history and its seed, so that `Job.truth` (each request run
alone) is known beforehand. The *device* stores in every slot of its pool which token was written there, for which
position and with which weights. It executes a plan in the order that any backend has to keep: clear what is reused,
copy, write ALL K/V of the step; and only then looks whether every computed token can read exactly its own sequence
through the table. The *driver* (`Simulation`) lets requests arrive, runs ahead, commits late, and checks the
scheduler's promises after every step.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flatbed.scheduling.plan import BatchPlan, Landed, Sequence, State
from flatbed.scheduling.scheduler import PATIENCE, Scheduler

VOCABULARY = 6
EMPTY, POISON = -1, -2


class Job:
    """One request, and what it must give when it runs alone.

    Args:
        prompt: token ids below 256.
        max_new_tokens: most tokens to generate.
        eos: token ids that end it.
        seed: part of what the next token depends on, so that twins can differ.
        stop_after: ended from outside ("stop") as soon as that many tokens have landed.
        fragile: a few of its steps give non-finite logits.

    Attributes:
        truth: prompt and continuation, as if nothing ever ended it.
        broken: numbers of the generated tokens whose logits are not finite.
    """

    def __init__(
        self,
        prompt: Iterable[int],
        max_new_tokens: int,
        *,
        eos: Iterable[int] = (),
        seed: int = 0,
        stop_after: int | None = None,
        fragile: bool = False,
    ) -> None:
        self.prompt = list(prompt)
        self.max_new_tokens = max_new_tokens
        self.eos = frozenset(eos)
        self.stop_after = stop_after
        self.truth = list(self.prompt)
        self.broken: set[int] = set()
        state = zlib.crc32(bytes(self.prompt), seed)
        for number in range(max_new_tokens):
            if fragile and (state >> 8) % 16 == 0:
                self.broken.add(number)
            token = state % VOCABULARY
            self.truth.append(token)
            state = zlib.crc32(bytes([token]), state)
        # What a slot must hold: token and position in one number.
        self.slots = np.array([token + 256 * at for at, token in enumerate(self.truth)], np.int64)

    @property
    def alone(self) -> tuple[list[int], str]:
        """Output and finish reason of a run without neighbours, by the plainest loop there is."""
        output: list[int] = []
        for number, token in enumerate(self.truth[len(self.prompt) :]):
            if number in self.broken:
                return output, "error"
            output.append(token)
            if token in self.eos:
                return output, "eos"
            if len(output) == self.max_new_tokens:
                return output, "length"
            if len(output) == self.stop_after:
                return output, "stop"
        raise AssertionError("max_new_tokens is at least 1")


class Device:
    """The pool's memory and the model that runs over it.

    Args:
        num_blocks, block_size: shape of the pool.
        keeps_released: what lies beyond the watermark after a `trim` still holds its old content when it is used
            again, as when memory is given back in chunks larger than a block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keeps_released: bool = False) -> None:
        self.block_size = block_size
        self.keeps_released = keeps_released
        self.slots: NDArray[np.int64] = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.weights: NDArray[np.int64] = np.zeros((num_blocks, block_size), np.int64)  # version that wrote the slot
        self.version = 0
        self.committed = 0
        self.limit = num_blocks  # growth beyond this many blocks fails
        self.jobs: dict[Sequence, Job] = {}
        self.since: dict[Sequence, int] = {}  # weights when the sequence was last admitted
        self.last: dict[int, int] = {}  # row: the token sampled for it last, never seen by the scheduler before commit
        self.computed = 0
        self.copied = 0

    def grow(self, blocks: int) -> bool:
        if blocks > self.limit:
            return False
        self.committed = max(self.committed, blocks)
        return True

    def trim(self, blocks: int) -> None:
        self.committed = blocks
        if not self.keeps_released:
            self.slots[blocks:] = EMPTY

    def execute(self, plan: BatchPlan) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Runs one step; returns the sampled tokens and which of them came from finite logits."""
        slots, weights, size = self.slots, self.weights, self.block_size
        assert all(block < self.committed for block in plan.reused), "clears memory that was given back"
        slots[plan.reused] = EMPTY
        self._check_new_blocks(plan)
        targets = {target for _, target in plan.copies}
        for source, target in plan.copies:
            assert source not in targets | set(plan.reused), "copies from a block that the same plan gives away"
            assert target < self.committed, "copies into memory that is not there"
            slots[target], weights[target] = slots[source], weights[source]
        self.copied += len(plan.copies)

        for sequence in plan.admitted:
            self.since[sequence] = self.version
        written: list[tuple[int, int]] = []
        for row, position in zip(plan.rows.tolist(), plan.positions.tolist(), strict=True):
            block = int(plan.tables[row, position // size])
            slots[block, position % size] = self.last[row] + 256 * position
            written.append((block, position % size))
        for chunk in plan.chunks:
            assert len(chunk.tokens) == chunk.end - chunk.start > 0
            for position, token in enumerate(chunk.tokens, chunk.start):
                block = int(plan.tables[chunk.row, position // size])
                slots[block, position % size] = token + 256 * position
                written.append((block, position % size))
        assert len(set(written)) == len(written) == plan.num_tokens, "two tokens of one step share a slot"
        assert all(block < self.committed for block, _ in written), "writes to memory that is not there"
        weights[tuple(zip(*written, strict=True))] = self.version
        self.computed += len(written)

        tokens: list[int] = []
        finite: list[bool] = []
        for sequence, row, position in zip(plan.sequences, plan.rows.tolist(), plan.positions.tolist(), strict=True):
            self._read(plan, sequence, row, position)
            self._sample(sequence, row, position, tokens, finite)
        for chunk in plan.chunks:
            self._read(plan, chunk.sequence, chunk.row, chunk.end - 1)
            if chunk.last:
                self._sample(chunk.sequence, chunk.row, chunk.end - 1, tokens, finite)
        return np.array(tokens, np.int64), np.array(finite, bool)

    def fail(self, plan: BatchPlan) -> None:
        """The model raises in the middle of this step: what it was to write is garbage, nothing was cleared."""
        for row, position in zip(plan.rows.tolist(), plan.positions.tolist(), strict=True):
            self.slots[plan.tables[row, position // self.block_size], position % self.block_size] = POISON
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                self.slots[plan.tables[chunk.row, position // self.block_size], position % self.block_size] = POISON

    def _check_new_blocks(self, plan: BatchPlan) -> None:
        """Blocks that a sequence did not have before hold nothing: each one is untouched or was named in `reused`."""
        size = self.block_size
        new = [
            int(plan.tables[row, p // size]) for row, p in zip(plan.rows, plan.positions, strict=True) if p % size == 0
        ]
        admitted = set(plan.admitted)
        for chunk in plan.chunks:
            if chunk.sequence in admitted:
                new += chunk.sequence.table[chunk.start // size :]
        assert len(set(new)) == len(new), "a new block was given to two sequences"
        assert (self.slots[new] == EMPTY).all(), "a block with old content is not in plan.reused"

    def _read(self, plan: BatchPlan, sequence: Sequence, row: int, position: int) -> None:
        """Every token of the step reads the K/V of its own sequence, written with weights it may use."""
        table = plan.tables[row, : position // self.block_size + 1]
        seen = self.slots[table].ravel()[: position + 1]
        wanted = self.jobs[sequence].slots[: position + 1]
        assert np.array_equal(seen, wanted), (
            f"{sequence.request_id} at position {position} reads (position, token) "
            f"{[divmod(int(slot), 256) for slot in seen]}, not {[divmod(int(slot), 256) for slot in wanted]}"
        )
        versions = self.weights[table].ravel()[: position + 1]
        assert (versions >= self.since[sequence]).all(), f"{sequence.request_id} reads K/V of forgotten weights"

    def _sample(self, sequence: Sequence, row: int, position: int, tokens: list[int], finite: list[bool]) -> None:
        # `_read` has just shown that the history in memory is `truth[: position + 1]`, so this is the model's answer.
        job = self.jobs[sequence]
        self.last[row] = job.truth[position + 1]
        tokens.append(job.truth[position + 1])
        finite.append(position + 1 - len(job.prompt) not in job.broken)


@dataclass(frozen=True)
class Settings:
    """How the scheduler and its device are set up.

    Attributes:
        depth: how many plans may be under way.
        grow_limit: growth beyond this many blocks always fails; every job must fit into them.
        short: steps (first, after last) in which memory cannot grow at all.
    """

    num_blocks: int
    block_size: int
    token_budget: int = 64
    max_requests: int = 16
    prefill_first: bool = False
    prefix_cache: bool = True
    depth: int = 1
    grow_limit: int | None = None
    short: tuple[tuple[int, int], ...] = ()
    keeps_released: bool = False


@dataclass
class Simulation:
    """Drives a scheduler and a device, and checks after every step what the scheduler promises.

    Attributes:
        outputs: tokens as they landed.
        ends: the finish reason that a sequence must have when it is not that of its job alone.
        order: running sequences by age of admission.
    """

    settings: Settings
    noise: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        s = self.settings
        self.device = Device(s.num_blocks, s.block_size, keeps_released=s.keeps_released)
        self.scheduler = Scheduler(
            s.num_blocks,
            s.block_size,
            token_budget=s.token_budget,
            max_requests=s.max_requests,
            prefill_first=s.prefill_first,
            prefix_cache=s.prefix_cache,
            grow=self.device.grow,
        )
        self.jobs: dict[Sequence, Job] = self.device.jobs
        self.outputs: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, str] = {}
        self.flight: deque[tuple[BatchPlan, NDArray[np.int64], NDArray[np.bool_]]] = deque()
        self.order: list[Sequence] = []
        self.planned: dict[Sequence, int] = {}
        self.steps = 0
        self.decodes_waited = 0

    # ---- what a user does -------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Sequence:
        name = f"request {len(self.jobs)}"
        group = self.scheduler.group(job.prompt)
        sequence = Sequence(name, 0, list(job.prompt), job.max_new_tokens, job.eos, group)
        assert sequence.positions <= self.settings.num_blocks * self.settings.block_size, "a job that can never fit"
        self.jobs[sequence] = job
        self.outputs[sequence] = []
        self.scheduler.submit(sequence)
        self.check()
        return sequence

    def end(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence from outside."""
        if sequence.state is not State.DONE:
            self.ends[sequence] = reason
        self.scheduler.finish(sequence, reason)
        self.check()

    def change_weights(self) -> None:
        self.device.version += 1
        self.scheduler.forget_prefixes()
        self.check()

    def trim(self) -> None:
        """Gives memory back, when nothing is in flight: a step that is under way may still write to it."""
        assert not self.flight
        self.device.trim(self.scheduler.trim())
        assert self.scheduler.pool.idle == 0
        self.check()

    def fail_step(self) -> None:
        """A step raises; everything that runs or waits ends, and late results of earlier steps mean nothing."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.device.fail(plan)
        alive = [sequence for sequence in self.jobs if sequence.state is not State.DONE]
        ended = self.scheduler.abort_all()
        assert set(ended) == set(alive)
        self.ends.update(dict.fromkeys(alive, "error"))
        while self.flight:
            landed = self.scheduler.commit(*self.flight.popleft())
            assert landed == Landed([], [], [], []), "an aborted sequence got a late token"
        self.check()
        assert self.scheduler.pool.held == 0
        assert not self.scheduler.has_work

    # ---- one step ---------------------------------------------------------------------------------------------------

    def plan(self) -> BatchPlan | None:
        """Plans and executes a step, and checks what the plan owes to whom."""
        scheduler = self.scheduler
        self.steps += 1
        short = any(first <= self.steps < after for first, after in self.settings.short)
        limit = self.settings.num_blocks if self.settings.grow_limit is None else self.settings.grow_limit
        self.device.limit = 0 if short else limit
        self.order = [sequence for sequence in self.order if sequence.state is not State.DONE]
        before = list(self.order)
        thrown_out = {sequence: sequence.preemptions for sequence in before}
        decodable = [s for s in before if s.state is State.DECODE and self.planned[s] < s.positions]

        plan = scheduler.plan()
        self.check()
        preempted = [s for s in before if s.preemptions > thrown_out[s]]
        self.order = [s for s in before if s not in preempted]
        if plan is None:
            return None

        assert 0 < plan.num_tokens <= self.settings.token_budget
        assert not set(plan.sequences) & {c.sequence for c in plan.chunks}, "one step cannot feed on its own result"
        for sequence, position in zip(plan.sequences, plan.positions.tolist(), strict=True):
            assert self.planned[sequence] == position < sequence.positions
            self.planned[sequence] += 1
        for sequence in plan.admitted:
            self.order.append(sequence)
            self.planned[sequence] = next(c.start for c in plan.chunks if c.sequence is sequence)
        for chunk in plan.chunks:
            assert self.planned[chunk.sequence] == chunk.start
            assert chunk.tokens == self.jobs[chunk.sequence].truth[chunk.start : chunk.end]
            self.planned[chunk.sequence] = chunk.end

        assert not before or before[0] not in preempted or short, "the oldest was thrown out"
        if not self.settings.prefill_first:
            assert preempted == before[len(before) - len(preempted) :], "an older one was thrown out for a newer one"
            missing = [s for s in decodable if s not in plan.sequences and s not in preempted]
            newest = max((before.index(s) for s in plan.sequences), default=-1)
            assert all(before.index(s) > newest for s in missing), "an older one waits while a newer one goes on"
            assert all(self.planned[s] % self.settings.block_size == 0 for s in missing), "waits for no block"
        waited = bool(decodable) and not plan.sequences
        self.decodes_waited = self.decodes_waited + 1 if waited else 0
        assert self.decodes_waited <= PATIENCE or short or self.settings.grow_limit is not None, "decodes starve"

        self.flight.append((plan, *self.device.execute(plan)))
        return plan

    def commit(self) -> Landed:
        """Lands the oldest step that is under way."""
        plan, tokens, finite = self.flight.popleft()
        alive = {sequence for sequence in plan.sampled if sequence.state is not State.DONE}
        landed = self.scheduler.commit(plan, tokens, None if finite.all() and self.noise.random() < 0.5 else finite)
        self.check()
        assert set(landed.sequences) <= alive, "a result for one that was done"
        for sequence, token, index in zip(landed.sequences, landed.tokens, landed.indices, strict=True):
            assert plan.sampled[index] is sequence
            assert int(tokens[index]) == token
            self.outputs[sequence].append(token)
            assert self.outputs[sequence] == sequence.output
        for sequence in landed.finished:
            assert sequence.state is State.DONE
        for sequence in landed.sequences:
            if len(sequence.output) == self.jobs[sequence].stop_after and sequence.state is not State.DONE:
                self.scheduler.finish(sequence, "stop")
                self.check()
        return landed

    def step(self) -> BatchPlan | None:
        """As an engine does: plan ahead if allowed, land what is due. Returns the plan, if there was one."""
        plan = self.plan() if len(self.flight) < self.settings.depth else None
        if self.flight and (plan is None or len(self.flight) >= self.settings.depth or self.noise.random() < 0.3):
            self.commit()
        elif plan is None and self.scheduler.has_work:
            assert self.device.limit == 0, "stuck: there is work and memory, but no plan"
        return plan

    def run(self) -> None:
        """Steps until all is done; fails when that takes absurdly long."""
        most = self.steps + 500 + 20 * sum(len(job.truth) for job in self.jobs.values())
        while self.scheduler.has_work or self.flight:
            self.step()
            assert self.steps < most, "does not come to an end"
        self.check_results()

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        scheduler.check()
        held = sum(refs > 0 for refs in pool.refs)
        assert held == pool.held
        assert len(pool._free) + pool.idle + held == pool.watermark <= self.device.committed
        if not self.settings.prefix_cache:
            assert pool.idle == 0

    def check_results(self) -> None:
        """Everything has ended, with the output that it would have had alone, and nothing is held any more."""
        assert not self.scheduler.has_work
        assert self.scheduler.pool.held == 0
        for sequence, job in self.jobs.items():
            output, reason = job.alone
            assert sequence.state is State.DONE
            assert sequence.finish_reason == self.ends.get(sequence, reason)
            if sequence in self.ends:
                assert sequence.output == job.truth[len(job.prompt) :][: len(sequence.output)]
            else:
                assert sequence.output == output
        assert not self.scheduler._groups, "a group outlives its members"


def run_all(settings: Settings, jobs: Iterable[Job]) -> tuple[Simulation, list[Sequence]]:
    """Submits all jobs at once and runs them to their end."""
    simulation = Simulation(settings)
    sequences = [simulation.submit(job) for job in jobs]
    simulation.run()
    return simulation, sequences
