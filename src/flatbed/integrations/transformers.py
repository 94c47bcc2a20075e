"""`install(model)`: `model.generate_batch(...)` runs on Flatbed, with Transformers' own arguments and results.

What differs from Transformers' implementation is on purpose, and always in the direction of saying more: unknown
keywords are an error, an error of the engine is raised, a bad request is a result with `error` set and a warning that
names it, logits processors of every kind are applied, and neither the model nor the caller's configs are changed.
"""

from __future__ import annotations

import copy
import types
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from flatbed.config import from_transformers
from flatbed.engine import Engine
from flatbed.errors import ConfigError, FlatbedWarning, RequestError
from flatbed.model.runner import check_module
from flatbed.request import Completion, Output
from flatbed.sampling.processors import from_generation_config
from flatbed.sampling.random import derive_seed
from flatbed.text import encode

_METHOD = "generate_batch"


def install(model: nn.Module, tokenizer: Any | None = None, **settings: Any) -> nn.Module:
    """Makes `model.generate_batch` run on Flatbed until `uninstall`. Returns the model.

    Args:
        model: a Transformers model; only its instance attribute `generate_batch` is set.
        tokenizer: for stop strings.
        settings: for the engine (see `flatbed.Engine`); what a call's ContinuousBatchingConfig says goes before them.

    Raises as `flatbed.Engine` does when the model cannot be run. Installing again replaces the settings.
    """
    check_module(model)
    installed = GenerateBatch(model, tokenizer, settings)
    uninstall(model)
    model.__dict__[_METHOD] = installed
    return model


def uninstall(model: nn.Module) -> nn.Module:
    """Gives the model its own `generate_batch` back and frees the engine. A model without Flatbed stays as it is."""
    installed = model.__dict__.get(_METHOD)
    if isinstance(installed, GenerateBatch):
        installed.close()
        del model.__dict__[_METHOD]
    return model


class GenerateBatch:
    """The callable that stands in for `model.generate_batch`.

    One engine is kept from call to call, and its K/V memory is given back after each; a call whose config asks for
    other settings builds another.
    """

    def __init__(self, model: nn.Module, tokenizer: Any | None, settings: dict[str, Any]) -> None:
        self._model = weakref.ref(model)
        self._tokenizer = tokenizer
        self._settings = settings
        self._told: set[str] = set()
        self._engine: Engine | None = None
        self._built_with: dict[str, Any] | None = None
        self.engine({name: value for name, value in settings.items() if name != "seed"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied model is a model of its own: Flatbed is not installed on it.
        copied = memo.get(id(self._model()))
        return None if copied is None else types.MethodType(getattr(type(copied), _METHOD), copied)

    def __reduce__(self) -> Any:
        raise ConfigError("Flatbed is installed on this model; call flatbed.uninstall(model) before pickling it")

    def engine(self, settings: dict[str, Any]) -> Engine:
        """The engine with these settings; the last one is kept."""
        model = self._model()
        if model is None:
            raise ConfigError("the model that Flatbed was installed on is gone")
        if self._engine is None or self._built_with != settings:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._engine, self._built_with = Engine(model, self._tokenizer, **settings), settings
        return self._engine

    def close(self) -> None:
        """Frees the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _length(self, prompt: Any) -> int:
        """Tokens of a prompt; 0 of one that the engine will refuse."""
        try:
            return len(encode(prompt, self._tokenizer, ""))
        except RequestError:
            return 0

    def __call__(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        max_new_tokens: int | None = None,
        **unknown: Any,
    ) -> dict[str, GenerationOutput]:
        """Completes each of `inputs` (lists of token ids).

        Returns results by request id, in the order of the inputs; with num_return_sequences > 1 the further samples
        of a request stand before it, as `req_i__child#j`.

        `persistent_manager` and `warmup` change nothing: the engine always persists, and there is nothing to warm up.
        Raises ConfigError for unknown keywords and for a config that cannot be had (beams, say).
        """
        if unknown:
            known = (
                "generation_config, continuous_batching_config, record_timestamps, progress_bar, persistent_manager, "
                "warmup, max_new_tokens"
            )
            raise ConfigError(f"generate_batch got unknown keywords {', '.join(sorted(unknown))}; known: {known}")
        if not hasattr(inputs, "__len__"):
            raise ConfigError(f"generate_batch takes a list of prompts, got {type(inputs).__name__}")
        if len(inputs) == 0:
            return {}
        translation = from_transformers(continuous_batching_config)
        for name in translation.without_effect:
            if name not in self._told:
                self._told.add(name)
                warnings.warn(f"ContinuousBatchingConfig.{name} has no effect on Flatbed", FlatbedWarning, stacklevel=2)
        model = self._model()
        settings = {**self._settings, **translation.settings}
        # A seed belongs to a call: the same seed gives the same samples again. Without one it is drawn from torch's
        # global generator, as `generate` does, so that `set_seed` governs it.
        seed = settings.pop("seed", None)
        root = int(torch.randint(2**62, (1,))) if seed is None else seed
        engine = self.engine(settings)
        assert model is not None, "engine() has looked"
        config: Any = model.generation_config if generation_config is None else generation_config
        if max_new_tokens is not None:  # in the config, so that processors which count tokens know of it
            config = copy.deepcopy(config)
            config.max_new_tokens = max_new_tokens
        params = []
        for i, prompt in enumerate(inputs):
            one = from_generation_config(
                config,
                model,
                prompt_length=self._length(prompt),
                longest=engine.longest,
                logprobs=translation.logprobs,
            )
            params.append(replace(one, seed=derive_seed(root, i)))
        names = [f"req_{i}" for i in range(len(inputs))]
        progress = _Progress(len(inputs), progress_bar)
        try:
            outputs = engine.generate(
                inputs,
                params,
                request_ids=names,
                on_output=progress.advance,
                record_token_times=record_timestamps,
            )
        finally:
            progress.close()
            if not engine.has_work:
                engine.release()
        results: dict[str, GenerationOutput] = {}
        for output in outputs:
            for completion in [*output.samples[1:], output.samples[0]]:
                result = _result(output, completion)
                results[result.request_id] = result
        return results


def _result(output: Output, completion: Completion) -> GenerationOutput:
    name = output.request_id
    if completion.index > 0:
        name = f"{name}__child#{completion.index - 1}"
    timings = output.timings
    return GenerationOutput(
        request_id=name,
        prompt_ids=list(output.prompt_token_ids),
        generated_tokens=list(completion.token_ids),
        logprobs=list(completion.logprobs or ()),
        error=None if output.error is None else str(output.error),
        status=RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED,
        created_time=timings.submitted,
        lifespan=(
            -1 if timings.started is None else timings.started,
            -1 if timings.finished is None else timings.finished,
        ),
        timestamps=completion.token_times,
    )


class _Progress:
    """A tqdm bar over requests, when asked for."""

    def __init__(self, total: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, disable=not shown, desc=f"Solving {total} requests", unit="request")

    def advance(self, output: Output) -> None:
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
