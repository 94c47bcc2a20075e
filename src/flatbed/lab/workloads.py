"""Workloads: which prompts arrive when, and how many tokens are generated for each. No torch.

The published ones (`article`, `mixed`, `rollout`, ...) are made of Python's `random.Random` with fixed seeds, so that
every engine in every environment gets the same token ids. A vocabulary or a model that is too small for them gets
the same draw folded and cut to its size; `scale` shrinks counts and lengths in proportion.

======== ======================================================================================================
name     what it is
======== ======================================================================================================
article  64 prompts of 16-64 tokens, 128 new each, greedy: the report that started this
mixed    256 prompts of 100-1024 tokens, 100-1024 new each, temperature 0.6
rollout  8 prompts of 200 tokens, 16 samples each, 512 new, temperature 1.0, with log-probabilities
one      one prompt of 40 tokens, 128 new
concurrent 1,024 prompts of 32 tokens, 64 new
long     8 prompts of 32,000 tokens, 16 new (as near the model's limit as they fit)
======== ======================================================================================================
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatbed.errors import ConfigError

DEFAULT_NEW_TOKENS = 128
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class LabRequest:
    """One request.

    Attributes:
        prompt: token ids.
        new_tokens: how many tokens to generate for each sample.
        arrival_s: seconds after the beginning of the run at which it arrives.
    """

    prompt: Sequence[int]
    new_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests, and how all of them are sampled.

    Attributes:
        temperature: 0 is greedy.
        n: samples of each prompt.
        logprobs: whether the sampled tokens' log-probabilities are asked for.
        fixed_lengths: generate exactly `new_tokens`, whatever the model says about EOS.
        synthetic: the prompts are drawn, so that any others of the same lengths do as well.
    """

    name: str
    requests: tuple[LabRequest, ...]
    temperature: float = 0.0
    n: int = 1
    logprobs: bool = False
    fixed_lengths: bool = True
    synthetic: bool = True

    @property
    def tokens(self) -> int:
        """Tokens generated in total (with fixed lengths; otherwise at most)."""
        return self.n * sum(request.new_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests, each prompt counted once."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Prompt and completion together, of the longest request."""
        return max(len(request.prompt) + request.new_tokens for request in self.requests)

    @property
    def arrives_over_time(self) -> bool:
        return any(request.arrival_s > 0 for request in self.requests)

    @property
    def live_tokens(self) -> int:
        """Tokens whose K/V is held when every sample is at its longest at once, nothing shared."""
        return self.smallest_blocks(1)

    def varied(self, call: int) -> Workload:
        """The same lengths with other prompts for each call, so that no prefix cache answers it from an earlier one.

        Every prompt is rotated by `call` tokens. A workload whose prompts mean something stays as it is.
        """
        if not self.synthetic or call == 0:
            return self
        requests = []
        for request in self.requests:
            prompt, at = list(request.prompt), call % len(request.prompt)
            requests.append(replace(request, prompt=prompt[at:] + prompt[:at]))
        return replace(self, requests=tuple(requests))

    def smallest_blocks(self, block_size: int) -> int:
        """Blocks that hold every sample at once at its longest, no block shared.

        The last token of a completion is never attended to, so it needs no room.
        """
        return self.n * sum(-(-(len(r.prompt) + r.new_tokens - 1) // block_size) for r in self.requests)

    def facts(self) -> dict[str, Any]:
        """What a record says about it."""
        return {
            "name": self.name,
            "requests": len(self.requests),
            "samples": self.n * len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.tokens,
            "longest": self.longest,
            "live_tokens": self.live_tokens,
            "temperature": self.temperature,
            "n": self.n,
            "logprobs": self.logprobs,
            "fixed_lengths": self.fixed_lengths,
            "arrives_over_time": self.arrives_over_time,
            "synthetic": self.synthetic,
        }


def to_json(workload: Workload) -> dict[str, Any]:
    """A JSON object that `from_json` makes the same workload of."""
    return {
        "name": workload.name,
        "requests": [[list(r.prompt), r.new_tokens, r.arrival_s] for r in workload.requests],
        "temperature": workload.temperature,
        "n": workload.n,
        "logprobs": workload.logprobs,
        "fixed_lengths": workload.fixed_lengths,
        "synthetic": workload.synthetic,
    }


def from_json(value: Mapping[str, Any]) -> Workload:
    """The inverse of `to_json`."""
    requests = tuple(LabRequest(prompt, new, arrival) for prompt, new, arrival in value["requests"])
    return Workload(**{**value, "requests": requests})


# ---------------------------------------------------------------------------------------------------- the named ones


def _article(draw: random.Random) -> Workload:
    prompts = [[draw.randrange(1000, 150000) for _ in range(draw.randrange(16, 65))] for _ in range(64)]
    return Workload("article", tuple(LabRequest(prompt, 128) for prompt in prompts))


def _mixed(draw: random.Random) -> Workload:
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return Workload("mixed", tuple(LabRequest(p, draw.randint(100, 1024)) for p in prompts), temperature=0.6)


def _rollout(draw: random.Random) -> Workload:
    prompts = [[draw.randrange(1000, 150000) for _ in range(200)] for _ in range(8)]
    return Workload("rollout", tuple(LabRequest(p, 512) for p in prompts), temperature=1.0, n=16, logprobs=True)


def _one(draw: random.Random) -> Workload:
    return Workload("one", (LabRequest([draw.randrange(1000, 150000) for _ in range(40)], 128),))


def _concurrent(draw: random.Random) -> Workload:
    prompts = [[draw.randrange(1000, 150000) for _ in range(32)] for _ in range(1024)]
    return Workload("concurrent", tuple(LabRequest(prompt, 64) for prompt in prompts))


def _long(draw: random.Random) -> Workload:
    prompts = [[draw.randrange(1000, 150000) for _ in range(32000)] for _ in range(8)]
    return Workload("long", tuple(LabRequest(prompt, 16) for prompt in prompts))


_NAMED: dict[str, tuple[int, Callable[[random.Random], Workload]]] = {
    "article": (0, _article),
    "mixed": (0, _mixed),
    "rollout": (1, _rollout),
    "one": (2, _one),
    "concurrent": (2, _concurrent),
    "long": (2, _long),
}
WORKLOADS: tuple[str, ...] = tuple(_NAMED)


def make(
    name: str,
    vocab_size: int,
    longest: int | None,
    seed: int | None = None,
    scale: float = 1.0,
    tokenizer: Any | None = None,
) -> Workload:
    """The workload of that name, for a model of this size.

    Args:
        name: one of WORKLOADS, or the path of a `.jsonl` file. A line of such a file is a prompt (`prompt`,
            `messages` or `token_ids`, and `max_new_tokens`), or lengths (`prompt_tokens`, `new_tokens`); either may
            have an `arrival_s`.
        vocab_size: of the model; token ids are folded into it.
        longest: the model's limit for prompt and completion together; prompts are cut to fit, from the end.
            None is no limit.
        seed: of the draw; None is the published one.
        scale: shrinks the number of requests, of samples and of tokens in proportion, in (0, 1].
        tokenizer: for text prompts of a file.

    Raises ConfigError for an unknown name, a scale out of range, or a line that cannot be read.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"the workload's scale must be above 0 and at most 1, got {scale}")
    check_names([name])
    if name.endswith(SUFFIX):
        workload = _read(Path(name), vocab_size, tokenizer, seed or 0)
    else:
        published, maker = _NAMED[name]
        workload = maker(random.Random(published if seed is None else seed))
    return _fitted(_scaled(workload, scale), vocab_size, longest)


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that `make` does not know, or a file that is not there."""
    for name in names:
        if name not in _NAMED and not name.endswith(SUFFIX):
            raise ConfigError.unknown("workload", name, (*WORKLOADS, f"FILE{SUFFIX}"))
        if name.endswith(SUFFIX) and not Path(name).is_file():
            raise ConfigError(f"workload {name!r}: there is no such file")


def needs_tokenizer(name: str) -> bool:
    """Whether it is a file with text in it."""
    return name.endswith(SUFFIX) and any(f'"{field}"' in Path(name).read_text() for field in ("prompt", "messages"))


def _scaled(workload: Workload, scale: float) -> Workload:
    if scale == 1:
        return workload

    def shrink(count: int) -> int:
        return max(1, round(count * scale))

    kept = workload.requests[: shrink(len(workload.requests))]
    requests = tuple(
        LabRequest(r.prompt[: shrink(len(r.prompt))], shrink(r.new_tokens), r.arrival_s * scale) for r in kept
    )
    return replace(workload, requests=requests, n=shrink(workload.n))


def _fitted(workload: Workload, vocab_size: int, longest: int | None) -> Workload:
    requests = []
    for number, request in enumerate(workload.requests, start=1):
        prompt = request.prompt
        if max(prompt) >= vocab_size:
            prompt = [token % vocab_size for token in prompt]
        if longest is not None and len(prompt) + request.new_tokens > longest:
            room = longest - request.new_tokens
            if room < 1:
                raise ConfigError(
                    f"workload {workload.name!r}, request {number}: {request.new_tokens} new tokens do not fit into "
                    f"the model's {longest} positions"
                )
            prompt = prompt[:room]
        requests.append(replace(request, prompt=prompt))
    return replace(workload, requests=tuple(requests))


# ---------------------------------------------------------------------------------------------------------- from a file

_LENGTHS = ("prompt_tokens", "new_tokens")
_PROMPTS = ("prompt", "messages", "token_ids")
_FIELDS = (*_PROMPTS, "max_new_tokens", *_LENGTHS, "arrival_s", "id")


def _read(path: Path, vocab_size: int, tokenizer: Any | None, seed: int) -> Workload:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload: {error}") from error
    draw = random.Random(seed)
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_request(line, vocab_size, tokenizer, draw))
            except ValueError as error:
                raise ConfigError(f"workload {path}, line {number}: {error}") from error
    if not requests:
        raise ConfigError(f"workload {path} has no requests")
    return Workload(path.stem, tuple(r for r, _ in requests), synthetic=all(drawn for _, drawn in requests))


def _request(line: str, vocab_size: int, tokenizer: Any | None, draw: random.Random) -> tuple[LabRequest, bool]:
    """The request of a line, and whether its prompt was drawn."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    for name in fields:
        if name not in _FIELDS:
            raise ConfigError.unknown("field", name, _FIELDS)
    arrival = fields.get("arrival_s", 0.0)
    if not isinstance(arrival, (int, float)) or isinstance(arrival, bool) or not 0 <= arrival < float("inf"):
        raise ValueError(f"`arrival_s` must be a number, at least 0, got {arrival!r}")
    if any(name in fields for name in _LENGTHS):
        count, new = (_count(fields, name) for name in _LENGTHS)
        return LabRequest([draw.randrange(vocab_size) for _ in range(count)], new, float(arrival)), True
    if "max_new_tokens" not in fields:
        fields["max_new_tokens"] = DEFAULT_NEW_TOKENS
    return LabRequest(_token_ids(fields, tokenizer), _count(fields, "max_new_tokens"), float(arrival)), False


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a whole number, at least 1, got {value!r}")
    return value


def _token_ids(fields: Mapping[str, Any], tokenizer: Any | None) -> list[int]:
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(_PROMPTS)}, or the lengths {' and '.join(_LENGTHS)}")
    value = fields[given[0]]
    if given[0] == "token_ids":
        if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
            raise ValueError("`token_ids` must be a list of whole numbers that is not empty")
        return value
    if tokenizer is None:
        raise ValueError(f"`{given[0]}` needs a tokenizer, which this model does not have; give `token_ids` or lengths")
    from flatbed.text import encode

    return list(encode(value, tokenizer, "workload"))
