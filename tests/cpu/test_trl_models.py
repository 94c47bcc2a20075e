"""What training puts into and around a model: an engine follows it and leaves it alone.

TRL's fused head, accelerate's wrappers for mixed precision, PEFT's adapters, wrappers and hooks that gather weights.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from families import build
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import changes, draw_prompts, expected, snapshot, tokens_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trl_training import QUIET, accelerator, logged, make_trainer, tiny_model, train

import flatbed
from flatbed.errors import FlatbedWarning
from flatbed.model.interface import NAME
from flatbed.model.runner import ModelRunner
from flatbed.model.shadow import make_shadow
from flatbed.model.steps import DeviceSteps

pytestmark = QUIET

PROMPTS = draw_prompts((20, 3, 41), seed=5)
NEW = 10
GREEDY = flatbed.SamplingParams(max_new_tokens=NEW)


def made(engine: flatbed.Engine) -> list[list[int]]:
    return tokens_of(engine.generate(PROMPTS, GREEDY))


def references(model: Any) -> list[list[int]]:
    """What the model's own `generate` makes, in eval mode."""
    training, found = model.training, []
    model.eval()
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    model.train(training)
    return found


# ---- forwards that close over the original ---------------------------------------------------------------------------


def wrapped_as_method(model: Any) -> None:
    """As TRL's fused head: a method that remembers the bound forward it stands for."""
    own = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, extra: bool = False, **kwargs: Any) -> Any:
        assert not extra
        return own(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def wrapped_as_function(model: Any) -> None:
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))


def wrapped_as_object(model: Any) -> None:
    """As accelerate's conversion of outputs: an object that stands for a function, inside of a function."""

    class Converted:
        def __init__(self, function: Any) -> None:
            self.function = function
            functools.update_wrapper(self, function)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        def __getstate__(self) -> Any:
            raise RuntimeError("cannot be copied")

    converted = Converted(model.forward.__func__)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def wrapped_in_itself(model: Any) -> None:
    """A function that closes over itself."""
    own, depth = model.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not depth:
            depth.append(1)
            try:
                return forward(*args, **kwargs)
            finally:
                depth.pop()
        return own(*args, **kwargs)

    model.forward = functools.wraps(own)(forward)


@pytest.mark.parametrize("inside", [None, wrapped_as_method])
@pytest.mark.parametrize("wrap", [wrapped_as_method, wrapped_as_function, wrapped_as_object, wrapped_in_itself])
def test_a_forward_that_calls_the_originals_is_followed(wrap: Any, inside: Any) -> None:
    """Otherwise the user's own model would run: with its own attention, and in its own mode."""
    model = build("llama").train()
    if inside is not None:
        inside(model)
    wrap(model)
    ran: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: ran.append(id(module)))
    before = snapshot_of_modules(model)
    with flatbed.Engine(model) as engine:
        assert made(engine) == expected("llama", PROMPTS, NEW)
        assert engine._runner._selects_logits
    assert ran
    assert id(model.model.layers[0].mlp) not in ran
    assert snapshot_of_modules(model) == before
    assert references(model) == expected("llama", PROMPTS, NEW), "and the original still runs itself"


def snapshot_of_modules(model: nn.Module) -> list[Any]:
    return [(type(m), m.training, dict(vars(m)).get("forward"), sorted(vars(m))) for m in model.modules()]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_a_model_that_accelerate_prepared_runs_in_its_mixed_precision(family: str) -> None:
    model = build(family)
    plain = references(model)
    with flatbed.Engine(model) as engine:
        assert made(engine) == plain
        assert engine._pool.dtype == torch.float32
        accelerator("bf16").prepare_model(model)
        before = snapshot(model)
        outputs = engine.generate(PROMPTS, flatbed.SamplingParams(max_new_tokens=NEW, logprobs=True, temperature=1.0))
        assert engine._pool.dtype == torch.bfloat16
        assert changes(before, model) == []
    differences = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        theirs = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        differences.append((theirs - torch.tensor(output.logprobs)).abs())
    assert 0 < torch.cat(differences).mean() < 0.05


def test_an_engine_made_under_autocast_runs_under_it_and_no_other_does() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        under, scores = flatbed.Engine(model), []
    with flatbed.Engine(model) as plain, under:
        assert (plain._pool.dtype, under._pool.dtype) == (torch.float32, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert made(plain) == expected("llama", PROMPTS, NEW)
            scores.append(made(under))
        scores.append(made(under))
        assert scores[0] == scores[1]
        assert made(plain) == expected("llama", PROMPTS, NEW)


def test_the_shadow_has_an_autocast_of_its_own_without_cached_weights() -> None:
    """Weights that are cast once and kept would be old in every replay of a CUDA graph after the next update."""
    model = build("llama")
    accelerator("bf16").prepare_model(model)
    shadow = make_shadow(model, NAME)

    def autocasts(function: Any, found: dict[int, torch.autocast]) -> dict[int, torch.autocast]:
        for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, torch.autocast):
                found[id(value)] = value
            autocasts(getattr(value, "model_forward", value), found)
        return found

    (theirs,), (ours,) = autocasts(model.forward, {}).values(), autocasts(shadow.forward, {}).values()
    assert theirs is not ours
    assert (theirs._cache_enabled, ours._cache_enabled) == (True, False)
    assert (theirs.fast_dtype, theirs.device) == (ours.fast_dtype, ours.device)


def test_a_head_in_float32_beside_a_body_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_model(initializer_range=0.1, tie_word_embeddings=False).bfloat16()
    options: dict[str, Any] = {"cast_lm_head_to_fp32": True, "bf16": True, "max_steps": 2, "learning_rate": 1e-3}
    trainer, _ = train("grpo", tmp_path, on_flatbed=True, model=model, **options)
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.03


# ---- PEFT ------------------------------------------------------------------------------------------------------------

LORA = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def test_adapters_that_are_switched_merged_and_added_are_followed() -> None:
    """Switches are plain attributes of PEFT's layers, which a shadow has copies of."""
    torch.manual_seed(2)
    model = get_peft_model(build("llama"), LORA).train()
    plain = expected("llama", PROMPTS, NEW)
    with flatbed.Engine(model) as engine:
        first = made(engine)
        assert first == references(model) != plain
        assert engine._runner._selects_logits, "PEFT hands the keyword through"
        with model.disable_adapter():
            assert made(engine) == plain
        assert made(engine) == first
        model.merge_adapter()
        assert made(engine) == references(model) != plain
        model.unmerge_adapter()
        assert made(engine) == references(model)
        model.add_adapter("other", LORA)
        assert made(engine) == first
        model.set_adapter("other")
        assert made(engine) == references(model)
        assert made(engine) != first
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(3.0)
        assert made(engine) == references(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B.other" in name:
                    parameter.mul_(-1)
        assert made(engine) == references(model)


def test_an_installed_peft_model_generates_with_its_adapters() -> None:
    torch.manual_seed(2)
    model = get_peft_model(build("llama"), LORA)
    flatbed.install(model)
    results = model.generate_batch(
        PROMPTS, generation_config=types.SimpleNamespace(max_new_tokens=NEW, do_sample=False)
    )
    assert [result.generated_tokens for result in results.values()] == references(model)
    flatbed.uninstall(model)


# ---- wrappers and hooks that gather ----------------------------------------------------------------------------------


def test_modules_inside_of_wrappers_run_as_what_is_inside() -> None:
    model = build("llama")
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = checkpoint_wrapper(layer)
    model.model.norm = torch.compile(model.model.norm)
    before = snapshot_of_modules(model)
    with flatbed.Engine(model) as engine:
        assert made(engine) == expected("llama", PROMPTS, NEW)
        assert engine._runner.fusions["decoder-layer"] == 2
    assert snapshot_of_modules(model) == before


@pytest.mark.parametrize(
    "package", ["deepspeed.runtime.zero.parameter_offload", "torch.distributed.fsdp._fully_shard._fsdp_state"]
)
def test_hooks_that_gather_weights_are_left_out(package: str) -> None:
    """They would wait for other processes, whose steps are not the same."""

    def gather(module: nn.Module, args: Any) -> None:
        raise AssertionError("gathered in the middle of a generation")

    def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return -output

    gather.__module__ = package
    model = build("llama")
    model.model.layers[0].mlp.register_forward_hook(steer)
    steered = references(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(gather)
    with flatbed.Engine(model) as engine:
        assert made(engine) == steered != expected("llama", PROMPTS, NEW)
    assert all(len(layer._forward_pre_hooks) == 1 for layer in model.model.layers)


def test_looking_at_weights_leaves_their_storage_as_it_is() -> None:
    """A storage that NumPy has seen can never be resized again, which is how FSDP lets gathered weights go."""
    model = build("llama")
    with flatbed.Engine(model) as engine:
        made(engine)
        made(engine)
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().resizable(), name


def test_weights_that_move_before_every_call_do_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once is a change; twice in a row is a way of life, as where weights are gathered for each generation."""
    model = build("llama")
    with flatbed.Engine(model) as engine:
        captured: list[bool] = []
        monkeypatch.setattr(engine._steps, "reset", lambda *, capture=True: captured.append(capture))

        def move() -> None:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

        for moves in (False, True, False, True, True, True, False):
            if moves:
                move()
            assert made(engine) == expected("llama", PROMPTS, NEW)
        assert captured == [True, True, False, False]


def test_doing_without_graphs_is_said_once() -> None:
    class Runner(ModelRunner):
        def __init__(self) -> None: ...

        def decode_graphs(self) -> Any:
            return types.SimpleNamespace(refused=None, memory_bytes=0)

    steps = DeviceSteps(Runner(), None)  # type: ignore[arg-type]
    steps.reset()
    assert steps._graphs.refused is None
    with pytest.warns(FlatbedWarning, match="without CUDA graphs"):
        steps.reset(capture=False)
    steps.reset(capture=False)
    assert "without CUDA graphs" in steps._graphs.refused


def test_a_model_in_training_under_trl_generates_as_in_eval_mode(tmp_path: Path) -> None:
    """TRL's fused head stays with the model when the trainer is gone; an engine of one's own runs it all the same."""
    trainer, _ = train("grpo", tmp_path, on_flatbed=False, max_steps=1)
    assert ("forward" in vars(trainer.model)) == (Version(trl.__version__) >= Version("1.15"))
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    with flatbed.Engine(trainer.model) as engine:
        ours = tokens_of(engine.generate(prompts, GREEDY))
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = trainer.model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        theirs.append(out[0, len(prompt) :].tolist())
    assert ours == theirs


@pytest.mark.parametrize(
    ("graphs", "chunks", "held", "kept"),
    [(67, 0, None, True), (69, 0, None, False), (40, 32, None, False), (999, 0, "1 GiB", True)],
)
def test_what_is_held_in_training_is_little(
    graphs: int, chunks: int, held: str | None, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no graphs on a CPU: what is looked at is that they are dropped, by the sizes (in MiB) alone."""
    more = {} if held is None else {"flatbed": {"held": held}}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, more=more)
    engine, dropped = trainer.flatbed.engine, []
    sizes = {"graphs": graphs * 2**20, "committed": chunks * 2**20}
    report = dataclasses.replace(engine.memory(), **sizes)
    monkeypatch.setattr(engine, "memory", lambda: report)
    monkeypatch.setattr(engine._steps, "reset", lambda *, capture=True: dropped.append(capture))
    trainer.flatbed.generate([[5, 6, 7]], None, 1)
    assert dropped == ([] if kept else [True])
