"""Every supported family gives, token for token, what `generate` gives for each prompt alone."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAMILIES, UNEVEN, VOCABULARY, build, reference
from transformers.models.llama import modeling_llama

import flatbed

NEW_TOKENS = 24


@pytest.mark.parametrize("family", [*FAMILIES, *UNEVEN])
def test_greedy_equals_generate(family: str) -> None:
    model = build(family)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (1, 3, 16, 17, 40, 75)]
    prompts.append(list(prompts[4]))  # a twin
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 10, (
        "the model does not wander; the test says little"
    )
    params = flatbed.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for settings in (
        {},
        {"capacity": "12 blocks", "block_size": 16, "token_budget": 13, "schedule": "prefill_first"},
    ):
        with flatbed.Engine(model, **settings) as engine:
            outputs = engine.generate(prompts, params)
            assert [o.error for o in outputs] == [None] * len(prompts)
            assert [o.token_ids for o in outputs] == expected, settings
            engine._scheduler.check()


def test_a_decoder_that_calls_another_function_than_the_one_we_know_is_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward may read as we know it and call another function of that name: one that somebody has put there."""
    model = build("llama")
    prompt = list(range(20))
    usual = reference(model, prompt, 8)
    rotate = modeling_llama.apply_rotary_pos_emb

    def backwards(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(q, k, cos, -2.0 * sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    expected = reference(model, prompt, 8)
    assert expected != usual
    with flatbed.Engine(model) as engine:
        assert engine._runner.fusions["decoder-layer"] == 0
        assert engine.generate([prompt], flatbed.SamplingParams(max_new_tokens=8))[0].token_ids == expected
