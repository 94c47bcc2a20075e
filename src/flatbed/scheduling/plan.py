"""What the scheduler asks of the model runner: one `BatchPlan` per forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class State(IntEnum):
    """Where a sequence is. It only moves down this list, but for preemption: running → WAITING."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


class PromptGroup:
    """All sequences that begin with the same prompt: the samples of a request, and equal requests (twins).

    Attributes:
        leader: the sequence that is prefilling the prompt right now; its twins wait for it and then share.
        members: how many sequences of the group are not done.
        computed_in: the step that computed the end of the prompt, or None.
    """

    __slots__ = ("computed_in", "key", "leader", "members")

    def __init__(self, key: tuple[int, ...]) -> None:
        self.key = key
        self.leader: Sequence | None = None
        self.members = 0
        self.computed_in: int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request, as the scheduler sees it.

    Attributes:
        request_id, sample: whose it is.
        prompt: token ids.
        max_new_tokens: the most tokens to generate.
        eos: token ids that end it.
        output: generated tokens that have landed.
        row: its place in the row tables while it runs, else -1.
        table: its blocks, in order of positions, while it runs.
        link: its chain in the prefix cache as far as it is recorded; None when it is recorded no further.
        linked: how many of its blocks that chain covers.
        cached_tokens: prompt tokens that were not computed, because blocks were shared or copied.
        preemptions: how often it was thrown out and recomputed.
        watched: each of its tokens is of interest when it lands, not only the whole at the end.
        finish_reason: set when it is done.
    """

    request_id: str
    sample: int
    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int]
    group: PromptGroup
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    row: int = -1
    table: list[int] = field(default_factory=list)
    link: int | None = None
    linked: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    watched: bool = False
    finish_reason: str | None = None

    @property
    def known(self) -> int:
        """Tokens whose value is known here: the prompt and what has landed."""
        return len(self.prompt) + len(self.output)

    @property
    def positions(self) -> int:
        """Positions that are ever computed: all but the last token."""
        return len(self.prompt) + self.max_new_tokens - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end-1."""
        p = len(self.prompt)
        if end <= p:
            return self.prompt[start:end]
        if start >= p:
            return self.output[start - p : end - p]
        return self.prompt[start:] + self.output[: end - p]


@dataclass(slots=True)
class Chunk:
    """A run of one sequence's tokens to compute: positions start .. end-1.

    Attributes:
        last: the chunk ends at the last known token, so that a token is sampled from it.
    """

    sequence: Sequence
    row: int
    epoch: int
    start: int
    end: int
    tokens: list[int]
    last: bool


@dataclass(slots=True)
class BatchPlan:
    """One forward pass. Its token order is: the decodes, a token each, then the chunks.

    ::

        decodes (n)             chunk 0                chunk 1
        ┌─┬─┬─┬─┐ ┌──────────────────────────┐ ┌──────────────────┐
        └─┴─┴─┴─┘ └──────────────────────────┘ └──────────────────┘
         ▲ ▲ ▲ ▲                            ▲                     (not its last chunk: no logits)
         └─┴─┴─┴────────── sampled ─────────┘

    Attributes:
        step: a running number.
        sequences: the decoding sequences.
        rows: their rows, int32 [n].
        positions: the position computed for each, int32 [n].
        epochs: of `rows` when this was planned: a result for a row that has since changed hands is dropped.
        chunks: prefill.
        reused: blocks that held other tokens before and may hold NaN. A backend that multiplies what it does not
            need by zero fills them with zeros, first of all.
        copies: (from, to) blocks to copy next, before anything is computed. No `from` is a `to` or reused in the same
            plan.
        admitted: sequences that got their row in this plan.
        tables: the row tables, int32 [rows, width]: the block at [row, position // block_size].
    """

    step: int
    sequences: list[Sequence]
    rows: Ints
    positions: Ints
    epochs: NDArray[np.int64]
    chunks: list[Chunk]
    reused: list[int]
    copies: list[tuple[int, int]]
    admitted: list[Sequence]
    tables: Ints

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(c.end - c.start for c in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of their logits."""
        return self.sequences + [c.sequence for c in self.chunks if c.last]

    def sampled_rows(self) -> tuple[Ints, Ints]:
        """Rows of `sampled`, and the position that each token is sampled at, int32 [samples]."""
        last = [c for c in self.chunks if c.last]
        if not last:
            return self.rows, self.positions
        return (
            np.concatenate([self.rows, np.array([c.row for c in last], np.int32)]),
            np.concatenate([self.positions, np.array([c.end - 1 for c in last], np.int32)]),
        )

    @property
    def request_ids(self) -> list[str]:
        """Every request in the batch, once."""
        return list(
            dict.fromkeys([s.request_id for s in self.sequences] + [c.sequence.request_id for c in self.chunks])
        )


@dataclass(slots=True)
class Landed:
    """What a step's results meant: the sequences that got a token, the tokens, and those that are done with it.

    Attributes:
        indices: where each token stood among the step's results.
        decodes: that many of the sequences, from the first, had a token before; for the others it is their first, or
            their first since they were preempted.
    """

    sequences: list[Sequence]
    tokens: list[int]
    indices: list[int]
    finished: list[Sequence]
    decodes: int = 0
