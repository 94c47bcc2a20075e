"""Random numbers that are a function of (seed, sample, token number) and of nothing else.

Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011):
the key is the request's seed, the counter says which token of which sample. So a token's random number does not
depend on the batch, the order of steps, preemption or the device, and any of them can be computed again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


Word = NDArray[np.uint64]


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of each element: words of 32 bits, each in a uint64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniform(seed: NDArray[np.uint64], sample: NDArray[np.int64], token: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in (0, 1) for each element, from 32 random bits: (bits + 1/2) / 2**32."""
    c0 = token.astype(np.uint64) & _LOW
    c1 = sample.astype(np.uint64) & _LOW
    zero = np.zeros_like(c0)
    bits = philox4x32((c0, c1, zero, zero), (seed & _LOW, seed >> _SHIFT))[0]
    return (bits.astype(np.float64) + 0.5) / 2.0**32


def derive_seed(root: int, number: int) -> int:
    """The seed of request `number` under the engine's seed: a 64-bit mix (the finalizer of SplitMix64)."""
    mask = (1 << 64) - 1
    z = (root + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
