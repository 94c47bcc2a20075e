"""The sampling kernels against Transformers' processors and the torch sampler, under Triton's interpreter.

The same runs compiled, in bfloat16 too, in tests/gpu/test_sampling_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # The variable counts when a kernel is defined: setting it here would take the compiler from the tests in tests/gpu.
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from compile_kernels import compiled
from drawing import Rows, check, processed, random_params, random_rows
from families import VOCABULARY, build
from transformers import GenerationConfig

import flatbed
from flatbed.model import steps
from flatbed.sampling.sampler import Part

Params = flatbed.SamplingParams


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert compiled("sampling", tmp_path) == 8


# ---- against Transformers' processors and the torch sampler ----------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.float32),
        (2, torch.float16),
        (33, torch.bfloat16),
        (97, torch.float32),
        (513, torch.float16),
        (2049, torch.bfloat16),
        (5003, torch.float32),
    ],
)
def test_rows_of_mixed_parameters(vocabulary: int, dtype: torch.dtype) -> None:
    count = 8
    rows = random_rows(count, vocabulary, seed=vocabulary, dtype=dtype)
    out, uniform = rows.on_device(), rows.uniform()
    check(rows, out, uniform)
    theirs = random_rows(count, vocabulary, seed=vocabulary, dtype=dtype).by_torch()
    for i in range(count):
        ends = processed(rows, i).exp().cumsum(-1)
        near = bool(((ends - float(uniform[i])).abs() < 1e-5).any())
        assert near or int(out[i, 0]) == int(theirs.tokens[i]), (i, rows.params[i])


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=1.0, top_p=0.9),
        Params(temperature=1.0, top_p=0.05),
        Params(temperature=1.0, top_p=0.9999, repetition_penalty=1.2),
        Params(temperature=1.0, top_k=9000, top_p=0.7),
        Params(temperature=1.0, min_p=0.6),
        Params(temperature=1.0, min_p=0.01, top_p=0.99),
        Params(temperature=1.0, top_k=20_010),
    ],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_what_is_kept_is_more_than_the_first_list(params: Params, spread: float) -> None:
    """With little spread thousands of tokens are kept, which takes further lists, and lists of several tiles."""
    logits = torch.randn(2, 20_011, generator=torch.Generator().manual_seed(3)) * spread
    rows = Rows(logits, [replace(params, seed=i) for i in range(2)], [[5, 7, 20_010]] * 2)
    check(rows, rows.on_device(), rows.uniform())


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(4)) * 3
    base = Params(temperature=temperature)
    asked: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.501},
        {"min_p": 0.5},
        {"top_k": 50, "top_p": 0.91, "min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "top_p": 0.3007},
    ]
    # The sampler's limits: at the first the most probable token is certain, at the other all are alike.
    clipped = replace(base, temperature=min(max(temperature, 1e-20), 1e20))
    rows = Rows(logits, [replace(clipped, **a) for a in asked], [[1, 2, 3]] * 6)
    out = rows.on_device()
    for i in range(6):
        wanted = processed(rows, i)
        token = int(out[i, 0])
        assert wanted[token] > -torch.inf
        if temperature < 1e-5:
            assert token == int(wanted.argmax())
        else:
            kept = int((wanted > -torch.inf).sum())
            logprob = float(out[i, 2:3].clone().view(torch.float32))
            assert logprob == pytest.approx(-np.log(kept), abs=1e-4)


# ---- the kept set ----------------------------------------------------------------------------------------------------


def check_each_kept(logits: torch.Tensor, params: Params, prompt: list[int]) -> int:
    """Every token that Transformers keeps is what the random number in the middle of its share gives; returns how many
    are kept."""
    wanted = processed(Rows(logits[None], [params], [prompt]), 0).exp()
    kept = (wanted > 1e-7).nonzero()[:, 0]
    uniform = (wanted.cumsum(-1) - wanted / 2)[kept].numpy()
    count = len(kept)
    rows = Rows(logits[None].repeat(count, 1), [params] * count, [prompt] * count)
    out = rows.on_device(uniform)
    check(rows, out, uniform)
    assert out[:, 0].tolist() == kept.tolist()
    return count


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=1.0, top_k=1),
        Params(temperature=1.0, top_k=3),
        Params(temperature=1.0, top_k=8),
        Params(temperature=1.0, top_p=1e-9),
        Params(temperature=1.0, top_p=0.31),
        Params(temperature=1.0, top_p=0.77),
        Params(temperature=1.0, top_p=0.9),
        Params(temperature=1.0, min_p=0.99),
        Params(temperature=1.0, top_k=7, top_p=0.5),
        Params(temperature=0.5, top_k=7, top_p=0.95, min_p=0.3),
        Params(temperature=1.0, top_k=8, repetition_penalty=2.0),
        Params(temperature=1.0, top_p=0.8, repetition_penalty=0.5),
    ],
)
def test_of_equal_tokens_those_stay_that_transformers_keeps(params: Params) -> None:
    """Five tokens of the largest logit, five of the next, in places all over the vocabulary."""
    where = torch.randperm(400, generator=torch.Generator().manual_seed(5))
    logits = torch.full((400,), -20.0)
    logits[where[:5]], logits[where[5:10]] = 2.0, 1.25
    assert 1 <= check_each_kept(logits, params, [int(where[0]), int(where[6]), int(where[30])]) <= 10


@pytest.mark.parametrize("vocabulary", [1, 2, 7])
def test_tiny_vocabularies(vocabulary: int) -> None:
    draw = random.Random(vocabulary)
    for case in range(4):
        made = torch.Generator().manual_seed(case)
        logits = torch.randint(0, 3, (vocabulary,), generator=made).float()  # ties everywhere
        params = replace(random_params(draw, vocabulary), temperature=1.0)
        check_each_kept(logits, params, [0])


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    """Fewer tokens have a probability than top-k would keep."""
    logits = torch.full((3000,), -torch.inf)
    logits[[7, 2047, 2048, 2999]] = torch.tensor([1.0, 1.2, 0.9, 1.1])
    asked: list[dict[str, Any]] = [
        {"top_k": 10}, {"top_k": 10, "top_p": 0.99}, {"top_p": 0.999}, {"min_p": 0.01}, {"top_k": 10, "top_p": 0.3}
    ]  # fmt: skip
    for one in asked:
        count = check_each_kept(logits, Params(temperature=1.0, **one), [0])
        assert count == (2 if one.get("top_p") == 0.3 else 4)
    assert check_each_kept(logits, Params(temperature=1.0, repetition_penalty=3.0), [7, 8, 2999]) == 4


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((100,), -50.0)
    logits[10:14], logits[20:24] = 0.0, -0.0
    for params in (Params(temperature=1.0, top_k=2), Params(temperature=1.0, top_p=0.6)):
        assert check_each_kept(logits, params, [0]) == (8 if params.top_k else 5)


# ---- what is not finite ----------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    bad = [1, 2, 5]
    rows = random_rows(6, 3000, seed=9)
    rows.logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)) * 2
    alone = rows.on_device()
    assert alone[:, 1].tolist() == [1] * 6
    for poison in (torch.nan, torch.inf, -torch.inf):
        broken = random_rows(6, 3000, seed=9)
        broken.logits = rows.logits.clone()
        for at in bad:
            broken.logits[at, slice(None) if poison == -torch.inf else 17 * at + 3] = poison
        out = broken.on_device()
        assert out[:, 1].tolist() == [0 if i in bad else 1 for i in range(6)]
        assert torch.equal(out[[0, 3, 4]], alone[[0, 3, 4]])
        assert out[bad, 0].tolist() == [0] * 3
        assert broken.by_torch().finite.tolist() == out[:, 1].bool().tolist()


def test_a_penalty_may_make_logits_infinite() -> None:
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(2)).abs() + 1
    tiny = Params(repetition_penalty=1e-39)
    rows = Rows(logits, [tiny, replace(tiny, temperature=1.0, top_p=0.9), Params()], [[1, 2], [3, 4], [5]])
    assert rows.on_device()[:, 1].tolist() == [0, 0, 1]
    assert Rows(logits, rows.params, rows.prompts).by_torch().finite.tolist() == [False, False, True]


# ---- the repetition penalty's history --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [Params(), Params(temperature=1.5), Params(temperature=1.5, top_k=30, top_p=0.9)])
def test_each_token_is_added_to_what_was_seen(params: Params) -> None:
    """Steps in which nothing but the kernel tells the next step what was drawn; sequences hear of it for the check."""
    vocabulary = 70
    params = replace(params, repetition_penalty=1.7, seed=3)
    mixed = [params, replace(params, repetition_penalty=1.0), replace(params, repetition_penalty=0.8)]
    rows = Rows(torch.zeros(3, vocabulary), mixed, [[3, 64, 64, 69], [5], [1, 2, 31, 32]], numbers=[2, 0, 5])
    made = torch.Generator().manual_seed(6)
    for _ in range(6):
        rows.logits = torch.randn(3, vocabulary, generator=made) * 2
        uniform = rows.uniform()
        histories = [list(one.output) for one in rows.sampled]
        for one in rows.sampled:
            one.output = one.output[:1]  # the CPU is behind: the kernels have to remember
        out = rows.on_device(uniform)
        for one, history in zip(rows.sampled, histories, strict=True):
            one.output = history
        check(rows, out, uniform)
        for i, one in enumerate(rows.sampled):
            one.output.append(int(out[i, 0]))
        bits = rows.sampler.seen.bits
        assert bits is not None
        for i in (0, 2):
            have = rows.sampler.seen.of(torch.tensor([rows.numbers[i]]), vocabulary)[0].nonzero()[:, 0].tolist()
            assert have == sorted(set(rows.sampled[i].prompt + rows.sampled[i].output))
        assert not bits[0].any(), "a row without a penalty has no history"


def test_a_row_that_changes_hands_starts_from_its_own_prompt() -> None:
    rows = Rows(torch.zeros(1, 70), [Params(repetition_penalty=2.0)], [[1, 2, 3]])
    rows.on_device()
    rows.sampled[0].prompt = [40, 41]
    rows.sampler.set_row(rows.sampled[0], rows.params[0], 0)
    rows.sampled[0].output = [7]  # preempted after its first token
    token = int(rows.on_device()[0, 0])
    assert rows.sampler.seen.of(torch.tensor([0]), 70)[0].nonzero()[:, 0].tolist() == sorted({40, 41, 7, token})


def test_memory_for_what_was_seen_follows_the_rows_that_need_it() -> None:
    vocabulary = 100
    sampler = Rows(torch.zeros(300, vocabulary), [Params()] * 300, [[1]] * 300).sampler
    rows = random_rows(1, vocabulary, seed=0)
    assert sampler.seen.bits is None
    for number, least, most in ((0, 1, 16), (9, 10, 16), (200, 201, 256)):
        one = rows.sampled[0]
        one.row = number
        sampler.set_row(one, Params(repetition_penalty=2.0), 0)
        sampler.seen.hold(np.array([number]), [one], vocabulary)
        assert sampler.seen.bits is not None
        assert least <= len(sampler.seen.bits) <= most
        assert sampler.seen.bits.shape[1] == 4
    for number in (0, 9, 200):
        held = sampler.seen.of(torch.tensor([number]), vocabulary)[0].nonzero()[:, 0].tolist()
        assert held == sorted(set(rows.sampled[0].prompt)), "growing loses nothing"


# ---- a row by itself -------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = random_rows(6, 5003, seed=12)
    together = rows.on_device()
    backwards = Rows(rows.logits.flip(0), rows.params[::-1], rows.prompts[::-1])
    assert torch.equal(backwards.on_device().flip(0), together)
    for i in range(6):
        alone = Rows(rows.logits[i : i + 1], [rows.params[i]], [rows.prompts[i]])
        assert torch.equal(alone.on_device()[0], together[i]), rows.params[i]


def test_rows_that_ask_for_nothing_are_drawn_by_the_plain_kernels_alone() -> None:
    rows = random_rows(10, 3000, seed=13)
    plain = [i for i in range(10) if i % 2]
    for i in plain:
        rows.params[i] = Params(temperature=float(i % 3), seed=i)
    mixed = Rows(rows.logits, rows.params, rows.prompts).on_device()
    only = Rows(rows.logits[plain], [rows.params[i] for i in plain], [rows.prompts[i] for i in plain])
    assert only.sampler.device_parameters(*only.sampled_rows()).processing is None
    assert torch.equal(only.on_device(), mixed[plain])


# ---- steps -----------------------------------------------------------------------------------------------------------


class _OnTheCPU(steps._InTheAir):
    """A flight whose results need not travel."""

    def __init__(self, plan: Any, out: torch.Tensor, wanted: bool, needs_history: bool) -> None:
        self.plan, self.needs_history, self._wanted = plan, needs_history, wanted
        self._host = out.clone()
        self._done = type("Done", (), {"synchronize": lambda self: None})()


STEPPED: list[Any] = [
    Params(max_new_tokens=9, temperature=1.0, seed=1),
    Params(max_new_tokens=7, repetition_penalty=1.6),
    Params(max_new_tokens=9, temperature=1.3, repetition_penalty=1.4, top_p=0.9, seed=2, n=2, logprobs=True),
    Params(max_new_tokens=8, temperature=0.9, top_k=20, seed=3),
    Params(max_new_tokens=8, temperature=2.0, min_p=0.05, seed=4),
    GenerationConfig(max_new_tokens=7, no_repeat_ngram_size=2, do_sample=True, temperature=1.5, pad_token_id=0),
    Params(max_new_tokens=8),
]


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(steps, "_InTheAir", _OnTheCPU)
    model = build("llama")

    def make(ahead: bool, processes: bool = True, **settings: Any) -> flatbed.Engine:
        made = flatbed.Engine(model, **{"capacity": "64 blocks", "block_size": 16, **settings})
        if ahead:
            made._steps = steps.DeviceSteps(made._runner, made._sampler)
            made._steps.processes = processes
            made._steps._graphs.refused = "there is no CUDA device"
        return made

    return make


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(8)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))] for _ in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": "24 blocks", "block_size": 2, "token_budget": 20},
        {"processes": False, "capacity": "24 blocks", "block_size": 2},
    ],
)
def test_steps_ahead_of_the_cpu_draw_what_the_torch_sampler_draws(make_engine: Any, settings: dict[str, Any]) -> None:
    prompts = _prompts(len(STEPPED))
    with make_engine(False) as behind:
        wanted = behind.generate(prompts, STEPPED)
    with make_engine(True, **settings) as ahead:
        outputs = ahead.generate(prompts, STEPPED)
        ahead._scheduler.check()
        assert ahead.stats().preemptions > 0
    for output, theirs in zip(outputs, wanted, strict=True):
        for sample, other in zip(output.samples, theirs.samples, strict=True):
            assert sample.token_ids == other.token_ids
            if other.logprobs is not None:
                assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert sample.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)


@pytest.mark.parametrize("special", [False, True])
def test_only_transformers_processors_stop_the_run_ahead(make_engine: Any, special: bool) -> None:
    params: Any = Params(max_new_tokens=6, temperature=1.0, top_k=5, repetition_penalty=1.3)
    if special:
        params = GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=2, pad_token_id=0)
    under_way = []
    with make_engine(True) as engine:
        engine.generate(_prompts(2), params, on_step=lambda: under_way.append(len(engine._flights)))
    assert (max(under_way[1:]) > 0) is not special


def test_a_step_that_the_torch_sampler_failed_in_is_launched_again_from_the_same_tokens(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = GenerationConfig(max_new_tokens=8, no_repeat_ngram_size=2, pad_token_id=0)
    asked = [Params(max_new_tokens=8, repetition_penalty=1.5), special, Params(max_new_tokens=8)]
    prompts = _prompts(3)
    with make_engine(True) as engine:
        wanted = [o.token_ids for o in engine.generate(prompts, asked)]
        failed = []
        sample = engine._sampler.sample

        def fails_now_and_then(plan: Part, logits: torch.Tensor) -> Any:
            if len(failed) in (1, 5):
                failed.append(True)
                raise torch.OutOfMemoryError("a test")
            failed.append(False)
            return sample(plan, logits)

        monkeypatch.setattr(engine._sampler, "sample", fails_now_and_then)
        assert [o.token_ids for o in engine.generate(prompts, asked)] == wanted
    assert sum(failed) == 2
