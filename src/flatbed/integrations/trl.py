"""Rollouts for TRL: GRPO and RLOO generate on Flatbed, with the very weights that are being trained.

TRL has one place where an engine other than `generate` can stand: `trainer.vllm_generation`, which its trainers ask for
completions when `trainer.use_vllm` is set. `Rollouts` stands there. So tools, environments, rewards, metrics and losses
are TRL's own code; what a rollout's log-probabilities are used for is what TRL uses vLLM's for; and nothing of vLLM is
needed. There is no second copy of the weights, no server, and nothing to synchronise::

      a generation of TRL's (`trainer._generate`)                                      then
      ┌────────────────────────────────────────────────────────────────────────┐
      │ weights whole ▸ tokenise ▸ Rollouts.generate ▸ tools ▸ Rollouts.generate │ ▸ rewards ▸ forward, backward, step
      └────────────────────────────────────────────────────────────────────────┘
        K/V memory      ──────  ▟████████████████████████████████████████████▙  ──────────────────────────────────────
                                 the second turn finds the first one's K/V      given back to the device; its addresses,
                                                                                and so CUDA graphs, stay
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import trl
from torch import nn
from transformers import ProcessorMixin

from flatbed.config import EngineConfig, from_transformers
from flatbed.engine import Engine
from flatbed.errors import ConfigError, FlatbedWarning
from flatbed.memory.capacity import Capacity
from flatbed.model.runner import check_architecture
from flatbed.request import Completion, Output, SamplingParams
from flatbed.sampling.processors import from_generation_config, merged
from flatbed.sampling.random import derive_seed

Logprobs = Literal["processed", "raw"]

# What an engine may hold while a step is trained: training is to take no more than 100 MiB beyond what it takes without
# generation, and the workspace that cuBLAS has for the stream of the graphs (32 MiB on an H200) stays with torch.
HELD = "68 MiB"
# What is used of a trainer; the contract tests say where each is in TRL.
_NEEDED = (
    "_generate",
    "_generate_single_turn",
    "_dist",
    "accelerator",
    "generation_config",
    "model_wrapped",
    "use_vllm",
)


def use_flatbed(
    trainer: Any,
    capacity: str = EngineConfig.capacity,
    *,
    logprobs: Logprobs = "processed",
    seed: int | None = None,
    held: str = HELD,
    **settings: Any,
) -> Any:
    """Lets a TRL trainer that exists generate on Flatbed. Returns the trainer; `trainer.flatbed` is its `Rollouts`.

    Args:
        trainer: a `GRPOTrainer` or `RLOOTrainer`, not yet using vLLM.
        capacity: the most K/V of one generation (see `flatbed.Engine`). A ceiling: nothing is reserved.
        logprobs: of which distribution the sampled tokens' log-probabilities are that the trainer is given.
            `processed`: the one that they were drawn from, after temperature and truncation; this is what TRL asks of
            vLLM, and its own log-probabilities are of logits divided by the temperature as well. `raw`: the model's
            own, at temperature 1.
        seed: makes rollouts a function of it, of the process and of the number of the generation. None draws from
            torch's global generator, as `generate` does, so that `args.seed` governs.
        held: the most memory that stays with the engine while a step is trained. K/V never do, nor what is cast in
            mixed precision; CUDA graphs that take more are let go, and captured again in the next generation.
        settings: further ones of the engine.

    A `transformers_continuous_batching_config` of a trainer with `use_transformers_continuous_batching` is translated;
    what is said here goes before it.

    The trainer then says `use_vllm`, which is how TRL's code asks for completions here and uses their
    log-probabilities: `args.vllm_importance_sampling_correction` and the options beside it do for Flatbed what they do
    for vLLM, and `sampling/...` is logged. `args` stay as they are. (RLOO takes no log-probabilities, of vLLM neither.)

    Raises ConfigError for a trainer or settings that cannot be, UnsupportedModelError for a model that cannot be run.
    """
    _check_trainer(trainer, logprobs)
    held_bytes = _parse_bytes(held)
    _warn_of_bias(trainer, logprobs)
    given = {**_translated(trainer), **settings}
    if capacity != EngineConfig.capacity or "capacity" not in given:
        given["capacity"] = capacity
    rollouts = Rollouts(trainer, logprobs, seed, given, held_bytes)
    trainer.flatbed = trainer.vllm_generation = rollouts
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "flatbed", -1
    trainer._generate = _in_one_session(trainer._generate, rollouts)
    return trainer


class _OnFlatbed:
    """What the trainers below add to TRL's own."""

    def __init__(self, *args: Any, flatbed: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_flatbed(self, **(flatbed or {}))


class GRPOTrainer(_OnFlatbed, trl.GRPOTrainer):
    """TRL's `GRPOTrainer` with rollouts by Flatbed: the same arguments.

    One more, `flatbed`, may hold arguments for `use_flatbed`: `flatbed={"capacity": "8 GiB"}`.
    """


class RLOOTrainer(_OnFlatbed, trl.RLOOTrainer):
    """TRL's `RLOOTrainer` with rollouts by Flatbed: the same arguments.

    One more, `flatbed`, may hold arguments for `use_flatbed`: `flatbed={"capacity": "8 GiB"}`.
    """


class Rollouts:
    """What TRL asks for completions; stands in for its `VLLMGeneration`.

    Attributes:
        logprobs: which log-probabilities `generate` gives (see `use_flatbed`).
    """

    def __init__(
        self, trainer: Any, logprobs: Logprobs, seed: int | None, settings: dict[str, Any], held_bytes: int
    ) -> None:
        self.logprobs = logprobs
        self._held_bytes = held_bytes
        self._trainer = trainer
        self._seed = seed
        self._settings = settings
        self._calls = 0
        self._in_session = False
        self._engine: Engine | None = None
        self._engine_of: tuple[int, torch.device] | None = None
        EngineConfig.from_mapping(settings)
        model = self._model()
        check_architecture(model)
        if not self._sharded:  # what cannot run says so now, not in the first step
            self._engine_for(model)

    @property
    def engine(self) -> Engine | None:
        """The engine that generates; None before the first generation where weights are sharded."""
        return self._engine

    def sync_weights(self) -> None:
        """Nothing to do: there is one copy of the weights. TRL calls this before the first generation of a step."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]] | None, list[list[list[int]]]]:
        """A completion for each of `prompts` (token ids), with the trainer's generation config.

        Prompts that are there several times, as each is `num_generations` times, are prefilled once; that number itself
        is not looked at. With a model whose positions end within `max_new_tokens` of a prompt, completions end there.

        Returns prompts, completions (EOS included), and for each token of these a list with one log-probability, and
        one with the token's id, as `VLLMGeneration.generate` does. No log-probabilities (None) for a trainer that takes
        none.

        Raises the RequestError of a prompt that cannot be completed (CapacityError for one that does not fit), and
        ModelForwardError. The trainer can go on afterwards.
        """
        if images is not None and any(images):
            raise ConfigError("Flatbed generates text from text; prompts with images need use_vllm or neither")
        places: dict[tuple[int, ...], list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(place)
        with profiler or nullcontext(), self.session() as model, self._precision():
            engine = self._engine_for(model)
            outputs = engine.generate(
                list(places),
                self._sampling(places, model, engine),
                request_ids=[f"prompt {at[0] + 1} of {len(prompts)}" for at in places.values()],
                on_output=_raise_error,
            )
        completions: list[Any] = [None] * len(prompts)
        for output, at in zip(outputs, places.values(), strict=True):
            for place, sample in zip(at, output.samples, strict=True):
                completions[place] = sample
        tokens = [list(completion.token_ids) for completion in completions]
        logprobs = [[[one] for one in self._logprobs_of(c)] for c in completions] if self._wanted else None
        return prompts, tokens, logprobs, [[[token] for token in one] for one in tokens]

    @contextmanager
    def session(self) -> Iterator[nn.Module]:
        """The bracket around the turns of one generation; gives the model that generates.

        Weights are whole inside: sharded ones are gathered once, so that processes with different numbers of turns stay
        in step. Afterwards the K/V memory is given back, whatever happened.
        """
        if self._in_session:
            yield self._model()
            return
        with ExitStack() as stack:
            self._gather(stack)
            self._in_session = True
            try:
                yield self._model()
            finally:
                self._in_session = False
                if self._engine is not None:
                    _make_room_for_training(self._engine, self._held_bytes)

    def close(self) -> None:
        """Frees the engine; the next generation would build another."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._engine_of = None

    # ---- the trainer's model ----------------------------------------------------------------------------------------

    def _model(self) -> nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

    def _precision(self) -> AbstractContextManager[Any]:
        """What TRL runs its own forward in."""
        return self._trainer.accelerator.autocast()

    @property
    def _sharded(self) -> bool:
        backend = self._trainer._dist
        return backend.is_zero3 or backend.fsdp_version is not None

    def _gather(self, stack: ExitStack) -> None:
        """Makes sharded weights whole until `stack` is closed; others are."""
        trainer, model = self._trainer, self._trainer.model_wrapped
        stack.enter_context(trainer._dist.gather_params(list(model.parameters())))
        stack.enter_context(trainer._dist.summon_full_params(model, recurse=True, writeback=False))
        if trainer._dist.fsdp_version == 2:
            for module in model.modules():
                if hasattr(module, "unshard"):
                    stack.callback(module.reshard)
                    module.unshard()

    def _engine_for(self, model: nn.Module) -> Engine:
        """The engine of this model on its device; the last one is kept."""
        device = next(model.parameters()).device
        if self._engine is None or self._engine_of != (id(model), device):
            self.close()
            with self._precision():
                self._engine = Engine(model, self._tokenizer, **self._settings)
            self._engine_of = (id(model), device)
        return self._engine

    @property
    def _tokenizer(self) -> Any | None:
        """Only stop strings need one; with it, every completion would be decoded here and once more by TRL."""
        return self._trainer._tokenizer if self._trainer.generation_config.stop_strings else None

    # ---- sampling ---------------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> bool:
        return hasattr(self._trainer, "vllm_importance_sampling_correction")

    def _logprobs_of(self, completion: Completion) -> list[float]:
        found = completion.logprobs if self.logprobs == "processed" else completion.raw_logprobs
        assert found is not None, "they were asked for"
        return found

    def _sampling(
        self, places: Mapping[tuple[int, ...], list[int]], model: nn.Module, engine: Engine
    ) -> list[SamplingParams]:
        """How each different prompt is completed, as often as it is there."""
        config = merged(self._trainer.generation_config, model)
        self._calls += 1
        root = 0  # greedy draws nothing, and leaves torch's generator where it is
        if config.do_sample:
            root = int(torch.randint(2**62, (1,))) if self._seed is None else self._own_root(self._seed)
        params = []
        for number, (prompt, at) in enumerate(places.items()):
            one = from_generation_config(
                config, model, prompt_length=len(prompt), longest=engine.longest, logprobs=self._wanted
            )
            length = one.max_new_tokens
            if engine.max_positions is not None and len(prompt) < engine.max_positions:
                length = min(length, engine.max_positions - len(prompt))
            params.append(replace(one, n=len(at), max_new_tokens=length, seed=derive_seed(root, number)))
        return params

    def _own_root(self, seed: int) -> int:
        """The root of this generation's seeds. Processes may have the same prompt, and must not complete it alike."""
        return derive_seed(derive_seed(seed, self._trainer.accelerator.process_index), self._calls)


def _in_one_session(generate: Callable[..., Any], rollouts: Rollouts) -> Callable[..., Any]:
    @functools.wraps(generate)
    def with_session(*args: Any, **kwargs: Any) -> Any:
        with rollouts.session():
            return generate(*args, **kwargs)

    return with_session


def _make_room_for_training(engine: Engine, held_bytes: int) -> None:
    """Gives the K/V memory back, and graphs too unless all that is held then is no more than `held_bytes`."""
    engine.release()
    memory = engine.memory()
    if memory.committed + memory.graphs > held_bytes:
        engine.release(graphs=True)


def _raise_error(output: Output) -> None:
    """A step cannot be made of some of its completions: the first that fails ends the generation."""
    if output.error is not None:
        raise output.error


def _parse_bytes(held: str) -> int:
    try:
        size = Capacity.parse(held)
    except ConfigError:
        size = None
    if size is None or size.unit != "bytes":
        raise ConfigError.unknown("amount held", held, ('"68 MiB"', '"4 GiB"'))
    return int(size.amount)


def _translated(trainer: Any) -> dict[str, Any]:
    """Settings of a trainer that was to use Transformers' continuous batching."""
    if not getattr(trainer, "use_transformers_continuous_batching", False):
        return {}
    settings = dict(from_transformers(trainer.continuous_batching_config).settings)
    settings.pop("seed", None)
    return settings


def _check_trainer(trainer: Any, logprobs: str) -> None:
    """Raises ConfigError for what cannot be had, before anything of the trainer is touched."""
    name = type(trainer).__name__
    if logprobs not in get_args(Logprobs):
        raise ConfigError.unknown("kind of log-probabilities", logprobs, get_args(Logprobs))
    if getattr(trainer, "use_vllm", False):
        raise ConfigError(f"{name} generates with vLLM or Flatbed already; leave use_vllm=True out of its arguments")
    missing = [one for one in _NEEDED if not hasattr(trainer, one)]
    if missing:
        raise ConfigError(
            f"{name} of TRL {trl.__version__} lacks {', '.join(missing)}; Flatbed works with the GRPOTrainer and "
            "RLOOTrainer of TRL 1.7 to 1.16"
        )
    if isinstance(trainer.processing_class, ProcessorMixin):
        raise ConfigError(f"{name} has a processor for images; Flatbed generates text from text")
    if trainer._dist.is_zero3 and not trainer.args.ds3_gather_for_generation:
        raise ConfigError(
            "ds3_gather_for_generation=False leaves ZeRO-3's weights in pieces; Flatbed needs them gathered"
        )
    token_modes = ("token_truncate", "token_mask")
    if (
        getattr(trainer, "vllm_importance_sampling_correction", False)
        and trainer.loss_type == "vespo"
        and trainer.vllm_importance_sampling_mode not in token_modes
    ):
        raise ConfigError(
            f"the VESPO loss needs vllm_importance_sampling_mode to be one of {', '.join(token_modes)}, got "
            f"{trainer.vllm_importance_sampling_mode!r}"
        )


def _warn_of_bias(trainer: Any, logprobs: str) -> None:
    if (
        logprobs == "raw"
        and getattr(trainer, "vllm_importance_sampling_correction", False)
        and (trainer.temperature != 1 or trainer.top_p < 1 or trainer.top_k or trainer.min_p)
    ):
        warnings.warn(
            "logprobs='raw' are not of the distribution that is drawn from (a temperature, top_p, top_k or min_p is "
            "set), which biases TRL's importance-sampling correction; take 'processed', or set "
            "vllm_importance_sampling_correction=False",
            FlatbedWarning,
            stacklevel=3,
        )
