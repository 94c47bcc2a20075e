"""Triton kernels that turn logits into tokens, inside of a CUDA graph, without sorting the vocabulary.

Every row is drawn by two kernels, which read the logits once and one chunk of them again::

      logits [rows, vocabulary]
        ├─ chunk 0 ─┐  partials_kernel: one program per (row, chunk): maximum, where, sum of exp at temperature 1 and t
        ├─ chunk 1 ─┤
        └─ ...     ─┴▶ draw_kernel: one program per row: greedy takes the largest maximum; sampling finds the chunk in
                       which the cumulative distribution passes u, reads it again, and finds the token in it

That is all there is for rows that ask for a temperature at most. Where a row of the step asks for a repetition penalty,
top-k, top-p or min-p, two more kernels follow, which leave the other rows as they are and draw these anew::

      logits ─▶ maxima_kernel: one program per (row, chunk): penalty, partials, the maximum of every group of 32 tokens
             ─▶ choose_kernel: one program per row: lists the groups of the largest maxima, finds the cutoff among the
                tokens of the list, draws among what is kept

The list holds all that is kept. For top-k it is the groups whose maxima are the k largest: they hold k logits that are
no smaller than the smallest of these maxima, so the cutoff is no smaller either. For top-p and min-p the first list is
a guess: where the sums over it tell that it does not hold all, a longer one is made, at last of all groups. The cutoff
is found by narrowing an interval of floats, three pivots at a time: each pass over the list adds up what is at or above
each pivot (tokens for top-k, probability for top-p).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Tokens in a group: as many as a word of the seen tokens has bits.
GROUP: tl.constexpr = tl.constexpr(32)
# Groups in the first list of a row without top-k, and by how much each further list is longer.
_FIRST: tl.constexpr = tl.constexpr(256)
_LONGER: tl.constexpr = tl.constexpr(4)
# `_key` of the lowest finite float32, and that float.
_LOWEST_KEY: tl.constexpr = tl.constexpr(-0x7F800000)
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
# The lengths of lists need not be minimal: maxima are compared without this many of their low bits.
_COARSE: tl.constexpr = tl.constexpr(14)


@triton.jit
def _inverse(t):
    """What logits are multiplied by at temperature t (0: greedy)."""
    return tl.where(t > 0, 1.0 / tl.maximum(t, 1e-20), 1.0)


@triton.jit
def _summarise(x, chunk, inverse, out, CHUNK: tl.constexpr):
    """Writes the partials of logits x [CHUNK] of a chunk: maximum (NaN if there is one), place of it, two sums."""
    bad = tl.sum((x != x).to(tl.int32), 0)
    top = tl.max(x, 0)
    where = tl.argmax(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    raw = tl.sum(tl.exp(x - base), 0)
    warm = tl.sum(tl.exp((x - base) * inverse), 0)
    tl.store(out, tl.where(bad > 0, float("nan"), top))
    tl.store(out + 1, (chunk * CHUNK + where).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(out + 2, raw)
    tl.store(out + 3, warm)


@triton.jit
def _combine(part, chunks, inverse, CHUNKS: tl.constexpr):
    """A row's partials together: its largest logit (0 unless all is finite), whether all is finite, the place of the
    largest, the sum of exp at temperature 1, and of each chunk [CHUNKS] at temperature t; relative to the largest."""
    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    top = tl.load(part + index * 4, mask=inside, other=float("-inf"))
    where = tl.load(part + index * 4 + 1, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    raw = tl.load(part + index * 4 + 2, mask=inside, other=0.0)
    warm = tl.load(part + index * 4 + 3, mask=inside, other=0.0)
    bad = tl.sum((top != top).to(tl.int32), 0)
    best = tl.max(tl.where(top != top, float("-inf"), top), 0)
    finite = (bad == 0) & (best > float("-inf")) & (best < float("inf"))
    best = tl.where(finite, best, 0.0)
    first = tl.argmax(top, 0)
    place = tl.sum(tl.where(index == first, where, 0), 0)
    shifted = tl.where(inside & (top > float("-inf")), top - best, float("-inf"))
    raw_total = tl.sum(tl.where(shifted > float("-inf"), raw * tl.exp(shifted), 0.0), 0)
    mass = tl.where(shifted > float("-inf"), warm * tl.exp(shifted * inverse), 0.0)
    return best, finite, place, raw_total, mass


@triton.jit
def _passed(mass, target, SIZE: tl.constexpr):
    """Where the running sum of mass [SIZE] passes the target. Rounding may carry it past the end, or onto an entry that
    has none: then the last that has some."""
    place = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    return tl.minimum(place, tl.max(tl.where(mass > 0, tl.arange(0, SIZE), 0), 0))


@triton.jit
def partials_kernel(
    logits, partials, temperature, vocabulary, row_stride, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Partials of one chunk: float32 [rows, chunks, 4] (see `_summarise`)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocabulary
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    _summarise(x, chunk, _inverse(tl.load(temperature + row)), partials + (row * chunks + chunk) * 4, CHUNK)


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
    inverse = _inverse(t)
    best, finite, token, raw_total, mass = _combine(partials + row * chunks * 4, chunks, inverse, CHUNKS)
    total = tl.sum(mass, 0)
    if (t > 0) & finite:
        target = tl.load(uniform + row) * total
        chunk = _passed(mass, target, CHUNKS)
        rest = target - tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, mass, 0.0), 0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        token = chunk * CHUNK + _passed(tl.exp((x - best) * inverse), rest, CHUNK)
    token = tl.where(finite, token, 0)
    chosen = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32) - best
    tl.store(out + row * 4, token)
    tl.store(out + row * 4 + 1, finite.to(tl.int32))
    tl.store(out + row * 4 + 2, (chosen * inverse - tl.log(total)).to(tl.int32, bitcast=True))
    tl.store(out + row * 4 + 3, (chosen - tl.log(raw_total)).to(tl.int32, bitcast=True))
    tl.store(last_tokens + tl.load(rows + row), token.to(tl.int64))


# ---- penalty, top-k, top-p, min-p -----------------------------------------------------------------------------------


@triton.jit
def _wishes(processing, row, vocabulary):
    """A row of `processing` int32 [rows, 4]: top-k, then the bits of top-p, min-p and the repetition penalty; and
    whether it truncates."""
    wish = processing + row * 4
    top_k = tl.load(wish)
    top_p = tl.load(wish + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(wish + 2).to(tl.float32, bitcast=True)
    penalty = tl.load(wish + 3).to(tl.float32, bitcast=True)
    top_k = tl.where(top_k < vocabulary, top_k, 0)
    return top_k, top_p, min_p, penalty, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _penalised(x, word, penalty):
    """Logits x [any, GROUP] after the penalty on those whose bit of their group's word [any, 1] is set."""
    bit = (word >> tl.arange(0, GROUP)[None, :]) & 1
    return tl.where(bit != 0, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)


@triton.jit
def _key(x):
    """int32 in the order of the floats x (-0.0 before 0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    """The float of a `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(a, b):
    """(a + b) // 2 without overflow."""
    return (a & b) + ((a ^ b) >> 1)


@triton.jit(do_not_specialize=["span"])
def maxima_kernel(
    logits, partials, maxima, rows, temperature, processing, seen, words, chunks, span, vocabulary, row_stride,
    CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of `span` chunks of a row that asks for processing: partials float32 [rows, 2, chunks, 4], of the model's logits
    and (where there is a penalty) after it, and the maximum of each group after it, float32 [rows, chunks * 64]."""
    if PDL:
        gdc_launch_dependents()
    row, begin = tl.program_id(0), tl.program_id(1) * span
    _, _, _, penalty, truncates = _wishes(processing, row, vocabulary)
    if truncates | (penalty != 1.0):
        inverse = _inverse(tl.load(temperature + row))
        logits += row.to(tl.int64) * row_stride
        seen += tl.load(rows + row).to(tl.int64) * words
        maxima += row * (chunks * (CHUNK // GROUP))
        partials += row * 2 * chunks * 4
        for chunk in range(begin, tl.minimum(begin + span, chunks)):
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
            _summarise(tl.reshape(x, (CHUNK,)), chunk, inverse, partials + chunk * 4, CHUNK)
            if penalty != 1.0:
                word = tl.load(seen + group, mask=group < words, other=0)
                x = _penalised(x, word[:, None], penalty)
                _summarise(tl.reshape(x, (CHUNK,)), chunk, inverse, partials + (chunks + chunk) * 4, CHUNK)
            if truncates:
                tl.store(maxima + group, tl.max(x, 1))


@triton.jit
def _nth_largest(keys, wanted):
    """A lower bound of the `wanted`-th largest of the keys, with not many more keys at or above it. There must be
    enough keys of finite floats."""
    coarse = keys >> _COARSE
    low = tl.min(tl.where(keys >= _LOWEST_KEY, coarse, 0x7FFFFFFF), 0)
    high = tl.max(coarse, 0) + 1
    middle = _middle(low, high)
    while middle > low:
        enough = tl.sum((coarse >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = _middle(low, high)
    return tl.maximum(low << _COARSE, _LOWEST_KEY)


@triton.jit
def _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE: tl.constexpr):
    """TILE groups of a list of `count`, from `start`: logits after the penalty, -inf where there are no more, and their
    token ids; both [TILE, GROUP]."""
    index = start + tl.arange(0, TILE)
    group = tl.load(listed + index, mask=index < count, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (index < count)[:, None] & (at < vocabulary)
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if penalty != 1.0:
        x = _penalised(x, tl.load(seen + group, mask=index < count, other=0)[:, None], penalty)
    return x, at


@triton.jit
def _at_least(logits, listed, count, seen, penalty, vocabulary, best, inverse, cut, TILE: tl.constexpr):
    """How many listed tokens have logits of at least `cut`, and the sum of their exp."""
    number = tl.zeros((TILE, GROUP), tl.int32)
    mass = tl.zeros((TILE, GROUP), tl.float32)
    for start in range(0, count, TILE):
        x, _at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
        number += (x >= cut).to(tl.int32)
        mass += tl.where(x >= cut, tl.exp((x - best) * inverse), 0.0)
    return tl.sum(number), tl.sum(mass)


@triton.jit
def _least(key, shift):
    """The smallest float that has this key when its last `shift` bits are left out."""
    return _float(key << shift)


@triton.jit
def _between(low, high, shift):
    """The key, above low and below high, of the float in the middle between theirs."""
    middle = _least(low, shift) * 0.5 + _least(high, shift) * 0.5
    return tl.minimum(tl.maximum(_key(middle) >> shift, low + 1), high - 1)


@triton.jit
def _cutoff(
    logits, listed, count, seen, penalty, vocabulary, best, inverse, lowest, highest, target,
    SHIFT: tl.constexpr, WEIGHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest logit such that the listed tokens that have it or more reach the target: their exp if WEIGHED, else
    their number. Those from `lowest` on must reach it, those above `highest` must not.

    Keys are first told apart without their last SHIFT bits, which are alike in all that the model gave. Where penalties
    made others of the same key, these are told apart in the end.
    """
    shift = SHIFT
    low, high = _key(lowest) >> shift, (_key(highest) >> shift) + 1
    alike = tl.where(penalty != 1.0, SHIFT, 0)
    while (low + 1 < high) | (alike > 0):
        if low + 1 < high:
            # The middle as numbers go, and the middles of what is on both sides of it as keys go: so the interval
            # shrinks fast where the logits are evenly spread, and at least by half where they are of different orders.
            second = _between(low, high, shift)
            first, third = _middle(low, second), _middle(second, high)
            above_first = tl.zeros((TILE, GROUP), tl.float32)
            above_second = tl.zeros((TILE, GROUP), tl.float32)
            above_third = tl.zeros((TILE, GROUP), tl.float32)
            for start in range(0, count, TILE):
                x, _at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
                if WEIGHED:
                    weight = tl.exp((x - best) * inverse)
                else:
                    weight = tl.full((TILE, GROUP), 1.0, tl.float32)
                above_first += tl.where(x >= _least(first, shift), weight, 0.0)
                above_second += tl.where(x >= _least(second, shift), weight, 0.0)
                above_third += tl.where(x >= _least(third, shift), weight, 0.0)
            reaches_first = tl.sum(above_first) >= target
            reaches_second = tl.sum(above_second) >= target
            reaches_third = tl.sum(above_third) >= target
            if reaches_second:
                low, high = tl.where(reaches_third, third, second), tl.where(reaches_third, high, third)
            else:
                low, high = tl.where(reaches_first, first, low), tl.where(reaches_first, second, first)
        else:
            least = tl.full((TILE, GROUP), float("inf"), tl.float32)
            most = tl.full((TILE, GROUP), float("-inf"), tl.float32)
            for start in range(0, count, TILE):
                x, _at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
                here = (x >= _least(low, shift)) & (x < _least(low + 1, shift))
                least = tl.minimum(least, tl.where(here, x, float("inf")))
                most = tl.maximum(most, tl.where(here, x, float("-inf")))
            low, high = _key(tl.min(least)), _key(tl.max(most)) + 1
            shift = 0
            alike = 0
    # What the model gave has zeros in the bits that were left out: ones in the key of a negative number.
    return _float((low << shift) | tl.where(low < 0, (1 << shift) - 1, 0))


@triton.jit
def _first_kept(
    logits, listed, count, seen, penalty, vocabulary, best, inverse, t, cut, target, TILE: tl.constexpr
):  # fmt: skip
    """The first of the tokens whose score (logit over t) is the cutoff's that stays, and the sum of exp of all that do.
    What is above the cutoff has less than the target; of those at it as many stay as are needed to reach it, the last
    ones of the vocabulary."""
    edge = tl.div_rn(cut, t)
    number = tl.zeros((TILE, GROUP), tl.int32)
    mass = tl.zeros((TILE, GROUP), tl.float32)
    for start in range(0, count, TILE):
        x, _at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
        score = tl.div_rn(x, t)
        number += (score == edge).to(tl.int32)
        mass += tl.where(score > edge, tl.exp((x - best) * inverse), 0.0)
    equal, above = tl.sum(number), tl.sum(mass)
    each = tl.maximum(tl.exp((cut - best) * inverse), 1e-37)
    needed = tl.ceil((target - above) / each)
    stay = tl.maximum(tl.minimum(needed, equal.to(tl.float32)), 1.0).to(tl.int32)
    first = 0
    if stay < equal:
        first = vocabulary
        passed = 0
        for start in range(0, count, TILE):
            x, at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
            tie = tl.reshape((tl.div_rn(x, t) == edge).to(tl.int32), (TILE * GROUP,))
            stays = (tie > 0) & (passed + tl.cumsum(tie, 0) > equal - stay)
            first = tl.minimum(first, tl.min(tl.where(stays, tl.reshape(at, (TILE * GROUP,)), vocabulary), 0))
            passed += tl.sum(tie, 0)
    return first, above + stay * each


@triton.jit
def _kept(x, at, best, inverse, t, cut, first, min_p):
    """exp of the logits that are kept, 0 for the others."""
    score, edge = tl.div_rn(x, t), tl.div_rn(cut, t)
    weight = tl.exp((x - best) * inverse)
    return tl.where(((score > edge) | ((score == edge) & (at >= first))) & (weight >= min_p), weight, 0.0)


@triton.jit
def _list_groups(
    logits, listed, maxima, seen, penalty, vocabulary, best, inverse, total, top_k, top_p, min_p, groups,
    GROUPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Lists the groups, of `groups`, that hold a row's kept tokens, in the order of the vocabulary. Returns how many,
    the level that their maxima have at least, of the tokens at or above it the number and the sum of exp, and a logit
    that top-p's cutoff does not exceed."""
    index = tl.arange(0, GROUPS)
    wanted = tl.where(top_k > 0, top_k, _FIRST)
    count, lowest, highest, tokens, mass = 0, _LOWEST, best, 0, 0.0
    while wanted > 0:
        # Read anew for each list, which spares the registers meanwhile.
        keys = _key(tl.load(maxima + index, mask=index < groups, other=float("-inf")))
        finite = tl.sum((keys >= _LOWEST_KEY).to(tl.int32), 0)
        level = _LOWEST_KEY
        if wanted < finite:
            level = _nth_largest(keys, wanted)
        lowest = _float(level)
        chosen = (keys >= level).to(tl.int32)
        count = tl.sum(chosen, 0)
        tl.debug_barrier()
        tl.store(listed + tl.cumsum(chosen, 0) - 1, index, mask=chosen > 0)
        tl.debug_barrier()
        tokens, mass = _at_least(logits, listed, count, seen, penalty, vocabulary, best, inverse, lowest, TILE)
        enough = (top_k > 0) | (wanted >= finite)
        enough = enough | ((top_p < 1.0) & (mass >= top_p * total))
        enough = enough | ((min_p > 0.0) & (tl.exp((lowest - best) * inverse) < min_p))
        highest = tl.where(enough, highest, lowest)
        wanted = tl.where(enough, 0, wanted * _LONGER)
    return count, lowest, highest, tokens, mass


@triton.jit
def _truncate(
    logits, listed, maxima, seen, penalty, vocabulary, best, inverse, t, total, top_k, top_p, min_p, groups,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Lists the groups that hold a row's kept tokens, and finds what is kept by top-k and top-p: logits above a cutoff,
    and those at it from a first token on. `total` is the sum of exp of all logits.

    Returns how many groups are listed, the cutoff, the first token, and the sum of exp of what min-p leaves too.
    """
    count, lowest, highest, tokens, mass = _list_groups(
        logits, listed, maxima, seen, penalty, vocabulary, best, inverse, total, top_k, top_p, min_p, groups,
        GROUPS, TILE,
    )  # fmt: skip
    cut = float("-inf")
    first = 0
    kept = total
    if (top_k > 0) & (tokens >= top_k):  # else fewer than k have a probability
        cut = _cutoff(
            logits, listed, count, seen, penalty, vocabulary, best, inverse, lowest, best, top_k.to(tl.float32),
            SHIFT, False, TILE,
        )  # fmt: skip
        lowest = cut
        tokens, mass = _at_least(logits, listed, count, seen, penalty, vocabulary, best, inverse, cut, TILE)
        total = mass
        kept = mass
    target = top_p * total
    if (top_p < 1.0) & (mass >= target):  # else min-p alone decides
        if (top_k == 0) & (top_p < 0.9999):
            # All tokens below this have together less than half of what top-p drops.
            lowest = tl.maximum(lowest, best + t * tl.log(0.5 * (1.0 - top_p) * total / vocabulary))
        cut = _cutoff(
            logits, listed, count, seen, penalty, vocabulary, best, inverse, lowest, highest, target,
            SHIFT, True, TILE,
        )  # fmt: skip
        first, kept = _first_kept(
            logits, listed, count, seen, penalty, vocabulary, best, inverse, t, cut, target, TILE
        )  # fmt: skip
    if min_p > 0.0:
        weights = tl.zeros((TILE, GROUP), tl.float32)
        for start in range(0, count, TILE):
            x, at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
            weights += _kept(x, at, best, inverse, t, cut, first, min_p)
        kept = tl.sum(weights)
    return count, cut, first, kept


@triton.jit
def _draw_listed(
    logits, listed, count, seen, penalty, vocabulary, best, inverse, t, cut, first, min_p, target, TILE: tl.constexpr
):  # fmt: skip
    """The token at which the running sum of what is kept of the listed groups passes the target."""
    token = -1
    last = 0  # that is kept: rounding may carry the target past it
    start = 0
    while (token < 0) & (start < count):
        x, at = _listed(logits, listed, start, count, seen, penalty, vocabulary, TILE)
        kept = tl.reshape(_kept(x, at, best, inverse, t, cut, first, min_p), (TILE * GROUP,))
        ids = tl.reshape(at, (TILE * GROUP,))
        here = tl.sum(kept, 0)
        if here > target:
            place = _passed(kept, target, TILE * GROUP)
            token = tl.sum(tl.where(tl.arange(0, TILE * GROUP) == place, ids, 0), 0)
        last = tl.maximum(last, tl.max(tl.where(kept > 0, ids, 0), 0))
        target -= here
        start += TILE
    return tl.where(token < 0, last, token)


@triton.jit
def _list_chunk(listed, mass, target, CHUNK_GROUPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Lists the groups of the chunk in which the running sum of mass [CHUNKS] passes the target; returns what is left
    of the target there."""
    chunk = _passed(mass, target, CHUNKS)
    index = tl.arange(0, CHUNK_GROUPS)
    tl.store(listed + index, chunk * CHUNK_GROUPS + index)
    tl.debug_barrier()
    return target - tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, mass, 0.0), 0)


@triton.jit
def choose_kernel(
    logits, partials, maxima, listed, rows, temperature, uniform, processing, seen, words, last_tokens, out,
    chunks, vocabulary, row_stride,
    SHIFT: tl.constexpr, CHUNK_GROUPS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The token of a row that asks for processing, as `draw_kernel` gives those of the others.

    Args:
        partials, maxima: of `maxima_kernel`.
        listed: int32 [rows, chunks * 64], room for the list of groups.
        seen: int32 [any, words], by rows[row]: a bit for each token of prompt and completion. The token is added where
            there is a penalty.
        SHIFT: low bits in which the keys of all logits are equal, before a penalty.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    top_k, top_p, min_p, penalty, truncates = _wishes(processing, row, vocabulary)
    if truncates | (penalty != 1.0):
        slot = tl.load(rows + row)
        t = tl.load(temperature + row)
        inverse = _inverse(t)
        logits += row.to(tl.int64) * row_stride
        seen += slot.to(tl.int64) * words
        groups = chunks * CHUNK_GROUPS
        listed += row * groups
        part = partials + row * 2 * chunks * 4
        raw_best, raw_finite, token, raw_total, mass = _combine(part, chunks, inverse, CHUNKS)
        best, finite = raw_best, raw_finite
        if penalty != 1.0:
            best, finite, token, _raw, mass = _combine(part + chunks * 4, chunks, inverse, CHUNKS)
            finite = finite & raw_finite
        total = tl.sum(mass, 0)
        if (t > 0) & finite:
            target = tl.load(uniform + row)
            count, cut, first = CHUNK_GROUPS, float("-inf"), 0
            if truncates:
                count, cut, first, total = _truncate(
                    logits, listed, maxima + row * groups, seen, penalty, vocabulary, best, inverse, t, total,
                    top_k, top_p, min_p, groups, SHIFT, GROUPS, TILE,
                )  # fmt: skip
                target *= total
            else:  # all is kept: as in draw_kernel, only that chunk is looked at in which the token lies
                target = _list_chunk(listed, mass, target * total, CHUNK_GROUPS, CHUNKS)
            token = _draw_listed(
                logits, listed, count, seen, penalty, vocabulary, best, inverse, t, cut, first, min_p, target, TILE
            )  # fmt: skip
        token = tl.where(finite, token, 0)
        x = tl.load(logits + token).to(tl.float32)
        tl.store(out + row * 4, token)
        tl.store(out + row * 4 + 1, finite.to(tl.int32))
        tl.store(out + row * 4 + 3, (x - raw_best - tl.log(raw_total)).to(tl.int32, bitcast=True))
        tl.store(last_tokens + slot, token.to(tl.int64))
        if penalty != 1.0:
            word = tl.load(seen + token // GROUP)
            bit = 1 << (token % GROUP)
            if word & bit != 0:
                x = tl.where(x < 0, x * penalty, tl.div_rn(x, penalty))
            tl.store(seen + token // GROUP, word | bit)
        tl.store(out + row * 4 + 2, ((x - best) * inverse - tl.log(total)).to(tl.int32, bitcast=True))
