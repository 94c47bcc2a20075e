"""Which tokens the prompt and the completion of a row hold: what the repetition penalty is applied to.

::

      bits int32 [rows, ceil(vocabulary / 32)]        token t of row r: bit t % 32 of bits[r, t // 32]

A row's bits are set from its history when it first samples, and from then on by whoever draws its tokens: on a CUDA
device the kernel that does, so that the next step need not wait for the token to reach the CPU. Memory is taken when
the first row with a penalty comes, and grows with the rows that have one.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.memory.capacity import power_of_two
from flatbed.memory.transfer import upload
from flatbed.scheduling.plan import Ints, Sequence

_WORD = 32
_LEAST_ROWS = 8


class SeenTokens:
    """The tokens that rows with a repetition penalty have seen.

    Attributes:
        bits: int32 [rows, words] on the device (see above), or None before there is a row. Another tensor when it grew.
    """

    def __init__(self, device: torch.device) -> None:
        self.bits: torch.Tensor | None = None
        self._device = device
        self._held: set[int] = set()  # rows whose bits are theirs

    def forget(self, row: int) -> None:
        """The row belongs to another sequence now."""
        self._held.discard(row)

    def hold(self, rows: Ints, sequences: Many[Sequence], vocabulary: int) -> torch.Tensor:
        """Sets the bits of those of the rows that are not held yet, from prompt and output of their sequences; returns
        `bits`. Tokens beyond the vocabulary are left out: there is no logit to penalise."""
        words = -(-vocabulary // _WORD)
        if self.bits is None or self.bits.shape[1] != words or int(rows.max()) >= len(self.bits):
            self._grow(int(rows.max()) + 1, words)
        assert self.bits is not None
        fresh = [(int(row), sequence) for row, sequence in zip(rows, sequences, strict=True) if row not in self._held]
        if fresh:
            index, packed = zip(*((row, _packed(sequence, words)) for row, sequence in fresh), strict=True)
            self.bits[upload(np.array(index, np.int64), self._device)] = upload(np.stack(packed), self._device)
            self._held.update(index)
        return self.bits

    def of(self, rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """bool [n, vocabulary] of rows int64 [n] that are held."""
        assert self.bits is not None
        shifts = torch.arange(_WORD, dtype=torch.int32, device=self._device)
        return ((self.bits[rows][:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Adds a token to each of the rows, which are all different; both int64 [n]."""
        assert self.bits is not None
        word = tokens // _WORD
        bit = torch.ones_like(tokens, dtype=torch.int32) << (tokens % _WORD).int()
        self.bits[rows, word] |= bit

    def _grow(self, rows: int, words: int) -> None:
        former = self.bits
        if former is not None and former.shape[1] != words:  # the model has another vocabulary now
            former, self._held = None, set()
        self.bits = torch.zeros(power_of_two(rows, _LEAST_ROWS), words, dtype=torch.int32, device=self._device)
        if former is not None:
            self.bits[: len(former)] = former


def _packed(sequence: Sequence, words: int) -> NDArray[np.int32]:
    """The bits int32 [words] of what is known of a sequence."""
    flags = np.zeros(words * _WORD, bool)
    ids = np.array(sequence.prompt + sequence.output, np.int64)
    flags[ids[ids < len(flags)]] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)
