"""Mixed precision: weights are cast once a call, and what comes out are the bits that casting in every step gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from tiny import changes, snapshot
from torch import nn

import flatbed
from flatbed.memory.host import HostBacking
from flatbed.model import casts, runner

PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [42] * 17]
SAMPLED = flatbed.SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, logprobs=True, ignore_eos=True)


def under_autocast(model: Any) -> flatbed.Engine:
    """Without the prefix cache: bfloat16 gives other bits when part of a prompt is there already."""
    with torch.autocast("cpu", torch.bfloat16):
        return flatbed.Engine(model, capacity="64 blocks", block_size=16, prefix_cache=False)


def made(engine: flatbed.Engine) -> list[Any]:
    return [(o.token_ids, o.logprobs, o.raw_logprobs) for o in engine.generate(PROMPTS, SAMPLED)]


def cast_in_every_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What comes out without any of this."""
    with monkeypatch.context() as patch:
        patch.setattr(casts.Casts, "refresh", lambda self: False)
        with under_autocast(model) as engine:
            result = made(engine)
            assert engine.memory().casts == 0
            return result


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    expected, before = cast_in_every_step(model, monkeypatch), snapshot(model)
    with under_autocast(model) as engine:
        assert made(engine) == expected
        assert engine._runner.kv_dtype == torch.bfloat16
        assert engine.memory().casts > 0
    assert changes(before, model) == []


def test_every_plain_product_is_cast_and_tied_weights_once() -> None:
    model = build("llama")
    model.lm_head.weight = model.model.layers[0].mlp.gate_proj.weight = nn.Parameter(torch.randn(64, 48))
    with under_autocast(model) as engine:
        made(engine)
        held = engine._runner._casts
        products = [m for m in engine._runner.shadow.modules() if isinstance(m, casts.CastLinear)]
        assert len(products) == sum(type(m) is nn.Linear for m in model.modules())
        assert len(held._places) == len(products) - 1
        assert products[-1].__dict__["_flatbed_cast"][0].dtype == torch.bfloat16


def _in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-0.5)


def _unseen(weight: torch.Tensor) -> None:
    weight.data = weight.data  # as optimizers that keep master weights do: no counter of PyTorch's moves
    weight.data.numpy()[...] *= -0.5


@pytest.mark.parametrize("update", [_in_place, _unseen])
def test_a_call_runs_on_the_weights_as_they_are_when_it_begins(
    update: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    with under_autocast(model) as engine:
        before = made(engine)
        update(model.model.layers[1].self_attn.v_proj.weight)
        after = made(engine)
    assert after != before
    assert after == cast_in_every_step(model, monkeypatch)


def test_memory_is_given_back_and_taken_again_at_the_same_addresses() -> None:
    model = build("llama")
    with under_autocast(model) as engine:
        expected = made(engine)
        (held,) = {engine._runner._casts}
        taken, address = engine.memory().casts, held._address
        assert taken >= sum(2 * m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
        inside: list[int] = []

        def release() -> None:
            engine.release()
            inside.append(engine.memory().casts)

        engine.generate(PROMPTS, SAMPLED, on_step=release)
        assert set(inside) == {taken}, "given back while steps read them"
        engine.release()
        assert engine.memory().casts == 0
        assert made(engine) == expected
        assert (engine.memory().casts, held._address) == (taken, address)


def test_without_memory_for_them_every_step_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    expected = cast_in_every_step(model, monkeypatch)

    class NoneLeft(HostBacking):
        def grow(self, nbytes: int) -> bool:
            return left and super().grow(nbytes)

    left = True
    monkeypatch.setattr(runner, "make_backing", lambda nbytes, device: NoneLeft(nbytes))
    with under_autocast(model) as engine:
        assert made(engine) == expected
        engine.release()
        left = False
        assert made(engine) == expected
        assert engine.memory().casts == 0
        left = True
        assert made(engine) == expected
        assert engine.memory().casts > 0


def test_products_that_the_model_runs_outside_of_autocast_are_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    mlp = type(model.model.layers[0].mlp)
    written = mlp.forward

    def in_float32(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return written(self, x.float())

    monkeypatch.setattr(mlp, "forward", in_float32)
    expected = cast_in_every_step(model, monkeypatch)
    with under_autocast(model) as engine:
        assert made(engine) == expected
        assert type(engine._runner.shadow.model.layers[0].mlp.up_proj) is not casts.CastLinear
        assert type(engine._runner.shadow.model.layers[0].self_attn.q_proj) is casts.CastLinear


def test_other_models_are_left_alone() -> None:
    for model in (build("llama"), build("llama").bfloat16()):
        with flatbed.Engine(model, capacity="64 blocks") as engine:
            assert engine._runner._casts is None
            assert not any(type(m).__module__ == casts.__name__ for m in engine._runner.shadow.modules())
    model = build("llama").bfloat16()
    with under_autocast(model) as engine:
        assert engine._runner._casts is None
