"""Triton kernels that turn logits into tokens without sorting and without touching the logits more than twice.

::

      logits [rows, vocabulary]
        ├─ chunk 0 ─┐  partials_kernel: one program per (row, chunk): maximum, where, sum of exp at temperature 1 and t
        ├─ chunk 1 ─┤
        └─ ...     ─┴▶ draw_kernel: one program per row: greedy takes the largest maximum; sampling finds the chunk in
                       which the cumulative distribution passes u, reads it again, and finds the token in it
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def partials_kernel(
    logits, partials, temperature, vocabulary, row_stride, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Partials of one chunk: float32 [rows, chunks, 4]: maximum (NaN if there is one), place of it, two sums."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocabulary
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + row)
    inverse = tl.where(t > 0, 1.0 / tl.maximum(t, 1e-20), 1.0)
    bad = tl.sum((x != x).to(tl.int32), 0)
    top = tl.max(x, 0)
    where = tl.argmax(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    raw = tl.sum(tl.exp(x - base), 0)
    warm = tl.sum(tl.exp((x - base) * inverse), 0)
    out = partials + (row * chunks + chunk) * 4
    tl.store(out, tl.where(bad > 0, float("nan"), top))
    tl.store(out + 1, (chunk * CHUNK + where).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(out + 2, raw)
    tl.store(out + 3, warm)


@triton.jit
def draw_kernel(
    logits, partials, temperature, uniform, rows, last_tokens, out, chunks, vocabulary, row_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row's token. `out` int32 [rows, 4]: token, 1 if the logits are finite, bits of two float32 log-probabilities
    (at temperature t, and at 1). The token also goes to last_tokens[rows[row]]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    inverse = tl.where(t > 0, 1.0 / tl.maximum(t, 1e-20), 1.0)
    index = tl.arange(0, CHUNKS)
    part = partials + (row * chunks + index) * 4
    inside = index < chunks
    top = tl.load(part, mask=inside, other=float("-inf"))
    where = tl.load(part + 1, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    raw = tl.load(part + 2, mask=inside, other=0.0)
    warm = tl.load(part + 3, mask=inside, other=0.0)
    bad = tl.sum((top != top).to(tl.int32), 0)
    best = tl.max(tl.where(top != top, float("-inf"), top), 0)
    finite = (bad == 0) & (best > float("-inf")) & (best < float("inf"))
    best = tl.where(finite, best, 0.0)
    first = tl.argmax(top, 0)
    token = tl.sum(tl.where(index == first, where, 0), 0)
    shifted = tl.where(inside & (top > float("-inf")), top - best, float("-inf"))
    raw_total = tl.sum(tl.where(shifted > float("-inf"), raw * tl.exp(shifted), 0.0), 0)
    mass = tl.where(shifted > float("-inf"), warm * tl.exp(shifted * inverse), 0.0)
    total = tl.sum(mass, 0)
    if (t > 0) & finite:
        target = tl.load(uniform + row) * total
        ends = tl.cumsum(mass, 0)
        chunk = tl.sum((ends <= target).to(tl.int32), 0)
        chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, index, 0), 0))
        rest = target - tl.sum(tl.where(index < chunk, mass, 0.0), 0)
        inner = tl.arange(0, CHUNK)
        at = chunk * CHUNK + inner
        x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        p = tl.exp((x - best) * inverse)
        place = tl.sum((tl.cumsum(p, 0) <= rest).to(tl.int32), 0)
        # Rounding may carry the sum past the chunk's end, or onto a token that has no probability.
        place = tl.minimum(place, tl.max(tl.where(p > 0, inner, 0), 0))
        token = chunk * CHUNK + place
    token = tl.where(finite, token, 0)
    chosen = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32) - best
    tl.store(out + row * 4, token)
    tl.store(out + row * 4 + 1, finite.to(tl.int32))
    tl.store(out + row * 4 + 2, (chosen * inverse - tl.log(total)).to(tl.int32, bitcast=True))
    tl.store(out + row * 4 + 3, (chosen - tl.log(raw_total)).to(tl.int32, bitcast=True))
    tl.store(last_tokens + tl.load(rows + row), token.to(tl.int64))
