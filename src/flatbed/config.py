"""`EngineConfig`: the three controls (capacity, token budget, schedule), each with one meaning, and their defaults.

Every default of the engine stands here and nowhere else; the command line and the integrations read them from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flatbed.errors import ConfigError
from flatbed.memory.capacity import Capacity

Schedule = Literal["fifo", "prefill_first"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

DEFAULT_TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        capacity: the most K/V the pool may hold: `"64 blocks"`, `"8 GiB"`, `"20000 tokens"`, `"50%"` (of the memory
            that is free when the engine is built) or `"auto"`. A ceiling: it changes which requests can run together,
            and nothing else.
        token_budget: the most tokens in one forward pass (prefill chunks and decodes); None is DEFAULT_TOKEN_BUDGET.
        schedule: `fifo` (decode first, then prefill in order of arrival) or `prefill_first`.
        attention: `auto`, or the name of a backend (`flatbed info` lists them).
        block_size: tokens in a block of the pool.
        max_requests: the most samples that run at once.
        prefix_cache: share blocks between prompts with the same beginning.
        seed: the root of the seeds of requests that bring none.
        deterministic: the same bits for a request whatever runs beside it (see flatbed.model.deterministic).
    """

    capacity: str = "auto"
    token_budget: int | None = None
    schedule: str = "fifo"
    attention: str = "auto"
    block_size: int = 32
    max_requests: int = 1024
    prefix_cache: bool = True
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        Capacity.parse(self.capacity)
        if self.schedule not in SCHEDULES:
            raise ConfigError.unknown("schedule", self.schedule, SCHEDULES)
        for name, least in (("token_budget", 1), ("block_size", 1), ("max_requests", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "token_budget" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number, at least {least}, got {value!r}")
        for name in ("prefix_cache", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Settings by name. Raises ConfigError, listing what is known, for a name that is not a setting."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError.unknown("engine setting", name, known)
        return cls(**settings)

    @property
    def tokens_per_step(self) -> int:
        return DEFAULT_TOKEN_BUDGET if self.token_budget is None else self.token_budget


@dataclass(frozen=True)
class Translation:
    """What a Transformers `ContinuousBatchingConfig` means here.

    Attributes:
        settings: for `EngineConfig`.
        logprobs: whether requests return log-probabilities.
        without_effect: fields that the caller set and that change nothing here.
    """

    settings: dict[str, Any]
    logprobs: bool
    without_effect: tuple[str, ...]


# Transformers' own page size when none is given: `num_blocks` counts blocks of this many tokens.
_TRANSFORMERS_PAGE_SIZE = 256

_TRANSLATED = {
    "num_blocks",
    "page_size",
    "block_size",
    "max_memory_percent",
    "max_batch_tokens",
    "max_requests_per_batch",
    "scheduler_type",
    "allow_block_sharing",
    "return_logprobs",
    "seed",
}


def from_transformers(cb_config: Any | None) -> Translation:
    """The one place where Transformers' `ContinuousBatchingConfig` is translated. The object is only read.

    Raises ConfigError for values that make no sense here (a misspelt `scheduler_type`, say).
    """
    if cb_config is None:
        return Translation({}, False, ())

    def get(name: str) -> Any:
        return getattr(cb_config, name, None)  # fields come and go between versions

    settings: dict[str, Any] = {}
    page_size = get("page_size") or get("block_size") or _TRANSFORMERS_PAGE_SIZE
    if get("num_blocks") is not None:
        settings["capacity"] = f"{get('num_blocks') * page_size} tokens"
    elif get("max_memory_percent") is not None:
        settings["capacity"] = f"{100 * get('max_memory_percent'):g}%"
    for theirs, ours in (
        ("max_batch_tokens", "token_budget"),
        ("max_requests_per_batch", "max_requests"),
        ("scheduler_type", "schedule"),
        ("allow_block_sharing", "prefix_cache"),
        ("seed", "seed"),
    ):
        if get(theirs) is not None:
            settings[ours] = get(theirs)
    EngineConfig.from_mapping(settings)  # bad values are told here, in terms of the caller's call
    return Translation(settings, bool(get("return_logprobs")), _without_effect(cb_config))


def _without_effect(cb_config: Any) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(cb_config):
        return ()
    named = []
    for f in dataclasses.fields(cb_config):
        if f.name in _TRANSLATED or f.name.startswith("_"):
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if getattr(cb_config, f.name, default) != default:
            named.append(f.name)
    return tuple(named)
