"""Every supported family gives, token for token, what `generate` gives for each prompt alone."""

from __future__ import annotations

import random

import pytest
from families import FAMILIES, VOCABULARY, build, reference

import flatbed

NEW_TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
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
