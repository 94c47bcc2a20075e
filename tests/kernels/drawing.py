"""Steps for the sampling kernels, and what Transformers' processors say of them. Used on the CPU and on CUDA."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flatbed.request import SamplingParams
from flatbed.sampling.device import Redraw, draw
from flatbed.sampling.sampler import Sampled, Sampler
from flatbed.scheduling.plan import PromptGroup, Sequence


def sequence(prompt: list[int], row: int, output: list[int] | None = None) -> Sequence:
    made = Sequence(str(row), 0, prompt, 100, frozenset(), PromptGroup(tuple(prompt)))
    made.row = row
    made.output = [] if output is None else output
    return made


@dataclass
class Rows:
    """Rows of one step: row i of `logits` [n, vocabulary] belongs to the sequence with row number `numbers[i]`."""

    logits: torch.Tensor
    params: list[SamplingParams]
    prompts: list[list[int]]
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.numbers or list(range(len(self.params)))
        self.sampler = Sampler(max(self.numbers) + 1, self.logits.device)
        self.sampled = [sequence(p, number) for p, number in zip(self.prompts, self.numbers, strict=True)]
        for i, (one, params) in enumerate(zip(self.sampled, self.params, strict=True)):
            self.sampler.set_row(one, params, i if params.seed is None else params.seed)
        self.last_tokens = torch.zeros(max(self.numbers) + 2, dtype=torch.int64, device=self.logits.device)

    def sampled_rows(self) -> tuple[np.ndarray, np.ndarray]:
        known = [len(one.prompt) + len(one.output) - 1 for one in self.sampled]
        return np.array(self.numbers, np.int32), np.array(known, np.int32)

    def uniform(self) -> np.ndarray:
        return self.sampler.device_parameters(*self.sampled_rows()).uniform

    def on_device(self, uniform: np.ndarray | None = None) -> torch.Tensor:
        """int32 [n, 4] as the kernels draw them, by these random numbers instead of the rows' own if given."""
        rows, positions = self.sampled_rows()
        parameters = self.sampler.device_parameters(rows, positions)
        device = self.logits.device

        def sent(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        u = sent(parameters.uniform if uniform is None else uniform.astype(np.float32))
        inputs = (self.logits, sent(parameters.temperature), u, sent(rows), self.last_tokens)
        seen = None
        at = parameters.penalised
        if len(at):
            seen = self.sampler.seen.hold(rows[at], [self.sampled[i] for i in at], self.logits.shape[1])
        out = draw(*inputs)
        if parameters.processing is not None:
            Redraw(*inputs, sent(parameters.processing), seen)(out)
        return out

    def by_torch(self) -> Sampled:
        return self.sampler.sample(self, self.logits.float())


class TopPOfEqualTheLast(TopPLogitsWarper):
    """Transformers' top-p, which leaves it to its sort which of the tokens of equal scores at the cutoff stay (on the
    CPU it depends on the processor); here as many as it keeps, those with the largest ids."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        count = int((TopPLogitsWarper.__call__(self, input_ids, scores.double()) > -torch.inf).sum())
        stay = scores.sort(dim=-1, stable=True).indices[:, -count:]
        return torch.full_like(scores, -torch.inf).scatter(-1, stay, scores.gather(-1, stay))


def transformers_processors(params: SamplingParams) -> LogitsProcessorList:
    """Transformers' own, in the order of `generate`."""
    chosen = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        chosen.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chosen.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chosen.append(TopPOfEqualTheLast(params.top_p))
        if params.min_p:
            chosen.append(MinPLogitsWarper(params.min_p))
    return chosen


def processed(rows: Rows, i: int) -> torch.Tensor:
    """float64 [vocabulary] on the CPU: log-probabilities of row i's next token, by Transformers' processors."""
    one = rows.sampled[i]
    ids = [t for t in one.prompt + one.output if t < rows.logits.shape[1]] or [0]
    history = torch.tensor([ids])
    scores = rows.logits[i : i + 1].float().cpu()
    return transformers_processors(rows.params[i])(history, scores)[0].double().log_softmax(-1)


def check(rows: Rows, out: torch.Tensor, uniform: np.ndarray, tolerance: float = 2e-5) -> None:
    """Each row of `out` is what the processed distribution gives at its random number. A kept token has its
    log-probability over all that are kept, so one token too many or too few would show."""
    table = out.cpu()
    floats = table[:, 2:].contiguous().view(torch.float32)
    for i, params in enumerate(rows.params):
        wanted = processed(rows, i)
        token, about = int(table[i, 0]), (i, params, rows.logits.shape)
        assert int(table[i, 1]) == 1, about
        assert int(rows.last_tokens[rows.numbers[i]]) == token, about
        assert wanted[token] > -torch.inf, f"{about}: drew a token that is not among those kept"
        if params.temperature == 0:
            assert token == int(wanted.argmax()), about
        else:
            end = float(wanted.exp().cumsum(-1)[token])
            assert end - float(wanted[token].exp()) - tolerance <= float(uniform[i]) <= end + tolerance, about
        slack = tolerance * max(1.0, 1 / params.temperature if params.temperature else 1.0)
        assert abs(float(floats[i, 0]) - float(wanted[token])) < slack, about
        raw = rows.logits[i].double().cpu().log_softmax(-1)
        assert abs(float(floats[i, 1]) - float(raw[token])) < tolerance, about


def random_params(draw: random.Random, vocabulary: int) -> SamplingParams:
    """Any mixture of what can be asked for."""

    def maybe(chance: float, value: Any, off: Any) -> Any:
        return value if draw.random() < chance else off

    return SamplingParams(
        temperature=draw.choice([0.0, 0.3, 0.8, 1.0, 1.0, 2.5]),
        top_k=maybe(0.5, draw.choice([1, 2, 5, 20, max(1, vocabulary - 1), vocabulary, 10 * vocabulary]), 0),
        top_p=maybe(0.5, draw.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0),
        min_p=maybe(0.3, draw.choice([0.001, 0.05, 0.4, 1.0]), 0.0),
        repetition_penalty=maybe(0.4, draw.choice([0.5, 0.9, 1.1, 1.5, 3.0]), 1.0),
        seed=draw.randrange(1 << 40),
    )


def random_rows(
    count: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Rows:
    """Rows of random parameters over logits of several shapes: peaked, flat, with tokens that are ruled out."""
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=made)
    for i in range(count):
        logits[i] *= draw.choice([0.05, 1.0, 3.0, 8.0])
        logits[i] += draw.choice([0.0, -20.0, 15.0])
        if draw.random() < 0.2 and vocabulary > 1:
            out = torch.rand(vocabulary, generator=made) < draw.choice([0.2, 0.9])
            out[draw.randrange(vocabulary)] = False
            logits[i, out] = -torch.inf
    params = [random_params(draw, vocabulary) for _ in range(count)]
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    return Rows(logits.to(dtype).to(device), params, prompts)
