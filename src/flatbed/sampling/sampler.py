"""The sampler: logits of a step → a token per row.

Each running sequence has a row of parameters, set when it is admitted. The order is Transformers' own::

      logits ─▶ repetition penalty ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ softmax ─▶ token
             (greedy rows: argmax after the penalty)                           inverse of the cumulative
             (rows with Transformers' processors: those instead)               distribution at u

with u = uniform(seed, sample, token number) of the row, so that a token depends on the row's own logits and seed alone.
Steps that no row needs are left out, and a row takes part only in the steps it asks for.

Tokens of equal scores at the cutoff: top-k and min-p keep all of them, top-p as many as it needs, those with the
largest ids (Transformers leaves to an unstable sort which these are).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.request import SamplingParams
from flatbed.sampling.random import uniform
from flatbed.sampling.seen import SeenTokens
from flatbed.scheduling.plan import Ints, Sequence

# Top-p looks at this many most probable tokens first, and sorts the whole vocabulary only where they do not suffice.
_TOP_P_FIRST = 1024
# Temperatures beyond these would overflow float32; at the first the most probable token is already certain, at the
# other all are alike.
_TEMPERATURES = (1e-20, 1e20)
# Random numbers are made for so many tokens of a row at a time: for one at a time, numpy's calls are most of the cost.
_AHEAD = 64
# The inverse of the cumulative distribution is found in two levels of this many tokens.
_CDF_BLOCK = 256


@dataclass
class Sampled:
    """The sampler's result for a step, in the order of its logits.

    Attributes:
        tokens: int64 [samples].
        finite: bool [samples]; False where the logits are NaN, +infinite, or all -infinite, or where processing made
            them so.
        logprobs, raw_logprobs: float32 [samples] of the sampled tokens (see `Completion`), or None when no row asks.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


class Drawn(Protocol):
    """What the sampler needs to know of a step: a `BatchPlan`, or a part of one."""

    @property
    def sampled(self) -> list[Sequence]: ...

    def sampled_rows(self) -> tuple[Ints, Ints]: ...


@dataclass
class Part:
    """Some of a plan's sampled sequences, as the sampler sees a plan."""

    plan: Drawn
    indices: NDArray[np.int64]

    @property
    def sampled(self) -> list[Sequence]:
        sequences = self.plan.sampled
        return [sequences[i] for i in self.indices]

    def sampled_rows(self) -> tuple[Ints, Ints]:
        rows, positions = self.plan.sampled_rows()
        return rows[self.indices], positions[self.indices]


# What a row of `DeviceParameters.processing` holds that asks for nothing: top-k, and the bits of top-p, min-p, penalty.
UNPROCESSED = np.array([0, *np.array([1, 0, 1], np.float32).view(np.int32)], np.int32)


@dataclass
class DeviceParameters:
    """Parameters of a step's rows for sampling on the device.

    Attributes:
        temperature, uniform: float32 [n].
        processing: int32 [n, 4], what rows ask for beyond the temperature (see `device.Redraw`), or None when
            none does.
        penalised: int64 [any], which of the rows have a penalty.
        special: int64 [any], which of the rows have Transformers' own processors: sampling/device.py cannot do them.
        wanted: a row asks for log-probabilities.
    """

    temperature: NDArray[np.float32]
    uniform: NDArray[np.float32]
    processing: NDArray[np.int32] | None
    penalised: NDArray[np.int64]
    special: NDArray[np.int64]
    wanted: bool

    def by_the_torch_sampler(self) -> DeviceParameters:
        """The same, with every row that asks for more than a temperature left to the torch sampler."""
        if self.processing is None:
            return self
        asking = np.flatnonzero((self.processing != UNPROCESSED).any(1))
        special = np.union1d(self.special, asking)
        return replace(self, processing=None, penalised=self.penalised[:0], special=special)


class Sampler:
    """Holds the parameters of up to `rows` running sequences and draws their tokens.

    Attributes:
        seen: the tokens of rows with a penalty.
        failures: what the processors of a row raised, by request and sample; its tokens are not finite then.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.seen = SeenTokens(device)
        self._device = device
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._penalty = np.ones(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._sample = np.zeros(rows, np.int64)
        self._prompt = np.zeros(rows, np.int64)
        self._uniforms = np.zeros((rows, _AHEAD))  # of the tokens of a stretch
        self._stretch = np.full(rows, -1, np.int64)  # which one that is: tokens stretch * _AHEAD and on
        self._logprobs = np.zeros(rows, bool)
        self._special = np.zeros(rows, bool)  # rows with Transformers' own processors
        self._processing = np.tile(UNPROCESSED, (rows, 1))  # as in DeviceParameters
        self._processed = np.zeros(rows, bool)  # rows that ask for something there
        self._processors: dict[int, Any] = {}
        self.failures: dict[tuple[str, int], Exception] = {}

    def set_row(self, sequence: Sequence, params: SamplingParams, seed: int, processors: Any = None) -> None:
        """Takes over the parameters of a sequence that was just admitted; `processors` are made by `params.processors`
        for it."""
        row = sequence.row
        self._temperature[row] = np.clip(params.temperature, *_TEMPERATURES) if params.temperature > 0 else 0
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._penalty[row] = params.repetition_penalty
        self._seed[row] = seed
        self._sample[row] = sequence.sample
        self._prompt[row] = len(sequence.prompt)
        self._stretch[row] = -1
        self._logprobs[row] = params.logprobs
        self._special[row] = processors is not None
        self._processing[row] = _wishes(params)
        self._processed[row] = (self._processing[row] != UNPROCESSED).any()
        self._processors.pop(row, None)
        self.seen.forget(row)
        if processors is not None:
            self._processors[row] = processors

    def sample(self, plan: Drawn, logits: torch.Tensor) -> Sampled:
        """float32 logits [samples, vocabulary] of the plan's sampled sequences → tokens."""
        rows, positions = plan.sampled_rows()
        if not len(rows):
            empty = torch.empty(0, dtype=torch.int64, device=logits.device)
            return Sampled(empty, empty.bool())
        best, greedy = logits.max(-1)
        finite = torch.isfinite(best)
        sampling = self._temperature[rows] > 0
        changed = (self._penalty[rows] != 1) | self._special[rows]
        wanted = self._logprobs[rows].any()
        if not (sampling.any() or changed.any() or wanted):
            return Sampled(greedy, finite)
        # A row that is not finite ends with an error; what is drawn for it must only not disturb the others.
        raw = torch.where(finite[:, None], logits, 0.0)
        scores = raw.clone()
        self._penalise(scores, plan, rows)
        self._process(scores, plan, rows)
        processed = torch.isfinite(scores.amax(-1))  # all suppressed, say
        finite = finite & processed
        scores = torch.where(processed[:, None], scores, 0.0)
        tokens = scores.argmax(-1)
        drawn = np.flatnonzero(sampling)
        if len(drawn):
            at = self._index(drawn)
            kept = self._truncate(scores[at], rows[drawn])
            scores[at] = kept
            u = self._uniform(rows[drawn], positions[drawn])
            tokens[at] = _draw(kept.softmax(-1), torch.from_numpy(u).to(logits.device))
        result = Sampled(tokens, finite)
        if wanted:
            result.logprobs = _logprob(scores, tokens)
            result.raw_logprobs = _logprob(raw, tokens)
        penalised = self._penalised(rows)
        if len(penalised):  # at last: what failed before for lack of memory can be done again
            self.seen.add(self._index(rows[penalised]), tokens[self._index(penalised)])
        return result

    def _uniform(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The random number of the token sampled at each row's position, float64 [n]."""
        numbers = positions + 1 - self._prompt[rows]
        stretch, place = np.divmod(numbers, _AHEAD)
        new = self._stretch[rows] != stretch
        if new.any():
            at, first = rows[new], stretch[new, None] * _AHEAD
            seed, sample = (np.repeat(values[at], _AHEAD) for values in (self._seed, self._sample))
            drawn = uniform(seed, sample, (first + np.arange(_AHEAD)).reshape(-1))
            self._uniforms[at], self._stretch[at] = drawn.reshape(-1, _AHEAD), stretch[new]
        return self._uniforms[rows, place]

    def device_parameters(self, rows: Ints, positions: Ints) -> DeviceParameters:
        """What sampling on the device needs for these rows."""
        temperature = self._temperature[rows]
        draws = temperature > 0
        u = np.zeros(len(rows), np.float32)
        if draws.any():
            u = np.where(draws, self._uniform(rows, positions), 0).astype(np.float32)
        return DeviceParameters(
            temperature=temperature,
            uniform=u,
            processing=self._processing[rows] if self._processed[rows].any() else None,
            penalised=self._penalised(rows),
            special=np.flatnonzero(self._special[rows]),
            wanted=bool(self._logprobs[rows].any()),
        )

    def _penalised(self, rows: Ints) -> NDArray[np.int64]:
        """Which of the rows have a repetition penalty."""
        return np.flatnonzero((self._penalty[rows] != 1) & ~self._special[rows])

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self._device)

    def _penalise(self, scores: torch.Tensor, plan: Drawn, rows: Ints) -> None:
        at = self._penalised(rows)
        if not len(at):
            return
        sequences = plan.sampled
        vocabulary = scores.shape[-1]
        self.seen.hold(rows[at], [sequences[i] for i in at], vocabulary)
        seen = self.seen.of(self._index(rows[at]), vocabulary)
        penalty = torch.from_numpy(self._penalty[rows[at]]).to(self._device)[:, None]
        index = self._index(at)
        part = scores[index]
        scores[index] = torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)

    def _process(self, scores: torch.Tensor, plan: Drawn, rows: Ints) -> None:
        """Transformers' own processors, a row at a time, with the row's whole history as they expect it."""
        for i in np.flatnonzero(self._special[rows]):
            sequence = plan.sampled[i]
            history = torch.tensor([sequence.prompt + sequence.output], device=self._device)
            try:
                scores[i] = self._processors[int(rows[i])](history, scores[i : i + 1].clone())[0]
            except torch.OutOfMemoryError:  # which no request is to blame for
                raise
            except Exception as error:  # they are programs of their own: this row fails, and no other
                self.failures[sequence.request_id, sequence.sample] = error
                scores[i] = torch.nan

    def _truncate(self, scores: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Temperature, top-k, top-p and min-p of scores [n, vocabulary], each where the row asks for it."""
        plain = ~self._special[rows]
        temperature = np.where(plain, self._temperature[rows], np.float32(1))
        scores = scores / torch.from_numpy(temperature).to(self._device)[:, None]
        vocabulary = scores.shape[-1]
        for name, wants in (
            ("top_k", (self._top_k[rows] > 0) & (self._top_k[rows] < vocabulary)),
            ("top_p", self._top_p[rows] < 1),
            ("min_p", self._min_p[rows] > 0),
        ):
            at = np.flatnonzero(wants & plain)
            if not len(at):
                continue
            index = self._index(at)
            part = scores[index]
            if name == "top_k":
                drop = _beyond_top_k(part, self._top_k[rows[at]])
            elif name == "top_p":
                drop = _beyond_top_p(part, torch.from_numpy(self._top_p[rows[at]]).to(self._device))
            else:
                floor = torch.from_numpy(self._min_p[rows[at]]).to(self._device)[:, None]
                probabilities = part.softmax(-1)
                drop = probabilities < floor * probabilities.amax(-1, keepdim=True)
            scores[index] = part.masked_fill(drop, -torch.inf)
        return scores


def _wishes(params: SamplingParams) -> NDArray[np.int32]:
    """A row of `DeviceParameters.processing`."""
    if params.processors is not None:
        return UNPROCESSED
    greedy = params.temperature == 0
    floats = (1, 0) if greedy else (params.top_p, params.min_p)
    bits = np.array([*floats, params.repetition_penalty], np.float32).view(np.int32)
    return np.array([0 if greedy else params.top_k, *bits], np.int32)


def _beyond_top_k(scores: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """True below each row's k-th largest score (ties with it stay)."""
    best = scores.topk(int(top_k.max()), -1).values
    threshold = best.gather(-1, torch.from_numpy(top_k - 1).to(scores.device)[:, None])
    return scores < threshold


def _beyond_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """True for tokens outside the smallest set of most probable ones that reaches top_p [n]. The first always stays.

    A token stays when what is more probable than it, and what is as probable and later in the vocabulary, sums to less
    than top_p.
    """
    count = min(_TOP_P_FIRST, scores.shape[-1])
    best = scores.topk(count, -1).values
    target = top_p.double() * (scores - best[:, :1]).exp().sum(-1, dtype=torch.float64)
    ends = (best - best[:, :1]).exp().cumsum(-1, dtype=torch.float64)
    if bool((ends[:, -1] < target).any()) and count < scores.shape[-1]:
        best = scores.sort(-1, descending=True).values
        ends = (best - best[:, :1]).exp().cumsum(-1, dtype=torch.float64)
    kept = 1 + (ends[:, :-1] < target[:, None]).sum(-1, keepdim=True)
    edge = best.gather(-1, kept - 1)
    drop = scores < edge
    ties = scores == edge
    spare = kept - (best > edge).sum(-1, keepdim=True)
    if bool((ties.sum(-1, keepdim=True) > spare).any()):
        drop |= ties & (ties.flip(-1).cumsum(-1).flip(-1) > spare)
    return drop


def _draw(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution, in vocabulary order, passes u.

    float32 [n, vocabulary] and float64 [n] → int64 [n].

    In two levels, so that only sums of blocks and one block per row are accumulated in float64.
    """
    n, vocabulary = probabilities.shape
    blocks = torch.nn.functional.pad(probabilities, (0, -vocabulary % _CDF_BLOCK)).view(n, -1, _CDF_BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = u[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=blocks.shape[1] - 1)
    inside = blocks[torch.arange(n, device=u.device), block[:, 0]].double().cumsum(-1)
    rest = target - (ends - sums).gather(-1, block)
    # Rounding may put the rest a hair outside of the block; inside of it, it always meets a token with a probability.
    rest = torch.minimum(rest.clamp(min=0), inside[:, -1:] * (1 - 1e-12))
    at = torch.searchsorted(inside, rest, right=True)
    return (block * _CDF_BLOCK + at)[:, 0]


def _logprob(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log softmax of scores [n, V] at tokens [n]."""
    return scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
