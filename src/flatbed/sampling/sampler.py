"""The sampler: logits of a step → a token per row.

Each running sequence has a row of parameters, set when it is admitted. The order is Transformers' own::

      logits ─▶ repetition penalty ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ softmax ─▶ token
             (greedy rows: argmax after the penalty)                           inverse of the cumulative
             (rows with Transformers' processors: those instead)               distribution at u

with u = uniform(seed, sample, token number) of the row, so that a token depends on the row's own logits and seed alone.
Steps that no row needs are left out, and a row takes part only in the steps it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatbed.request import SamplingParams
from flatbed.sampling.random import uniform
from flatbed.scheduling.plan import BatchPlan, Sequence

# Top-p looks at this many most probable tokens first, and sorts the whole vocabulary only where they do not suffice.
_TOP_P_FIRST = 1024
# Temperatures beyond these would overflow float32; at the first the most probable token is already certain, at the
# other all are alike.
_TEMPERATURES = (1e-20, 1e20)
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


@dataclass
class DeviceParameters:
    """Parameters of a step's rows for sampling on the device.

    Attributes:
        temperature, uniform: float32 [n].
        simple: bool [n], the rows that sampling/device.py can do.
        needs_history: a row's next token depends on the values of its earlier ones beyond the model's own context.
        wanted: a row asks for log-probabilities.
    """

    temperature: np.ndarray
    uniform: np.ndarray
    simple: np.ndarray
    needs_history: bool
    wanted: bool


class Sampler:
    """Holds the parameters of up to `rows` running sequences and draws their tokens."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._penalty = np.ones(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._sample = np.zeros(rows, np.int64)
        self._prompt = np.zeros(rows, np.int64)
        self._logprobs = np.zeros(rows, bool)
        self._special = np.zeros(rows, bool)  # rows with Transformers' own processors
        self._processors: dict[int, Any] = {}
        self._seen: dict[int, torch.Tensor] = {}

    def set_row(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        """Takes over the parameters of a sequence that was just admitted."""
        row = sequence.row
        self._temperature[row] = np.clip(params.temperature, *_TEMPERATURES) if params.temperature > 0 else 0
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._penalty[row] = params.repetition_penalty
        self._seed[row] = seed
        self._sample[row] = sequence.sample
        self._prompt[row] = len(sequence.prompt)
        self._logprobs[row] = params.logprobs
        self._special[row] = params.processors is not None
        self._processors.pop(row, None)
        self._seen.pop(row, None)
        if params.processors is not None:
            self._processors[row] = params.processors(len(sequence.prompt))

    def sample(self, plan: BatchPlan, logits: torch.Tensor) -> Sampled:
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
        return result

    def _uniform(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The random number of the token sampled at each row's position, float64 [n]."""
        numbers = positions + 1 - self._prompt[rows]
        return uniform(self._seed[rows], self._sample[rows], numbers)

    def device_parameters(self, rows: np.ndarray, positions: np.ndarray) -> DeviceParameters:
        """What sampling on the device needs for these rows, and whether it can do them."""
        temperature = self._temperature[rows]
        draws = temperature > 0
        history = (self._penalty[rows] != 1) | self._special[rows]
        truncated = draws & ((self._top_k[rows] > 0) | (self._top_p[rows] < 1) | (self._min_p[rows] > 0))
        u = np.zeros(len(rows), np.float32)
        if draws.any():
            u = np.where(draws, self._uniform(rows, positions), 0).astype(np.float32)
        return DeviceParameters(
            temperature=temperature,
            uniform=u,
            simple=~(history | truncated),
            needs_history=bool(history.any()),
            wanted=bool(self._logprobs[rows].any()),
        )

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self._device)

    def _penalise(self, scores: torch.Tensor, plan: BatchPlan, rows: np.ndarray) -> None:
        at = np.flatnonzero((self._penalty[rows] != 1) & ~self._special[rows])
        if not len(at):
            return
        sequences = plan.sampled
        vocabulary = scores.shape[-1]
        seen = torch.stack([self._seen_tokens(int(rows[i]), sequences[i], vocabulary) for i in at])
        penalty = torch.from_numpy(self._penalty[rows[at]]).to(self._device)[:, None]
        index = self._index(at)
        part = scores[index]
        scores[index] = torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)

    def _seen_tokens(self, row: int, sequence: Sequence, vocabulary: int) -> torch.Tensor:
        """bool [vocabulary]: the tokens of prompt and output so far. Kept per row, one token added a step."""
        seen = self._seen.get(row)
        if seen is None:
            seen = torch.zeros(vocabulary + 1, dtype=torch.bool, device=self._device)
            ids = torch.tensor(sequence.prompt + sequence.output, device=self._device)
            seen[ids.clamp(max=vocabulary)] = True
            self._seen[row] = seen
        else:
            seen[min(sequence.output[-1], vocabulary)] = True
        return seen[:vocabulary]

    def _process(self, scores: torch.Tensor, plan: BatchPlan, rows: np.ndarray) -> None:
        """Transformers' own processors, a row at a time, with the row's whole history as they expect it."""
        for i in np.flatnonzero(self._special[rows]):
            sequence = plan.sampled[i]
            history = torch.tensor([sequence.prompt + sequence.output], device=self._device)
            scores[i] = self._processors[int(rows[i])](history, scores[i : i + 1].clone())[0]

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


def _beyond_top_k(scores: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """True below each row's k-th largest score (ties with it stay)."""
    best = scores.topk(int(top_k.max()), -1).values
    threshold = best.gather(-1, torch.from_numpy(top_k - 1).to(scores.device)[:, None])
    return scores < threshold


def _beyond_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """True for tokens outside the smallest set of most probable ones that reaches top_p [n]. The first always stays.

    A token stays when what is more probable than it sums to less than top_p.
    """
    probabilities = scores.softmax(-1)
    count = min(_TOP_P_FIRST, scores.shape[-1])
    best, index = probabilities.topk(count, -1)
    if bool((best.double().sum(-1) < top_p).any()) and count < scores.shape[-1]:
        best, index = probabilities.sort(-1, descending=True)
    before = best.double().cumsum(-1) - best.double()
    keep = before < top_p[:, None].double()
    keep[:, 0] = True
    drop = torch.ones_like(scores, dtype=torch.bool)
    return drop.scatter(-1, index, ~keep)


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
