"""What goes in and what comes out: `SamplingParams`, `Output`, `Completion`, `Timings`, `StreamEvent`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flatbed.errors import ConfigError, RequestError

FinishReason = Literal["eos", "length", "stop", "cancelled", "error"]

DEFAULT_MAX_NEW_TOKENS = 128

_SEED_LIMIT = 1 << 64
_INT32_LIMIT = 1 << 31
# Samples of one request: a typing error must not fill the memory with them.
_MOST_SAMPLES = 1 << 20


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. `SamplingParams()` is greedy.

    The distribution is that of Transformers' logits processors in Transformers' order: repetition penalty,
    temperature, top-k, top-p, min-p. Values are checked when a request is made of them, so that a bad value refuses
    that request alone.

    Attributes:
        max_new_tokens: the most tokens to generate, at least 1.
        temperature: 0 is greedy; above 0 the logits are divided by it and a token is sampled.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one; in [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and completion less likely; 1 is off. Applies to greedy too.
        n: samples per prompt. The prompt is prefilled once.
        eos_token_ids: tokens that end a completion; None takes those of the model's generation config.
        ignore_eos: generate exactly max_new_tokens.
        stop: strings that end a completion. `token_ids` include the tokens of the stop string, `text` ends before it.
            Needs a tokenizer.
        seed: makes the samples of this request a function of the seed and of its own tokens only. None takes one
            from the engine's seed and the request's number.
        logprobs: return log-probabilities of the sampled tokens.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    # For a GenerationConfig that asks for more than the fields above: builds Transformers' own processors for one
    # prompt of the given length. They then replace the fields above (see sampling/processors.py).
    processors: Callable[[int], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "n", "seed"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        eos: Any = _plain(self.eos_token_ids)
        if _is_int(eos):
            object.__setattr__(self, "eos_token_ids", (eos,))
        elif isinstance(eos, (list, tuple)):
            object.__setattr__(self, "eos_token_ids", tuple(map(_plain, eos)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields a user may set, in order."""
        return tuple(f.name for f in fields(cls) if f.name != "processors")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """`base` with some fields replaced. Raises ConfigError for a name that is not a field."""
        for name in values:
            if name not in cls.names():
                raise ConfigError.unknown("sampling field", name, cls.names())
        merged = {f.name: getattr(base, f.name) for f in fields(cls)} if base is not None else {}
        return cls(**{**merged, **values})

    def problem(self) -> tuple[str, str] | None:
        """The first field that is out of range and why, or None when all are fine."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_new_tokens", _is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "a whole number, at least 1"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "a finite number, at least 0"),
            (
                "top_k",
                _is_int(self.top_k) and 0 <= self.top_k < _INT32_LIMIT,
                "a whole number, at least 0 (0 keeps all) and below 2**31",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0 (1 is off)",
            ),
            ("n", _is_int(self.n) and 1 <= self.n <= _MOST_SAMPLES, f"a whole number from 1 to {_MOST_SAMPLES}"),
            (
                "eos_token_ids",
                _all_of(self.eos_token_ids, lambda t: _is_int(t) and 0 <= t < _INT32_LIMIT),
                "whole numbers, at least 0 and below 2**31",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("stop", _all_of(self.stop, lambda s: isinstance(s, str) and s != ""), "strings that are not empty"),
            (
                "seed",
                self.seed is None or (_is_int(self.seed) and 0 <= self.seed < _SEED_LIMIT),
                "a whole number from 0 to 2**64 - 1",
            ),
            ("logprobs", isinstance(self.logprobs, bool), "True or False"),
        )
        for name, fine, wanted in checks:
            if not fine:
                return name, f"must be {wanted}, got {getattr(self, name)!r}"
        return None


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's; anything else as it is."""
    if type(value) in (int, float, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _all_of(values: object, test: Callable[[Any], bool]) -> bool:
    return values is None or (isinstance(values, (tuple, frozenset, set)) and all(test(v) for v in values))


@dataclass(slots=True)
class Timings:
    """Moments of one request, in seconds of `time.perf_counter()`; None where it never got there."""

    submitted: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queued_s(self) -> float | None:
        """Seconds between submission and the first forward pass."""
        return None if self.started is None else self.started - self.submitted

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds between submission and the first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def total_s(self) -> float | None:
        """Seconds between submission and the end."""
        return None if self.finished is None else self.finished - self.submitted


@dataclass(slots=True)
class Completion:
    """One sample of one prompt.

    Attributes:
        index: which sample of its prompt, from 0.
        token_ids: the completion only; a final EOS is included.
        text: decoded completion without special tokens, cut before a stop string; None without a tokenizer.
        finish_reason: None while the completion is still growing (after an interruption, say).
        logprobs: natural log-probability of each sampled token under the distribution it was drawn from (after
            penalty, temperature and truncation; for greedy after the penalty). None unless asked for.
        raw_logprobs: the same under the model's own distribution (temperature 1, nothing truncated).
        token_times: `time.perf_counter()` of each token; None unless the engine records them.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    token_times: list[float] | None = None


@dataclass(slots=True)
class Output:
    """The result of one request: `n` samples of one prompt. `token_ids`, `text`, ... are those of the first sample.

    Attributes:
        request_id: the id that was given, or a number made by the engine.
        prompt_token_ids: the prompt as the model saw it.
        samples: one `Completion` per sample.
        error: why the request was refused or ended, or None.
        cached_tokens: prompt tokens that were taken from the prefix cache or a twin instead of being computed, over
            all samples.
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: list[Completion]
    timings: Timings
    error: RequestError | None = None
    cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def text(self) -> str | None:
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> list[float] | None:
        return self.samples[0].logprobs

    @property
    def raw_logprobs(self) -> list[float] | None:
        return self.samples[0].raw_logprobs

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One step of one sample, as `Engine.stream` yields it.

    Attributes:
        request_id: the request.
        sample: which sample of its prompt, from 0.
        token_id: the new token; None when the sample ended without one (refused, cancelled).
        text: the text that became certain with this token ("" while a character is incomplete); None without a
            tokenizer.
        finish_reason: set with the sample's last event.
        output: the whole `Output`, set with the request's last event.
    """

    request_id: str
    sample: int
    token_id: int | None
    text: str | None = None
    finish_reason: FinishReason | None = None
    output: Output | None = None
