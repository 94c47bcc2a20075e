"""Greedy tokens are those of `generate`, whatever the capacity, token budget, schedule, batch and order."""

from __future__ import annotations

import random

import pytest
from families import VOCABULARY
from tiny import assert_idle, draw_prompts, expected, samples_of, shared, tokens_of

import flatbed

# 1 to 300 tokens mixed; around the ends of blocks of 16 and of the window of 24.
LENGTHS = (1, 300, 2, 17, 150, 16, 31, 5, 64, 25, 100, 33)
NEW = 20
PROMPTS = draw_prompts(LENGTHS, seed=3)
LONGEST = max(LENGTHS) + NEW - 1  # positions of the largest request
SMALLEST = -(-LONGEST // 16)
GREEDY = flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def run(family: str, prompts: list[list[int]], params: object = GREEDY, **settings: object) -> list[list[int]]:
    """Tokens of one call with a fresh engine, whose books must balance afterwards."""
    with flatbed.Engine(shared(family), **settings) as engine:
        outputs = engine.generate(prompts, params)
        assert [output.error for output in outputs] == [None] * len(prompts)
        assert_idle(engine)
        return tokens_of(outputs)


@pytest.mark.parametrize("schedule", ["fifo", "prefill_first"])
@pytest.mark.parametrize("budget", [1, 7, 64, 8192])
def test_token_budgets_and_schedules(budget: int, schedule: str) -> None:
    settings = {"token_budget": budget, "schedule": schedule, "block_size": 16, "capacity": "40 blocks"}
    assert run("llama", PROMPTS, **settings) == expected("llama", PROMPTS, NEW)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("budget", [1, 7, 64, 8192])
def test_token_budgets_with_windows_smaller_than_the_prompts(budget: int, family: str) -> None:
    schedule = "prefill_first" if budget in (7, 8192) else "fifo"
    settings = {"token_budget": budget, "schedule": schedule, "block_size": 16, "capacity": f"{SMALLEST} blocks"}
    assert run(family, PROMPTS, **settings) == expected(family, PROMPTS, NEW)


@pytest.mark.parametrize(
    "capacity",
    [f"{SMALLEST} blocks", f"{LONGEST} tokens", f"{SMALLEST + 1} blocks", "64 blocks", "1 GiB", "auto", "90%"],
)
@pytest.mark.parametrize("schedule", ["fifo", "prefill_first"])
def test_capacities_from_the_smallest_that_fits_to_nearly_all_memory(capacity: str, schedule: str) -> None:
    assert run("llama", PROMPTS, capacity=capacity, schedule=schedule, block_size=16) == expected("llama", PROMPTS, NEW)


def test_one_block_less_than_the_smallest_refuses_the_longest_alone() -> None:
    with flatbed.Engine(shared("llama"), capacity=f"{SMALLEST - 1} blocks", block_size=16) as engine:
        with pytest.warns(flatbed.FlatbedWarning, match="1 of 12 requests failed"):
            outputs = engine.generate(PROMPTS, GREEDY)
        assert isinstance(outputs[1].error, flatbed.errors.CapacityError)
        rest = [output for i, output in enumerate(outputs) if i != 1]
        assert tokens_of(rest) == [tokens for i, tokens in enumerate(expected("llama", PROMPTS, NEW)) if i != 1]
        assert_idle(engine)


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_block_sizes(block_size: int, family: str) -> None:
    blocks = -(-LONGEST // block_size) + 2
    tokens = run(family, PROMPTS, block_size=block_size, capacity=f"{blocks} blocks", token_budget=90)
    assert tokens == expected(family, PROMPTS, NEW)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_the_prompts(seed: int) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(seed).shuffle(order)
    settings = {"block_size": 16, "capacity": f"{SMALLEST + 3 * seed} blocks", "token_budget": 50}
    tokens = run("llama", [PROMPTS[i] for i in order], schedule=("fifo", "prefill_first")[seed % 2], **settings)
    everything = expected("llama", PROMPTS, NEW)
    assert tokens == [everything[i] for i in order]


@pytest.mark.parametrize("max_requests", [1, 2, 5])
def test_few_requests_at_once(max_requests: int) -> None:
    assert run("llama", PROMPTS, max_requests=max_requests, token_budget=32) == expected("llama", PROMPTS, NEW)


# ---- preemption ------------------------------------------------------------------------------------------------------

CROWD = draw_prompts((3, 12, 1, 20, 7, 9, 16, 2, 11, 5), seed=11)
LONG = 110


@pytest.mark.parametrize(
    ("family", "block_size", "schedule", "budget", "prefix_cache"),
    [
        ("llama", 4, "fifo", 4096, True),
        ("llama", 4, "prefill_first", 9, False),
        ("llama", 1, "fifo", 33, True),
        ("mistral", 8, "prefill_first", 4096, True),
        ("gemma3", 4, "fifo", 9, False),
    ],
)
def test_many_preemptions_change_nothing(
    family: str, block_size: int, schedule: str, budget: int, prefix_cache: bool
) -> None:
    wanted = expected(family, CROWD, LONG)
    assert len({token for tokens in wanted for token in tokens}) > 20, "the model does not wander; the test says little"
    smallest = -(-(20 + LONG - 1) // block_size)
    with flatbed.Engine(
        shared(family),
        capacity=f"{smallest + 1} blocks",
        block_size=block_size,
        schedule=schedule,
        token_budget=budget,
        prefix_cache=prefix_cache,
    ) as engine:
        params = flatbed.SamplingParams(max_new_tokens=LONG, ignore_eos=True)
        outputs = engine.generate(CROWD, params, on_step=engine._scheduler.check)
        assert tokens_of(outputs) == wanted
        assert engine.stats().preemptions > 20
        assert_idle(engine)


def test_preempted_twins_and_samples_change_nothing() -> None:
    prompts = [CROWD[1]] * 5 + [CROWD[3]] * 3 + [CROWD[4]]
    wanted = expected("llama", prompts, LONG)
    params = [flatbed.SamplingParams(max_new_tokens=LONG, ignore_eos=True, n=n) for n in (1, 1, 3, 1, 1, 2, 1, 1, 4)]
    with flatbed.Engine(shared("llama"), capacity="36 blocks", block_size=4) as engine:
        outputs = engine.generate(prompts, params, on_step=engine._scheduler.check)
        assert samples_of(outputs) == [[tokens] * one.n for tokens, one in zip(wanted, params, strict=True)]
        assert engine.stats().preemptions > 20
        assert_idle(engine)


# ---- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("budget", "blocks"), [(4096, 400), (5, 400), (64, SMALLEST)])
def test_twins_and_greedy_samples(budget: int, blocks: int, prefix_cache: bool) -> None:
    prompts = [PROMPTS[i] for i in (3, 8, 3, 0, 3, 5, 0, 6, 8, 1)]
    wanted = expected("llama", prompts, NEW)
    counts = (1, 3, 2, 1, 1, 4, 1, 2, 1, 1)
    params = [flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True, n=n) for n in counts]
    settings = {"token_budget": budget, "capacity": f"{blocks} blocks", "prefix_cache": prefix_cache, "block_size": 16}
    with flatbed.Engine(shared("llama"), **settings) as engine:
        outputs = engine.generate(prompts, params)
        assert samples_of(outputs) == [[tokens] * n for tokens, n in zip(wanted, counts, strict=True)]
        assert_idle(engine)
        stats = engine.stats()
        assert (stats.cached_tokens > 0) == prefix_cache
        if budget == 4096 and prefix_cache:  # the twins of each prompt take all but its last token from the first
            alike = {0: 2, 3: 4, 8: 4, 5: 4, 6: 2, 1: 1}
            assert stats.cached_tokens == sum((LENGTHS[i] - 1) * (count - 1) for i, count in alike.items())


@pytest.mark.parametrize("length", [1, 2, 16, 40])
def test_the_samples_of_a_prompt_all_start_once_it_is_computed(length: int) -> None:
    prompt = draw_prompts((length,), seed=9)[0]
    params = flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True, n=16)
    with flatbed.Engine(shared("llama"), block_size=16) as engine:
        [output] = engine.generate([prompt], params)
        assert samples_of([output]) == [expected("llama", [prompt], NEW) * 16]
        assert engine.stats().steps == NEW + (length > 1)
        assert output.cached_tokens == 15 * (length - 1)


def test_a_second_call_takes_prompts_from_the_cache_and_changes_nothing() -> None:
    with flatbed.Engine(shared("llama"), block_size=16) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        second = engine.generate(PROMPTS, GREEDY)
        assert tokens_of(first) == tokens_of(second) == expected("llama", PROMPTS, NEW)
        assert [output.cached_tokens for output in first] == [0] * len(PROMPTS)
        assert [output.cached_tokens for output in second] == [length - 1 for length in LENGTHS]


def test_a_conversation_that_grows_shares_its_beginning() -> None:
    """The next turn's prompt is the last prompt and its completion, both of which the cache has."""
    model = "llama"
    with flatbed.Engine(shared(model), block_size=16, token_budget=40) as engine:
        prompt = list(PROMPTS[4])
        for turn in range(3):
            [output] = engine.generate([prompt], GREEDY)
            assert output.token_ids == expected(model, [prompt], NEW)[0]
            if turn:
                assert output.cached_tokens >= len(prompt) - 3 - 16
            prompt = prompt + output.token_ids + [turn, 5, 9]


def test_prompts_that_part_at_every_place_share_what_is_equal() -> None:
    stem = PROMPTS[8]
    prompts = [stem[:at] + [(stem[at] + 1) % VOCABULARY] + stem[at + 1 :] for at in (0, 1, 15, 16, 17, 31, 32, 62, 63)]
    prompts += [stem[:at] for at in (1, 15, 16, 17, 32, 33, 63)] + [stem, stem + stem[:5]]
    for budget in (4096, 21):
        assert run("llama", prompts, block_size=16, token_budget=budget) == expected("llama", prompts, NEW)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_each_request_has_its_own_length() -> None:
    lengths = [1, 20, 3, 7, 20, 2, 1, 11, 5, 19, 4, 8]
    params = [flatbed.SamplingParams(max_new_tokens=n) for n in lengths]
    tokens = run("llama", PROMPTS, params, capacity=f"{SMALLEST} blocks", block_size=16, token_budget=48)
    assert tokens == [full[:n] for full, n in zip(expected("llama", PROMPTS, NEW), lengths, strict=True)]


def test_a_request_may_fill_the_models_positions_exactly() -> None:
    prompt = draw_prompts((500,), seed=5)
    params = flatbed.SamplingParams(max_new_tokens=12)
    for family in ("llama", "gpt2"):
        assert run(family, prompt, params) == expected(family, prompt, 12)


def test_capacity_changes_nothing_but_which_requests_run_together() -> None:
    with flatbed.Engine(shared("llama"), capacity=f"{SMALLEST} blocks", block_size=16) as small:
        small.generate(PROMPTS, GREEDY)
        assert small.memory().peak <= SMALLEST * small._pool.layout.block_bytes
    with flatbed.Engine(shared("llama"), capacity="90%", block_size=16) as large:
        large.generate(PROMPTS, GREEDY)
        needed = sum(-(-(n + NEW - 1) // 16) for n in LENGTHS)
        assert large.memory().peak <= needed * large._pool.layout.block_bytes
        assert large.stats().preemptions == 0
