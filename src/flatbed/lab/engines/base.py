"""What the lab asks of an engine: `Adapter`; how an engine and its setting are written: `EngineSpec`, `Settings`.

::

    import_packages ─▶ load ─▶ construct ─▶ warm_up ─▶ run ─▶ run ─▶ ...  ─▶ close
       code           weights   pool, ...   graphs     first   steady      (construct may follow: another workload)

Each is timed apart by whoever drives the adapter; an engine that builds its pool anew in every call tells
the parts in `RunResult.parts` instead.

Adapters run in processes that may have nothing but torch and that one engine installed: this file needs neither.
"""

from __future__ import annotations

import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

from flatbed.errors import ConfigError
from flatbed.lab.workloads import Workload
from flatbed.memory.capacity import Capacity

# "N blocks" means the same number of tokens for every engine: N of Transformers' pages.
BLOCK_TOKENS = 256

_SPEC = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(@(?P<version>[\w.+-]+))?(:(?P<options>.*))?", re.DOTALL)

# The parts that a call, or a start, is made of, in order of time.
PARTS = ("construction", "warm_up", "generation", "teardown")

# The fields of Settings, each of which an experiment may vary.
CONTROLS = ("capacity", "token_budget", "schedule")

# How much memory an engine has taken, which decides whether several can be alive on one device.
Holding = Literal["live", "in calls", "always"]


@dataclass(frozen=True)
class EngineSpec:
    """An engine as a user writes it: `NAME[@VERSION][:OPTION,OPTION,...]`.

    Attributes:
        text: as it was written; names the engine in results.
        name: a name of the registry, or the dotted path of an `Adapter` class.
        version: the version that the environment must have; None takes whatever is there.
        words: options without a value, in order (`sdpa`, `persistent`).
        options: options with one (`warmup=false`); true, false, none and numbers are read as such.
    """

    text: str
    name: str
    version: str | None = None
    words: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """Reads `transformers@5.20.2:sdpa,warmup=false,persistent`. Raises ConfigError when it cannot be read."""
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"cannot read engine {text!r}: it is written NAME[@VERSION][:OPTION,OPTION=VALUE,...]")
        words: list[str] = []
        options: dict[str, Any] = {}
        for option in filter(None, (part.strip() for part in (match["options"] or "").split(","))):
            name, equals, value = option.partition("=")
            if not equals:
                words.append(option)
            elif name in options:
                raise ConfigError(f"engine {text!r} sets {name!r} twice")
            else:
                options[name] = _value(value)
        return cls(text.strip(), match["name"], match["version"], tuple(words), tuple(options.items()))

    @property
    def key(self) -> str:
        """`NAME@VERSION`, or `NAME` when no version is asked for."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    def option(self, name: str, default: Any = None) -> Any:
        """The value of that option."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class Settings:
    """The three controls, as an experiment sets them. None leaves a control at the engine's own default.

    Attributes:
        capacity: a capacity text (see `flatbed.memory.capacity.Capacity`); `N blocks` are N times BLOCK_TOKENS tokens.
        token_budget: the most tokens in one forward pass.
        schedule: `fifo`, `prefill_first`, or what the engine has.
    """

    capacity: str | None = None
    token_budget: int | None = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None:
            Capacity.parse(self.capacity)
        if self.token_budget is not None and self.token_budget < 1:
            raise ConfigError(f"the token budget must be at least 1, got {self.token_budget}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def capacity_amount(self) -> Capacity | None:
        """The capacity, with blocks counted in tokens; None when it is left to the engine."""
        if self.capacity is None:
            return None
        parsed = Capacity.parse(self.capacity)
        return Capacity(parsed.amount * BLOCK_TOKENS, "tokens") if parsed.unit == "blocks" else parsed


@dataclass(frozen=True)
class Setup:
    """What is the same for all settings of an experiment.

    Attributes:
        model: see `flatbed.lab.models`.
        device, dtype: as there; `auto` is allowed.
        longest: prompt and completion together, of the longest request of all workloads that will be run.
        checkpoint: a folder with the model's weights, for engines that load by themselves.
        seed: of sampling.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    longest: int | None = None
    checkpoint: str | None = None
    seed: int = 0


@dataclass
class RunResult:
    """What one call did.

    Attributes:
        seconds: of the whole call, by the clock on the wall, the device having finished.
        tokens: generated, over all samples.
        parts: seconds of the call by PARTS; None when the engine's call could not be split.
        first_token_s: for each sample, seconds from its arrival to its first token; empty unless asked for.
        between_tokens_s: seconds between two tokens of one sample, all samples pooled; empty unless asked for.
        preemptions: in this call; None when the engine does not tell.
        error: what went wrong although the call came back, or None.
        notes: what a reader has to know about this figure (arrivals that were ignored, say).
    """

    seconds: float
    tokens: int
    parts: dict[str, float] | None = None
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    preemptions: int | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class MemoryResult:
    """Bytes of the K/V cache since the engine was constructed. None where the engine does not tell.

    Attributes:
        capacity_tokens: tokens that the cache may hold; None for an engine without such a limit.
        reserved: addresses set aside.
        committed: memory really taken, at the most.
        live: of it, blocks that held tokens of running requests, at the most.
        outside_torch: of `committed`, what torch's own allocator on the device knows nothing of.
        peak: the most memory that the process had on the device (or in RAM), weights and all.
        weights: of that, what the process had before the engine was constructed.
    """

    capacity_tokens: int | None = None
    reserved: int | None = None
    committed: int | None = None
    live: int | None = None
    outside_torch: int = 0
    peak: int | None = None
    weights: int | None = None


class MissingEngine(ConfigError):
    """The engine, or the version of it that was asked for, is not installed in this environment."""


class NotSupported(ConfigError):
    """The engine has no such control, or cannot run such a workload."""


class Adapter(ABC):
    """One engine at one setting. A new one for each setting; used by one thread.

    Class attributes:
        package: the distribution whose version is the engine's.
        controls: which of CONTROLS it has; an engine without one is measured once where that one is varied, as a
            reference.
        shares: whether several settings of it can share one process and its weights; see `sibling`.

    Every method may raise: ConfigError (and its kinds above) for what cannot be had, anything else for what went wrong.
    """

    package: ClassVar[str]
    controls: ClassVar[frozenset[str]] = frozenset(CONTROLS)
    shares: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec, settings: Settings, setup: Setup) -> None:
        self.spec = spec
        self.settings = settings
        self.setup = setup

    @classmethod  # noqa: B027 - a hook, empty on purpose
    def check(cls, spec: EngineSpec, settings: Settings) -> None:
        """Looks at what was asked for without importing the engine. Raises ConfigError for what can never be."""

    @classmethod
    def holding(cls, spec: EngineSpec) -> Holding:
        """What memory it takes: that of `live` tokens, or that of its capacity, `in calls` alone or `always`.

        Engines that hold their capacity always cannot be measured in turns on one device: one would find the memory of
        the other taken.
        """
        return "always"

    @classmethod  # noqa: B027 - a hook, empty on purpose
    def import_packages(cls) -> None:
        """Imports what the engine is made of: seconds that belong to no phase. Must not initialise the device."""

    def sibling(self, settings: Settings) -> Adapter:
        """This engine at another setting, on the weights that were loaded here.

        Raises NotSupported for an engine that needs a process of its own for each setting.
        """
        raise NotSupported(f"engine {self.spec.text!r} needs a process of its own for each setting")

    @abstractmethod
    def load(self) -> None:
        """Loads the weights. Once."""

    @abstractmethod
    def construct(self, workload: Workload) -> dict[str, float]:
        """Builds the engine: pool, buffers, scheduler. The workload is what will be run on it first.

        Returns the seconds of what it did besides that belongs to another phase: `load`, `warm_up`.
        """

    def warm_up(self) -> None:  # noqa: B027 - a hook, empty on purpose
        """Whatever the engine does before its first call, once, when asked: graphs, compilation."""

    @abstractmethod
    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        """Completes the workload. With `latency`, times of tokens are recorded too, which may cost time."""

    @abstractmethod
    def memory(self) -> MemoryResult:
        """Of the cache, after a call. `peak` and `weights` are added by whoever drives the adapter, unless set."""

    def facts(self) -> dict[str, Any]:
        """The full settings as the engine has them now, by its own names."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Frees what `construct` made; the weights stay. Safe to call at any time, and twice."""


class ModelAdapter(Adapter):
    """An engine that runs a Transformers model which is loaded beforehand.

    Attributes:
        model, tokenizer: set by `load`, unless they were set before.
        attention: the name that Transformers' `attn_implementation` gets; None leaves it.
    """

    shares = True
    model: Any = None
    tokenizer: Any = None

    @classmethod
    def import_packages(cls) -> None:
        from flatbed.lab import models

        models.import_packages()

    def sibling(self, settings: Settings) -> ModelAdapter:
        made = type(self)(self.spec, settings, self.setup)
        made.model, made.tokenizer = self.model, self.tokenizer
        return made

    @property
    def attention(self) -> str | None:
        return None

    def load(self) -> None:
        from flatbed.lab import models

        if self.model is None:
            self.model, self.tokenizer = models.load(
                self.setup.model, self.setup.device, self.setup.dtype, self.attention
            )
            return
        its = self.model.config._attn_implementation
        if self.attention not in (None, its):
            raise ConfigError(
                f"engine {self.spec.text!r}: the model was loaded with attention {its!r}; load it with "
                f"attn_implementation={self.attention!r}"
            )

    def facts(self) -> dict[str, Any]:
        model = self.model
        return {
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attn_implementation": model.config._attn_implementation,
        }

    @property
    def on_cuda(self) -> bool:
        return bool(self.model.device.type == "cuda")

    def synchronize(self) -> None:
        """Waits for the device, so that the clock counts what it did."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.model.device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V over all layers."""
        from flatbed.lab import models

        return models.kv_token_bytes(self.model.config, self.model.dtype.itemsize)


# Adapters by name; where each lives, so that no engine is imported before it is needed.
ENGINES: dict[str, str] = {
    "flatbed": "flatbed.lab.engines.flatbed.FlatbedAdapter",
    "transformers": "flatbed.lab.engines.transformers.TransformersAdapter",
    "generate": "flatbed.lab.engines.generate.GenerateAdapter",
    "vllm": "flatbed.lab.engines.vllm.VllmAdapter",
}


def adapter_class(spec: EngineSpec) -> type[Adapter]:
    """The adapter of an engine, or the `Adapter` class that a dotted path names.

    Raises ConfigError when there is none of that name.
    """
    path = ENGINES.get(spec.name, spec.name)
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError.unknown("engine", spec.name, (*ENGINES, "package.module.AdapterClass"))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {spec.name!r} cannot be imported: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Adapter)):
        raise ConfigError(f"engine {spec.name!r} is not a class made from flatbed.lab.engines.base.Adapter")
    return found


def import_if_there(path: str) -> Any | None:
    """The module of that path, or None where it, or a package that it lies in, is not installed.

    Raises ImportError when it is there and cannot be imported, because something that it needs is missing, say.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        return None


def require(package: str) -> None:
    """Imports an engine's package. Raises MissingEngine when it, or a package that it needs, is not installed.

    Raises ImportError for anything else that is wrong with it: that is not missing, but broken, and told as it is.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingEngine(f"{package} cannot be imported: {error}") from error


def one_word(spec: EngineSpec, what: str) -> str | None:
    """The only word of a spec, or None. Raises ConfigError, saying what it may be, when there are more."""
    if len(spec.words) > 1:
        raise ConfigError(f"engine {spec.text!r} has {len(spec.words)} options without a value; it takes {what}")
    return spec.words[0] if spec.words else None


def latencies(arrivals: Mapping[Any, float], times: Mapping[Any, list[float]]) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and between tokens, from moments on one clock.

    Args:
        arrivals: when each sample arrived, by any name.
        times: when each of its tokens came, in order.
    """
    first = [stamps[0] - arrivals[name] for name, stamps in times.items() if stamps]
    between = [b - a for stamps in times.values() for a, b in pairwise(stamps)]
    return first, between


def _value(text: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
