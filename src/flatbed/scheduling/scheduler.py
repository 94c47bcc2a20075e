"""The scheduler: which tokens go into the next forward pass.

::

      submit ─▶ waiting ──admit──▶ prefill ──last chunk──▶ decode ──EOS, length, stop──▶ done
                   ▲                  │                       │
                   └──── preempt (blocks are freed; prompt and output are computed again later)

`plan()` decides and books everything a step needs; `commit()` takes the step's results. Between the two nothing else
changes a sequence, and several plans may be under way at once: *planned* runs ahead of *landed* (see rows.py).

Nothing starves:

- Sequences are admitted in order of arrival; one that does not fit blocks those behind it.
- At most `token_budget` sequences run at once, so each of them gets a token in every `fifo` step.
- When blocks run out, the newest running sequence is preempted; the oldest always goes on, and one that runs alone
  always fits (what can never fit is refused by the engine before it comes here).
- `prefill_first` lets decodes wait for prefills, but never more than PATIENCE steps in a row.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from flatbed.scheduling.blocks import BlockPool, Grow
from flatbed.scheduling.plan import BatchPlan, Chunk, Ints, Landed, PromptGroup, Sequence, State
from flatbed.scheduling.prefix import PrefixCache
from flatbed.scheduling.rows import Rows

PATIENCE = 4


class Scheduler:
    """Plans steps over one block pool.

    Args:
        num_blocks: capacity of the pool.
        block_size: tokens in a block.
        token_budget: most tokens in a step.
        max_requests: most sequences that run at once.
        prefill_first: the schedule; False is `fifo` (decode first).
        prefix_cache: share blocks between equal beginnings.
        grow: see `BlockPool`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        token_budget: int,
        max_requests: int,
        prefill_first: bool = False,
        prefix_cache: bool = True,
        grow: Grow = lambda blocks: True,
    ) -> None:
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_running = min(max_requests, token_budget)
        self.prefill_first = prefill_first
        self.pool = BlockPool(num_blocks, grow)
        self.prefix = PrefixCache(self.pool, block_size, enabled=prefix_cache)
        self.rows = Rows(self.max_running, block_size)
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self.step = 0
        self._groups: dict[tuple[int, ...], PromptGroup] = {}
        self._running: dict[Sequence, None] = {}  # an ordered set: in order of admission
        self._prefilling: dict[Sequence, None] = {}  # those of them that are in prefill
        self._decoding: Ints = np.empty(0, np.int32)  # rows of decoding sequences, in order of admission
        self._numbers = list(range(self.max_running))
        self._decoding_stale = False
        self._turn = 0
        self._waited = 0

    # ---- the two halves of a step -----------------------------------------------------------------------------------

    def plan(self) -> BatchPlan | None:
        """Books the next step. None when nothing can be planned (nothing waits, or all of it awaits results)."""
        self.step += 1
        budget = self.token_budget
        plan = BatchPlan(self.step, [], _NO_ROWS, _NO_ROWS, _NO_EPOCHS, [], [], [], [], self.rows.tables)
        if self.prefill_first and self._waited < PATIENCE:
            self._plan_prefills(plan, budget)
            self._plan_decodes(plan, budget - plan.num_tokens)
        else:
            self._plan_decodes(plan, budget)
            self._plan_prefills(plan, budget - plan.num_tokens)
        for source, _ in plan.copies:
            self.pool.release(source)
        self._waited = self._waited + 1 if len(self._decoding) and not len(plan.rows) else 0
        if plan.num_tokens == 0:
            return None
        plan.reused, self.pool.reused = self.pool.reused, []
        plan.tables = self.rows.tables
        return plan

    def commit(self, plan: BatchPlan, tokens: NDArray[np.int64], finite: NDArray[np.bool_] | None = None) -> Landed:
        """Takes the tokens of a step: int64 [samples], in the order of `plan.sampled`.

        `finite` is False where the logits were NaN or infinite; such a sequence gets no token and ends with "error".
        Results for sequences that were preempted, cancelled or finished since are dropped.
        """
        rows = self.rows
        landed = Landed([], [], [], [])
        n = len(plan.rows)
        if n:
            current = rows.epoch[plan.rows] == plan.epochs
            good = current if finite is None else current & finite[:n]
            if good.all():
                kept, picked, done = plan.rows, tokens[:n], plan.positions + 1
                landed.sequences, landed.indices = list(plan.sequences), self._numbers[:n]
            else:
                indices = np.flatnonzero(good)
                kept, picked, done = plan.rows[indices], tokens[indices], plan.positions[indices] + 1
                landed.indices = indices.tolist()
                landed.sequences = [plan.sequences[i] for i in landed.indices]
            rows.landed[kept] = done
            landed.tokens = picked.tolist()
            deque(map(list.append, rows.outputs[kept].tolist(), landed.tokens), maxlen=0)  # the fastest of loops
            at_eos = (picked[:, None] == rows.eos[kept]).any(1)
            ended = at_eos | (done >= rows.limit[kept])
            for i in np.flatnonzero(ended):
                self._end(landed.sequences[i], "eos" if at_eos[i] else "length", landed)
            if finite is not None:
                for i in np.flatnonzero(current & ~finite[:n]):
                    self._end(plan.sequences[i], "error", landed)
        landed.decodes = len(landed.sequences)
        at = n
        for chunk in plan.chunks:
            sequence = chunk.sequence
            index, at = at, at + chunk.last
            if rows.epoch[chunk.row] != chunk.epoch:
                continue
            rows.landed[chunk.row] = chunk.end
            if not chunk.last:
                continue
            if finite is not None and not finite[index]:
                self._end(sequence, "error", landed)
                continue
            value = int(tokens[index])
            sequence.output.append(value)
            landed.sequences.append(sequence)
            landed.tokens.append(value)
            landed.indices.append(index)
            if value in sequence.eos:
                self._end(sequence, "eos", landed)
            elif chunk.end >= sequence.positions:
                self._end(sequence, "length", landed)
        return landed

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def group(self, prompt: list[int]) -> PromptGroup:
        """The group of all sequences with this prompt; pass it to the `Sequence`."""
        key = tuple(prompt)
        return self._groups.setdefault(key, PromptGroup(key))

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue. It must fit into the pool when it runs alone."""
        # The group is dropped with its last member, and this sequence may have been given it before that.
        sequence.group = self._groups.setdefault(sequence.group.key, sequence.group)
        sequence.group.members += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence from outside (stop string, cancellation); its blocks are free at once."""
        if sequence.state is State.DONE:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence, keep=reason != "error")
        self._leave(sequence, reason)

    def abort_all(self) -> list[Sequence]:
        """Ends everything after a failed step; nothing that the step may have written is kept."""
        ended = [*self._running, *self.waiting]
        self.prefix.clear()
        for sequence in ended:
            self.finish(sequence, "error")
        return ended

    def successor(self) -> Scheduler:
        """An empty scheduler over the same memory, for when this one was interrupted in the middle of its books."""
        pool = self.pool
        fresh = Scheduler(
            pool.num_blocks,
            self.block_size,
            token_budget=self.token_budget,
            max_requests=self.max_running,
            prefill_first=self.prefill_first,
            prefix_cache=self.prefix.enabled,
            grow=pool.grow,
        )
        fresh.pool.touched, fresh.pool.peak_held = max(pool.touched, pool.watermark), pool.peak_held
        fresh.preemptions, fresh.step = self.preemptions, self.step
        return fresh

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self.waiting)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. What now runs is not recorded any further: part of it is what must be forgotten."""
        self.prefix.clear()
        for sequence in self._running:
            sequence.link = None

    def trim(self) -> int:
        """Empties the prefix cache and lowers the watermark as far as running sequences allow; returns it in blocks."""
        self.forget_prefixes()
        return self.pool.trim()

    # ---- decode -----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: BatchPlan, budget: int) -> None:
        rows = self.rows
        ready = self._decoding_rows()
        if not len(ready) or budget <= 0:
            return
        ready = ready[rows.planned[ready] < rows.limit[ready]]
        barred = {c.row for c in plan.chunks}
        if barred:  # prefills went first: the token that would be decoded is only sampled by this very step
            ready = ready[~np.isin(ready, list(barred))]
        if len(ready) > budget:  # only when prefills went first: take turns
            turn = (np.arange(budget) + self._turn) % len(ready)
            self._turn = int(turn[-1]) + 1
            ready = ready[np.sort(turn)]
        needing = ready[rows.planned[ready] == rows.room[ready]]
        fresh = self.pool.allocate_up_to(len(needing))
        served, needing = needing[: len(fresh)], needing[len(fresh) :]
        if fresh:
            rows.append_blocks(served, fresh)
        waits: list[int] = []
        for row in needing.tolist():  # the pool is full
            if rows.owner[row] is None or not rows.decoding[row]:
                continue  # preempted for an older one, a moment ago
            block = self._allocate_for(row, barred)
            if block is None:
                waits.append(row)
            else:
                rows.append_block(row, block)
        if self._decoding_stale:
            ready = ready[rows.decoding[ready]]
        if waits:
            ready = ready[~np.isin(ready, waits)]
        plan.rows = ready
        plan.sequences = rows.owner[ready].tolist()
        plan.positions = rows.planned[ready]
        plan.epochs = rows.epoch[ready]
        rows.planned[ready] = plan.positions + 1

    def _allocate_for(self, row: int, barred: set[int]) -> int | None:
        """A block for a decoding row, if need be by preempting the newest sequence that is not in this plan.

        None when only older sequences could be preempted: then the row waits, and keeps what it has until an older one
        needs it. The oldest waits only for prefills of this very plan; all others go before it. Should it then, alone,
        need memory that cannot be had now, it goes back to the queue, so that nothing runs that cannot go on.
        """
        while True:
            block = self.pool.allocate()
            if block is not None:
                return block
            victim = next((s for s in reversed(self._running) if s.row not in barred), None)
            if victim is None or (victim.row == row and len(self._running) > 1):
                return None
            self._preempt(victim)
            if not self._running:
                return None

    def _decoding_rows(self) -> Ints:
        if self._decoding_stale:
            self._decoding = self._decoding[self.rows.decoding[self._decoding]]
            self._decoding_stale = False
        return self._decoding

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def _plan_prefills(self, plan: BatchPlan, budget: int) -> None:
        for sequence in list(self._prefilling):
            if budget <= 0:
                return
            budget -= self._plan_chunk(plan, sequence, budget)
        waiting_twins = 0
        while budget > 0 and waiting_twins < len(self.waiting) and len(self._running) < self.max_running:
            sequence = self.waiting[waiting_twins]
            if self._awaits_twin(sequence):
                waiting_twins += 1
                continue
            if not self._admit(plan, sequence):
                return
            del self.waiting[waiting_twins]
            budget -= self._plan_chunk(plan, sequence, budget)

    def _awaits_twin(self, sequence: Sequence) -> bool:
        """True while another sequence computes this very prompt; sharing its blocks costs less than doing it again."""
        group = sequence.group
        if not self.prefix.enabled or sequence.output:
            return False
        return group.leader is not None or group.computed_in == self.step

    def _admit(self, plan: BatchPlan, sequence: Sequence) -> bool:
        """Gives a waiting sequence a row and all blocks for its known tokens, or nothing when they are not there."""
        tokens = sequence.tokens(0, sequence.known)
        match = self.prefix.match(tokens, step=self.step)
        # One block in reserve for each running sequence, lest the next step preempts what this one admits.
        reserve = len(self._running)
        needed = -(-len(tokens) // self.block_size) - len(match.blocks)
        revived = sum(self.pool.is_idle(block) for block in match.blocks)
        # A tail that only the cache remembers is held while it is copied: one block more, for a moment.
        extra = match.tail is not None and self.pool.is_idle(match.tail)
        if self.pool.available < needed + revived + extra + reserve:
            if self._running:
                return False
            match.forgo_tail(self.block_size)  # it runs alone: all but that extra block is certain to fit
        for block in match.blocks:
            self.pool.hold(block)
        if match.tail is not None:
            self.pool.hold(match.tail)
        fresh = self._allocate_many(needed)
        if fresh is None and match.tail is not None:  # memory does not grow: perhaps the tail's own block will do
            self.pool.release(match.tail)
            match.forgo_tail(self.block_size)
            fresh = self._allocate_many(needed)
        if fresh is None:
            for block in reversed(match.blocks):
                self.pool.release(block)
            return False
        if match.tail is not None:
            plan.copies.append((match.tail, fresh[0]))  # plan() releases the tail: until then nobody else gets it
        sequence.table = match.blocks + fresh
        sequence.link, sequence.linked = match.link, len(match.blocks)
        sequence.state = State.PREFILL
        self._prefilling[sequence] = None
        row = self.rows.take(sequence)
        self.rows.planned[row] = self.rows.landed[row] = match.tokens
        if not sequence.preemptions:
            sequence.cached_tokens = match.tokens
        self._running[sequence] = None
        # Who finds all of the prompt there but its last token, which everyone computes, lets no twin wait for it.
        if not sequence.output and sequence.group.leader is None and match.tokens < len(tokens) - 1:
            sequence.group.leader = sequence
        plan.admitted.append(sequence)
        return True

    def _allocate_many(self, count: int) -> list[int] | None:
        blocks: list[int] = []
        while len(blocks) < count:
            block = self.pool.allocate()
            if block is None:
                for taken in blocks:
                    self.pool.release(taken)
                return None
            blocks.append(block)
        return blocks

    def _plan_chunk(self, plan: BatchPlan, sequence: Sequence, budget: int) -> int:
        rows, row = self.rows, sequence.row
        start = int(rows.planned[row])
        end = min(sequence.known, start + budget)
        last = end == sequence.known
        epoch = int(rows.epoch[row])
        plan.chunks.append(Chunk(sequence, row, epoch, start, end, sequence.tokens(start, end), last))
        rows.planned[row] = end
        self._link_blocks(sequence, end)
        if last:
            sequence.state = State.DECODE
            del self._prefilling[sequence]
            decoding = self._decoding_rows()  # without those that are gone: this may have been the row of one of them
            rows.decoding[row] = True
            self._decoding = np.append(decoding, np.int32(row))
            if not sequence.output:
                self._remember_tail(sequence)
        return end - start

    def _remember_tail(self, sequence: Sequence) -> None:
        group, size = sequence.group, self.block_size
        if group.leader is sequence:
            group.leader = None
            group.computed_in = self.step
        whole = len(sequence.prompt) // size
        tail = sequence.prompt[whole * size :]
        if len(tail) > 1:
            self.prefix.add(sequence.link, tail, sequence.table[whole], step=self.step)

    def _link_blocks(self, sequence: Sequence, computed: int) -> None:
        """Records the sequence's full blocks up to position `computed` in the prefix cache."""
        if sequence.link is None:
            return
        size, linked = self.block_size, sequence.linked
        link: int | None = sequence.link
        while (linked + 1) * size <= computed:
            at = linked * size
            link = self.prefix.add(link, sequence.tokens(at, at + size), sequence.table[linked], step=self.step)
            linked += 1
        sequence.linked, sequence.link = linked, link

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: str, landed: Landed) -> None:
        self._stop_running(sequence, keep=reason != "error")
        self._leave(sequence, reason)
        landed.finished.append(sequence)

    def _leave(self, sequence: Sequence, reason: str) -> None:
        sequence.state = State.DONE
        sequence.finish_reason = reason
        group = sequence.group
        group.members -= 1
        if group.members == 0:
            del self._groups[group.key]

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence, keep=True)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop_running(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees row and blocks. `keep`: what was computed may stay in the prefix cache."""
        group = sequence.group
        if group.leader is sequence:
            group.leader = None
        if keep:  # what it generated is recorded only now: all at once costs a third of block by block
            self._link_blocks(sequence, int(self.rows.landed[sequence.row]))
        del self._running[sequence]
        self._prefilling.pop(sequence, None)
        self._decoding_stale = True
        self.rows.give_back(sequence.row)
        # Deepest block first: a chain is then evicted from its end, and what is left can still be found.
        for block in reversed(sequence.table):
            if not keep:
                self.prefix.forget(block)
            self.pool.release(block)
        sequence.table = []
        sequence.link, sequence.linked = None, 0

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken. Cheap enough for every step of a test."""
        self.pool.check()
        self.prefix.check()
        references: dict[int, int] = {}
        for sequence in self._running:
            row = sequence.row
            assert self.rows.owner[row] is sequence, "a row with two owners"
            assert self.rows.tables[row, : len(sequence.table)].tolist() == sequence.table, "tables disagree"
            assert self.rows.blocks[row] == len(sequence.table), "table lengths disagree"
            assert len(set(sequence.table)) == len(sequence.table), "a block twice in one table"
            assert self.rows.landed[row] <= self.rows.planned[row] <= self.rows.limit[row], "lengths out of order"
            assert self.rows.planned[row] <= len(sequence.table) * self.block_size, "positions without blocks"
            for block in sequence.table:
                references[block] = references.get(block, 0) + 1
        for block, refs in enumerate(self.pool.refs):
            assert refs == references.get(block, 0), (
                f"block {block}: {refs} references, {references.get(block, 0)} uses"
            )
        assert len(self._running) <= self.max_running, "too many sequences run"
        assert len(self._running) + self.rows.free == self.max_running, "a row is lost"
        for sequence in self.waiting:
            assert sequence.state is State.WAITING, "a sequence waits that is not waiting"
            assert not sequence.table, "a waiting sequence holds blocks"
        members = sum(group.members for group in self._groups.values())
        assert members == len(self._running) + len(self.waiting), "a group has lost a member"


_NO_ROWS: Ints = np.empty(0, np.int32)
_NO_EPOCHS: NDArray[np.int64] = np.empty(0, np.int64)
