"""Sampling on a CUDA device by two Triton launches, for rows that need neither truncation nor their history.

Greedy, temperature, and both log-probabilities. What it cannot do goes to the torch sampler (sampler.py), which says
the same of every row that both can do.
"""

from __future__ import annotations

import torch

from flatbed.kernels import sampling as kernels
from flatbed.kernels.launch import pdl
from flatbed.memory.capacity import power_of_two

_CHUNK = 2048
FIELDS = 4


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
) -> torch.Tensor:
    """A token for each row of logits [n, vocabulary] (any float dtype, rows contiguous).

    Args:
        temperature: float32 [n]; 0 is greedy.
        uniform: float32 [n] in (0, 1]: where the cumulative distribution, in vocabulary order, is inverted.
        rows: int32 [n]; each token is also written to last_tokens[rows[i]].
        last_tokens: int64, by row.

    Returns int32 [n, 4]: the token, 1 if the logits are finite, and the bits of two float32 log-probabilities of the
    token, at its temperature and at temperature 1.
    """
    n, vocabulary = logits.shape
    chunks = -(-vocabulary // _CHUNK)
    partials = torch.empty(n, chunks, 4, dtype=torch.float32, device=logits.device)
    out = torch.empty(n, FIELDS, dtype=torch.int32, device=logits.device)
    kernels.partials_kernel[(n, chunks)](
        logits, partials, temperature, vocabulary, logits.stride(0), CHUNK=_CHUNK, num_warps=4, **pdl(logits.device)
    )
    kernels.draw_kernel[(n,)](
        logits, partials, temperature, uniform, rows, last_tokens, out, chunks, vocabulary, logits.stride(0),
        CHUNK=_CHUNK, CHUNKS=power_of_two(chunks, 16), num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    return out
