"""Sampling on a CUDA device by Triton kernels (see kernels/sampling.py), launch by launch or inside of a CUDA graph.

`draw` does greedy, temperature and both log-probabilities, for all rows of a step; `Redraw` draws those anew that ask
for a repetition penalty, top-k, top-p or min-p. What a row gets depends on that row alone. The torch sampler
(sampler.py) says the same of every row, but for rounding; rows with Transformers' own processors go there.
"""

from __future__ import annotations

import torch

from flatbed.kernels import sampling as kernels
from flatbed.kernels.launch import pdl
from flatbed.memory.capacity import power_of_two

_CHUNK = 2048
_CHUNK_GROUPS = _CHUNK // kernels.GROUP.value
# Chunks that a program of maxima_kernel reads when there are more than so many: most rows of a step may ask for
# nothing, and programs cost even then.
_SPAN, _MANY_CHUNKS = 4, 2048
# Groups of tokens that a program of choose_kernel looks at at a time.
_TILE = 128
# Low bits of a logit's float32 that its dtype leaves at zero.
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13}
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


class Redraw:
    """Draws the rows anew that `processing` asks something for, once `draw` has drawn all; takes its memory when made.

    Args:
        processing: int32 [n, 4]: top-k (0: off), and the bits of float32 top-p, min-p and repetition penalty (see
            `DeviceParameters`). A greedy row may only ask for the penalty.
        seen: int32 [any, ceil(vocabulary / 32)]: the tokens that row rows[i] has seen, which its token is added to (see
            `SeenTokens`). None where no row has a penalty.
        others: as for `draw`.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        uniform: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        processing: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> None:
        n, vocabulary = logits.shape
        self._chunks = -(-vocabulary // _CHUNK)
        groups = self._chunks * _CHUNK_GROUPS
        self._logits, self._temperature, self._uniform = logits, temperature, uniform
        self._rows, self._last_tokens, self._processing = rows, last_tokens, processing
        self._partials = torch.empty(n, 2, self._chunks, 4, dtype=torch.float32, device=logits.device)
        self._maxima = torch.empty(n, groups, dtype=torch.float32, device=logits.device)
        self._listed = torch.empty(n, groups, dtype=torch.int32, device=logits.device)
        self._seen = self._listed if seen is None else seen  # which is not read where no row has a penalty

    def __call__(self, out: torch.Tensor) -> None:
        """Overwrites in `out`, and in last_tokens, what `draw` gave those rows.

        The first of their log-probabilities is that among the tokens that are kept, after the penalty; the second that
        of the model's own logits. Not finite are logits that the penalty made so, too.
        """
        logits, seen = self._logits, self._seen
        n, vocabulary = logits.shape
        early = pdl(logits.device)
        span = _SPAN if n * self._chunks > _MANY_CHUNKS else 1
        kernels.maxima_kernel[(n, -(-self._chunks // span))](
            logits, self._partials, self._maxima, self._rows, self._temperature, self._processing, seen, seen.stride(0),
            self._chunks, span, vocabulary, logits.stride(0), CHUNK=_CHUNK, PDL=early["PDL"], num_warps=8, maxnreg=64,
        )  # fmt: skip
        kernels.choose_kernel[(n,)](
            logits, self._partials, self._maxima, self._listed, self._rows, self._temperature, self._uniform,
            self._processing, seen, seen.stride(0), self._last_tokens, out, self._chunks, vocabulary, logits.stride(0),
            SHIFT=_ZERO_BITS.get(logits.dtype, 0), CHUNK_GROUPS=_CHUNK_GROUPS, CHUNKS=power_of_two(self._chunks, 16),
            GROUPS=power_of_two(self._chunks * _CHUNK_GROUPS), TILE=_TILE, num_warps=16, **early,
        )  # fmt: skip
