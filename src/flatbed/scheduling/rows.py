"""Per-row state of running sequences as numpy arrays, so that a step over 1,024 rows is a few array operations.

A sequence has two lengths. *planned* counts positions that some plan computes; *landed* counts those whose results have
come back. The model may run several steps behind the plan and the results another few behind the model::

      positions   0 ───────────── landed ───────────── planned ─────────────── limit
                  results known here  │ on their way       │ not planned yet     │ never computed
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatbed.scheduling.plan import Ints, Sequence

_INITIAL_WIDTH = 8


class Rows:
    """Arrays of `count` rows. A row belongs to one running sequence at a time.

    Attributes:
        planned, landed, limit: positions, int32.
        blocks: how many blocks the row's table holds, int32.
        eos: the row's EOS token ids, int64 [count, most], filled up with -1.
        decoding: the row's prompt is computed and the row gets a token each step, bool.
        epoch: raised when a row is taken, so that late results of its former owner can be told apart, int64.
        tables: block ids, int32 [count, width]. Grows with the longest running sequence, not with the capacity.
        room: positions that the row's blocks have room for, int32.
        owner: the sequence in each row, or None.
        outputs: its list of generated tokens.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.planned = np.zeros(count, np.int32)
        self.landed = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.blocks = np.zeros(count, np.int32)
        self.eos = np.full((count, 1), -1, np.int64)
        self.decoding = np.zeros(count, bool)
        self.epoch = np.zeros(count, np.int64)
        self.tables: Ints = np.zeros((count, _INITIAL_WIDTH), np.int32)
        self.owner: NDArray[np.object_] = np.full(count, None, object)
        self.outputs: NDArray[np.object_] = np.full(count, None, object)
        self.room = np.zeros(count, np.int32)
        self.block_size = block_size
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence) -> int:
        """Gives the sequence a row whose table holds `sequence.table`."""
        row = self._free.pop()
        sequence.row = row
        self.owner[row] = sequence
        self.outputs[row] = sequence.output
        self.epoch[row] += 1
        self.planned[row] = self.landed[row] = 0
        self.limit[row] = sequence.positions
        self.decoding[row] = False
        if len(sequence.eos) > self.eos.shape[1]:
            wider = np.full((len(self.eos), len(sequence.eos)), -1, np.int64)
            wider[:, : self.eos.shape[1]] = self.eos
            self.eos = wider
        self.eos[row] = -1
        self.eos[row, : len(sequence.eos)] = sorted(sequence.eos)
        self._fit(len(sequence.table))
        self.tables[row, : len(sequence.table)] = sequence.table
        self.blocks[row] = len(sequence.table)
        self.room[row] = len(sequence.table) * self.block_size
        return row

    def append_blocks(self, rows: Ints, blocks: list[int]) -> None:
        """Adds one block to each of several rows."""
        at = self.blocks[rows]
        self._fit(int(at.max()) + 1)
        self.tables[rows, at] = blocks
        self.blocks[rows] = at + 1
        self.room[rows] += self.block_size
        for owner, block in zip(self.owner[rows].tolist(), blocks, strict=True):
            owner.table.append(block)

    def append_block(self, row: int, block: int) -> None:
        """Adds a block to the row's table and to its owner's."""
        table = self.owner[row].table
        at = len(table)
        if at == self.tables.shape[1]:
            self._fit(at + 1)
        self.tables[row, at] = block
        table.append(block)
        self.blocks[row] = at + 1
        self.room[row] = (at + 1) * self.block_size

    def give_back(self, row: int) -> None:
        """Frees the row."""
        owner = self.owner[row]
        assert owner is not None
        owner.row = -1
        self.outputs[row] = None
        self.owner[row] = None
        self.epoch[row] += 1
        self.decoding[row] = False
        self._free.append(row)

    def _fit(self, width: int) -> None:
        have = self.tables.shape[1]
        if width > have:
            wider = np.zeros((len(self.tables), max(width, 2 * have)), np.int32)
            wider[:, :have] = self.tables
            self.tables = wider
