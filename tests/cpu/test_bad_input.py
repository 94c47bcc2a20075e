"""Bad input, broken models, interruptions: what is wrong is named, what is beside it goes on, nothing stays behind."""

from __future__ import annotations

import copy
import math
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCABULARY, build, reference
from tiny import (
    assert_idle,
    byte_tokenizer,
    changes,
    draw_prompts,
    expected,
    logits_after,
    scripted,
    shared,
    snapshot,
    tokens_of,
)
from torch import nn
from transformers import GenerationConfig

import flatbed
from flatbed.errors import (
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    EngineClosedError,
    FlatbedError,
    InvalidRequestError,
    ModelForwardError,
    NonFiniteLogitsError,
    RequestError,
    UnsupportedModelError,
)

Params = flatbed.SamplingParams
PROMPTS = draw_prompts((40, 3, 17, 1), seed=12)
NEW = 12
GREEDY = Params(max_new_tokens=NEW, ignore_eos=True)
NAN, INF = math.nan, math.inf


def good() -> list[list[int]]:
    return expected("llama", PROMPTS, NEW)


def beside_good_ones(prompt: Any, params: Any = GREEDY, **settings: Any) -> flatbed.Output:
    """Runs it in the middle of good requests, which must give what they give without it. Returns its output."""
    with flatbed.Engine(shared("llama"), **settings) as engine:
        prompts = [*PROMPTS[:2], prompt, *PROMPTS[2:]]
        each = [GREEDY, GREEDY, params, GREEDY, GREEDY]
        names = ["a", "b", "the bad one", "c", "d"]
        told: list[flatbed.Output] = []
        with pytest.warns(flatbed.FlatbedWarning, match=r"1 of 5 requests failed: .*the bad one"):
            outputs = engine.generate(prompts, each, request_ids=names, on_output=told.append)
        assert sorted(output.request_id for output in told) == sorted(names)
        bad = outputs.pop(2)
        assert tokens_of(outputs) == good()
        assert [output.error for output in outputs] == [None] * 4
        assert_idle(engine)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()
    assert bad.request_id == "the bad one"
    assert (bad.finish_reason, bad.token_ids, bad.finished) == ("error", [], True)
    assert isinstance(bad.error, RequestError)
    assert isinstance(bad.error, ValueError)
    assert bad.error.request_id == "the bad one"
    assert "'the bad one'" in str(bad.error)
    assert bad.timings.finished is not None
    assert bad.timings.started is None
    return bad


# ---- a request that makes no sense -----------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty list": ([], "is empty"),
    "empty string": ("", "is empty"),
    "empty tuple": ((), "is empty"),
    "empty tensor": (torch.tensor([], dtype=torch.long), "is empty"),
    "negative id": ([3, -1, 5], "token id -1 at position 1"),
    "id beyond the vocabulary": ([3, 5, VOCABULARY], f"token id {VOCABULARY} at position 2 .*0 to {VOCABULARY - 1}"),
    "huge id": ([10**30], "outside of the vocabulary"),
    "a float": ([1, 2.0], "whole numbers, got 2.0 at position 1"),
    "NaN": ([NAN], "whole numbers, got nan"),
    "a bool": ([True], "whole numbers, got True"),
    "a string among ids": ([1, "2"], "whole numbers, got '2'"),
    "None": (None, "NoneType"),
    "a number": (7, "int"),
    "a set": ({1, 2}, "set"),
    "bytes": (b"abc", "got bytes"),
    "one message": ({"role": "user", "content": "hello"}, "got dict; a chat is a list of messages"),
    "a batch of one": ([[1, 2]], "whole numbers"),
    "a tensor of two dimensions": (torch.tensor([[1, 2]]), "whole numbers"),
    "text without a tokenizer": ("hello", "needs a tokenizer"),
    "a chat without a tokenizer": ([{"role": "user", "content": "hello"}], "needs a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_refuses_that_request_alone(name: str) -> None:
    prompt, reason = BAD_PROMPTS[name]
    error = beside_good_ones(prompt).error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "prompt"
    assert "prompt" in str(error)
    with pytest.raises(InvalidRequestError, match=reason):
        raise error


@pytest.mark.parametrize(
    "kind", [tuple, torch.tensor, np.array, lambda ids: [np.int64(i) for i in ids], lambda ids: list(torch.tensor(ids))]
)
def test_prompts_may_be_sequences_tensors_and_arrays(kind: Callable[[list[int]], Any]) -> None:
    with flatbed.Engine(shared("llama")) as engine:
        assert tokens_of(engine.generate([kind(prompt) for prompt in PROMPTS], GREEDY)) == good()


def test_a_prompt_that_the_caller_changes_later_is_not_changed_here() -> None:
    prompt = list(PROMPTS[0])
    with flatbed.Engine(shared("llama")) as engine:
        output = engine.submit(prompt, GREEDY)
        prompt[:] = [1, 2]
        while engine.has_work:
            engine.step()
    assert output.token_ids == good()[0]


BAD_FIELDS: list[tuple[str, Any]] = [
    *(("max_new_tokens", value) for value in (0, -1, 1.5, 2.0, NAN, INF, "8", None, True)),
    *(("temperature", value) for value in (-0.1, NAN, INF, -INF, "1", None, True)),
    *(("top_k", value) for value in (-1, 1.5, NAN, None, "5", 10**30)),
    *(("top_p", value) for value in (0, 0.0, -0.5, 1.0001, 2, NAN, INF, None, "0.9")),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, None)),
    *(("repetition_penalty", value) for value in (0, -1.0, NAN, INF, None)),
    *(("n", value) for value in (0, -2, 1.5, NAN, None, True, 10**9)),
    *(("seed", value) for value in (-1, 2**64, 1.5, "7", True)),
    *(("eos_token_ids", value) for value in ("2", (1, "2"), 3.5, (1.5,), (-1,), (10**30,), True)),
    *(("stop", value) for value in (5, ("a", 3), ("",), [b"x"])),
    *(("ignore_eos", value) for value in ("no", 1, None)),
    *(("logprobs", value) for value in ("yes", 5, None)),
]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_bad_field_refuses_that_request_alone_and_is_named(sampled: bool) -> None:
    """All of them at once, between good ones."""
    base = Params(max_new_tokens=4, temperature=1.0, seed=1) if sampled else Params(max_new_tokens=4)
    params = [replace(base, **{field: value}) for field, value in BAD_FIELDS]
    with flatbed.Engine(shared("llama")) as engine:
        with pytest.warns(flatbed.FlatbedWarning, match=rf"{len(params)} of {len(params) + 4} requests failed"):
            outputs = engine.generate([*PROMPTS, *[[1, 2]] * len(params)], [*[GREEDY] * 4, *params])
        assert tokens_of(outputs[:4]) == good()
        for output, (field, value) in zip(outputs[4:], BAD_FIELDS, strict=True):
            assert isinstance(output.error, InvalidRequestError), (field, value)
            assert (output.error.field, output.error.request_id) == (field, output.request_id), (field, value)
            assert f"{field}: must be" in str(output.error)
            assert output.finish_reason == "error"
        assert_idle(engine)


def test_a_bad_field_is_told_with_its_value() -> None:
    bad = beside_good_ones([1], replace(GREEDY, top_p=1.5))
    assert str(bad.error) == "request 'the bad one': top_p: must be a number above 0 and at most 1, got 1.5"


def test_stop_strings_without_a_tokenizer_refuse_that_request_alone() -> None:
    error = beside_good_ones([1], replace(GREEDY, stop="x")).error
    assert isinstance(error, InvalidRequestError)
    assert error.field == "stop"


def test_values_at_the_edges_are_allowed() -> None:
    fine = [
        Params(max_new_tokens=1),
        Params(max_new_tokens=2, temperature=0),
        Params(max_new_tokens=2, temperature=1, top_p=1, min_p=0, top_k=0, repetition_penalty=1, seed=0),
        Params(max_new_tokens=2, temperature=1e-300, top_p=1e-300, min_p=1, seed=2**64 - 1),
        Params(max_new_tokens=2, temperature=1e300, top_k=2**31 - 1),
        Params(max_new_tokens=2, eos_token_ids=[5, 6]),
        Params(max_new_tokens=2, eos_token_ids=5),
        Params(max_new_tokens=2, repetition_penalty=1e-3, temperature=1.0),
        Params(max_new_tokens=np.int64(2), temperature=np.float32(0.5), eos_token_ids=[np.int32(5)], n=np.int8(1)),
    ]
    with flatbed.Engine(shared("llama")) as engine:
        outputs = engine.generate([PROMPTS[0]] * len(fine), fine)
    assert [output.error for output in outputs] == [None] * len(fine)
    assert [len(output.token_ids) for output in outputs][:5] == [1, 2, 2, 2, 2]


def test_many_refusals_are_one_warning_that_names_the_first() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        with pytest.warns(
            flatbed.FlatbedWarning, match=r"5 of 6 requests failed: .*'0'.*'1'.*'2'.* \(and 2 more\)"
        ) as told:
            engine.generate([[]] * 5 + PROMPTS[:1], GREEDY)
        assert len(told) == 1
        assert told[0].filename == __file__, "the warning points at the caller"


# ---- a request that can never fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "new", "needed"), [(40, 25, 16), (57, 5, 16), (3, 60, 16), (61, 1, 16), (400, 100, 125)]
)
def test_a_request_that_can_never_fit_is_refused_at_once(prompt: int, new: int, needed: int) -> None:
    """15 blocks of 4: prompt and new tokens but the last need room."""
    settings = {"capacity": "15 blocks", "block_size": 4}
    params = Params(max_new_tokens=new)
    bad = beside_good_ones(draw_prompts((prompt,), seed=1)[0], params, **settings)
    assert isinstance(bad.error, CapacityError)
    assert (bad.error.needed, bad.error.available) == (needed, 15)
    for told in (f"{needed} blocks", "has 15", "capacity", "'15 blocks'", f"max_new_tokens={new}", f"{prompt} prompt"):
        assert told in str(bad.error)
    with flatbed.Engine(shared("llama"), **settings) as engine:
        output = engine.submit(draw_prompts((prompt,), seed=1)[0], params)
        assert output.error is not None, "at once: no step was made"
        assert engine.stats().steps == 0


@pytest.mark.parametrize(("prompt", "new"), [(41, 20), (60, 1), (1, 60), (21, 40)])
def test_a_request_that_just_fits_runs(prompt: int, new: int) -> None:
    prompts = draw_prompts((prompt,), seed=1)
    with flatbed.Engine(shared("llama"), capacity="15 blocks", block_size=4) as engine:
        assert tokens_of(engine.generate(prompts, Params(max_new_tokens=new))) == expected("llama", prompts, new)


@pytest.mark.parametrize(("prompt", "new"), [(500, 13), (513, 1), (1, 512), (10, 10**30)])
def test_a_request_beyond_the_models_positions_is_refused_at_once(prompt: int, new: int) -> None:
    bad = beside_good_ones(draw_prompts((prompt,), seed=1)[0], Params(max_new_tokens=new))
    assert isinstance(bad.error, CapacityError)
    assert (bad.error.needed, bad.error.available) == (prompt + new, 512)
    assert "512 positions" in str(bad.error)
    assert "max_new_tokens" in str(bad.error)


def test_one_prompt_too_long_does_not_stop_the_loop_for_everyone() -> None:
    """Also when every request is bad, and when good ones come after it in the queue."""
    with flatbed.Engine(shared("llama"), capacity="64 tokens") as engine:
        with pytest.warns(flatbed.FlatbedWarning):
            outputs = engine.generate(draw_prompts((100, 200, 300)), GREEDY)
        assert all(isinstance(output.error, CapacityError) for output in outputs)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"capcity": "64 blocks"},
            ["capcity", "capacity", "token_budget", "schedule", "attention", "block_size", "seed"],
        ),
        ({"num_blocks": 4}, ["num_blocks", "capacity", "max_requests", "prefix_cache"]),
        ({"schedule": "lifo"}, ["lifo", "fifo", "prefill_first"]),
        ({"schedule": None}, ["None", "fifo", "prefill_first"]),
        ({"attention": "sdpa"}, ["sdpa", "auto", "torch"]),
        ({"capacity": "lots"}, ["lots", "64 blocks", "20000 tokens", "8 GiB", "50%", "auto"]),
        ({"capacity": 64}, ["64", "64 blocks", "auto"]),
        ({"token_budget": 0}, ["token_budget", "at least 1", "0"]),
        ({"token_budget": "8"}, ["token_budget", "'8'"]),
        ({"token_budget": 8.0}, ["token_budget", "8.0"]),
        ({"block_size": 0}, ["block_size", "at least 1"]),
        ({"max_requests": -1}, ["max_requests", "at least 1"]),
        ({"seed": -1}, ["seed", "at least 0"]),
        ({"seed": None}, ["seed", "None"]),
        ({"prefix_cache": "no"}, ["prefix_cache", "True or False", "'no'"]),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_lists_what_is_known(
    settings: dict[str, Any], told: list[str]
) -> None:
    model = build("llama")
    for make in (flatbed.Engine, flatbed.install):
        if make is flatbed.install and "seed" in settings:
            continue  # there a seed belongs to a call
        with pytest.raises(ConfigError) as raised:
            make(model, **settings)
        assert isinstance(raised.value, ValueError)
        for word in told:
            assert word in str(raised.value)
    assert "generate_batch" not in vars(model)


def test_what_is_no_model_or_no_tokenizer_is_told_at_once() -> None:
    pipeline = SimpleNamespace(model=shared("llama"))
    for model, told in (("gpt2", "str is not a model.*from_pretrained"), (None, "NoneType"), (pipeline, "its .model")):
        for make in (flatbed.Engine, flatbed.install):
            with pytest.raises(UnsupportedModelError, match=told):
                make(model)
    processor = SimpleNamespace(tokenizer=byte_tokenizer())
    for tokenizer, told in (("gpt2", "got str"), (processor, "its .tokenizer"), (byte_tokenizer().decode, "got")):
        with pytest.raises(ConfigError, match=told):
            flatbed.Engine(shared("llama"), tokenizer)


def test_an_engine_says_that_it_cannot_be_copied_or_pickled() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="an Engine cannot be copied or pickled"):
                how(engine)


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    refused: list[BaseException] = []

    def intrude() -> None:
        for use in (lambda: engine.generate(PROMPTS, GREEDY), lambda: engine.submit(PROMPTS[0]), engine.step):
            try:
                use()
            except ConfigError as error:
                refused.append(error)

    def meanwhile() -> None:
        if not refused:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    with flatbed.Engine(shared("llama")) as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY, on_step=meanwhile)) == good()
        assert len(refused) == 3
        assert all("another thread drives this engine" in str(error) for error in refused)
        intrude()
        assert len(refused) == 3, "once the first is done, another may come"


def test_an_attention_backend_that_cannot_run_here_is_an_error_by_name() -> None:
    from flatbed.attention import BACKENDS

    for name, backend in BACKENDS.items():
        if not backend.availability(torch.device("cpu")).ok:
            with pytest.raises(BackendUnavailableError, match=name):
                flatbed.Engine(shared("llama"), attention=name)
    with flatbed.Engine(shared("llama"), attention="torch") as engine:
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


def test_arguments_of_a_call_that_make_no_sense_are_errors_of_the_call() -> None:
    with flatbed.Engine(shared("llama"), byte_tokenizer()) as engine:
        for arguments, told in [
            ({"prompts": "hello"}, "list of prompts"),
            ({"prompts": byte_tokenizer()(["hello", "you"])}, "BatchEncoding.*input_ids"),
            ({"prompts": PROMPTS, "sampling": [GREEDY] * 3}, "4 prompts, but 3 sampling"),
            ({"prompts": PROMPTS, "request_ids": ["a"]}, "4 prompts, but 1 request_ids"),
            ({"prompts": PROMPTS, "request_ids": ["a", "b", "a", "c"]}, "'a' is in use"),
            ({"prompts": PROMPTS, "sampling": {"max_new_tokens": 3}}, "SamplingParams, GenerationConfig"),
            ({"prompts": PROMPTS, "sampling": 0.7}, "SamplingParams, GenerationConfig"),
        ]:
            with pytest.raises(ConfigError, match=told):
                engine.generate(**arguments)
            assert_idle(engine)
        with pytest.raises(TypeError, match="max_new_tokens"):
            engine.generate(PROMPTS, max_new_tokens=3)  # type: ignore[call-arg]
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


def test_an_unknown_sampling_field_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"temprature.*max_new_tokens, temperature, top_k"):
        Params.from_mapping({"temprature": 1.0})
    with pytest.raises(TypeError, match="temprature"):
        Params(temprature=1.0)  # type: ignore[call-arg]
    merged = Params.from_mapping({"top_k": 3}, base=Params(temperature=0.5))
    assert (merged.top_k, merged.temperature) == (3, 0.5)


def test_a_request_id_can_be_used_again_once_it_is_done() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        for _ in range(2):
            outputs = engine.generate(PROMPTS, GREEDY, request_ids=["a", "b", "c", "d"])
            assert [output.request_id for output in outputs] == ["a", "b", "c", "d"]


def test_no_prompts_are_no_outputs() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        assert engine.generate([]) == []
        assert list(engine.stream([])) == []


# ---- NaN and infinity ------------------------------------------------------------------------------------------------

POISON = 13  # a token whose embedding is NaN


def clean_prompts(model: nn.Module) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts whose greedy completions do not meet the poison, and the completions."""
    for seed in range(20):
        prompts = draw_prompts((40, 3, 17, 30), seed)
        wanted = [reference(model, prompt, NEW) for prompt in prompts]
        if not any(POISON in prompt + tokens for prompt, tokens in zip(prompts, wanted, strict=True)):
            return prompts, wanted
    raise AssertionError("no such prompts")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 4, "token_budget": 9},
        {"block_size": 4, "capacity": "60 blocks", "schedule": "prefill_first"},
        {"block_size": 8, "prefix_cache": False},
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_nan_logits_end_that_request_and_spread_to_nobody(family: str, settings: dict[str, Any]) -> None:
    """Not to its neighbours, nor to those who share its beginning, nor to those who get its blocks later."""
    model = build(family)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = NAN
    clean, wanted = clean_prompts(model)
    stem = clean[0]
    bad = [[POISON], stem[:20] + [POISON], stem[:16] + [POISON] + stem[17:], [POISON] + stem, [*stem, POISON]]
    prompts = [bad[0], clean[0], bad[1], clean[1], bad[2], bad[3], clean[2], bad[4], clean[3], list(bad[2])]
    good_places = [1, 3, 6, 8]
    with flatbed.Engine(model, **settings) as engine:
        for _ in range(2):
            with pytest.warns(flatbed.FlatbedWarning, match="6 of 10"):
                outputs = engine.generate(prompts, GREEDY)
            assert [tokens_of(outputs)[i] for i in good_places] == wanted
            for i, output in enumerate(outputs):
                if i in good_places:
                    assert output.error is None
                else:
                    assert isinstance(output.error, NonFiniteLogitsError)
                    assert output.error.request_id == output.request_id
                    assert (output.finish_reason, output.token_ids) == ("error", [])
            assert_idle(engine)
        for _ in range(2):  # these get the blocks that held NaN
            assert tokens_of(engine.generate(clean, GREEDY)) == wanted


def test_a_request_that_meets_nan_on_its_way_keeps_the_tokens_it_has() -> None:
    model = build("llama")
    wanted = expected("llama", PROMPTS, NEW)
    victim = wanted[0][5]
    untouched = [i for i in range(4) if victim not in PROMPTS[i] + wanted[i][:-1]]
    assert len(untouched) >= 2
    with torch.no_grad():
        model.model.embed_tokens.weight[victim] = NAN
    with flatbed.Engine(model, block_size=4) as engine:
        with pytest.warns(flatbed.FlatbedWarning, match="NaN or infinite"):
            outputs = engine.generate([PROMPTS[0]] * 2 + PROMPTS, [replace(GREEDY, logprobs=True)] * 6)
        for output in outputs[:3]:
            assert output.token_ids == wanted[0][: wanted[0].index(victim) + 1]
            assert len(output.logprobs) == len(output.token_ids)
            assert isinstance(output.error, NonFiniteLogitsError)
            assert output.finish_reason == "error"
        for i in untouched:
            assert outputs[2 + i].token_ids == wanted[i]
        assert_idle(engine)


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize(
    "params", [Params(max_new_tokens=9), Params(max_new_tokens=9, temperature=1.0, top_p=0.9, seed=1)]
)
def test_infinite_logits_end_that_request(value: float, params: Params) -> None:
    """At the sixth token; a request that ends before it is not affected, whatever runs beside it."""
    script = [4, 5, 6, 7, 8, 9, 10, 11, 12]
    model = scripted(script, 20)
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
        model.lm_head.weight[3, 5] = value
        if math.isnan(value):  # NaN times anything is NaN: only at that position may it be read
            model.lm_head.weight[3, 5] = 3.0e38
            model.transformer.ln_f.weight[5] = 1e10
    with flatbed.Engine(model) as engine:
        with pytest.warns(flatbed.FlatbedWarning, match="1 of 2"):
            ended, fine = engine.generate([[1], [2]], [params, replace(params, max_new_tokens=5)])
        assert isinstance(ended.error, NonFiniteLogitsError)
        assert "token 5" in str(ended.error)
        assert ended.token_ids == fine.token_ids == script[:5]
        assert (fine.error, fine.finish_reason) == (None, "length")
        assert_idle(engine)


def test_logits_of_minus_infinity_are_fine_as_long_as_one_is_left() -> None:
    model = scripted([4, 5, 6], 20)
    with torch.no_grad():
        model.lm_head.weight[7:] = 0
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[8, -1] = -INF
    assert logits_after(model, [1])[0, 8] == -INF
    with flatbed.Engine(model) as engine:
        [output] = engine.generate([[1]], Params(max_new_tokens=3, temperature=1.0, seed=2, n=1, logprobs=True))
    assert output.error is None
    assert 8 not in output.token_ids
    assert all(math.isfinite(value) for value in output.logprobs)


def test_a_request_whose_processors_leave_no_token_ends_alone() -> None:
    """Greedy and sampled: with every token suppressed there is nothing to choose from."""
    nothing = {"max_new_tokens": 4, "suppress_tokens": list(range(VOCABULARY))}
    for config in (GenerationConfig(**nothing), GenerationConfig(do_sample=True, **nothing)):
        with flatbed.Engine(shared("llama")) as engine:
            with pytest.warns(flatbed.FlatbedWarning, match="1 of 3"):
                first, bad, last = engine.generate(
                    [PROMPTS[0], [5], PROMPTS[1]], [GREEDY, config, replace(GREEDY, repetition_penalty=1.0001)]
                )
            assert isinstance(bad.error, NonFiniteLogitsError)
            assert first.token_ids == good()[0]
            assert last.token_ids == good()[1]
            assert_idle(engine)


# ---- an exception in the model's forward -----------------------------------------------------------------------------


class Boom(Exception):
    pass


def failing(model: nn.Module, at: int, error: BaseException) -> Any:
    """The `at`-th forward of a layer in the middle raises. Returns the handle of the hook."""
    calls = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise error

    return model.model.layers[0].self_attn.register_forward_hook(hook)


@pytest.mark.parametrize("at", [1, 2, 6])
@pytest.mark.parametrize("settings", [{}, {"token_budget": 20, "block_size": 4}])
def test_an_exception_in_forward_is_raised_with_the_requests_of_the_batch(at: int, settings: dict[str, Any]) -> None:
    model = build("llama")
    names = ["a", "b", "c", "d"]
    with flatbed.Engine(model, **settings) as engine:
        handle = failing(model, at, Boom("out of order"))
        state = snapshot(model)
        with pytest.raises(ModelForwardError, match="Boom: out of order") as raised:
            engine.generate(PROMPTS, GREEDY, request_ids=names)
        assert isinstance(raised.value.__cause__, Boom)
        assert isinstance(raised.value, RuntimeError)
        assert isinstance(raised.value, FlatbedError)
        in_batch = raised.value.request_ids
        assert in_batch
        assert set(in_batch) <= set(names)
        assert (len(in_batch) == 4) == (not settings or at == 6)
        for name in in_batch:
            assert name in str(raised.value)
        assert changes(state, model) == []
        assert_idle(engine)
        partial = engine.partial_outputs
        assert [output.request_id for output in partial] == names
        assert [output.finish_reason for output in partial] == ["error"] * 4
        assert all("Boom: out of order" in str(output.error) for output in partial)
        for output, whole in zip(partial, good(), strict=True):
            assert output.token_ids == whole[: len(output.token_ids)]
        handle.remove()
        for _ in range(2):  # no K/V of the failed step is served
            assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


def test_an_exception_in_forward_reaches_whoever_steps_or_streams() -> None:
    model = build("llama")
    with flatbed.Engine(model) as engine:
        handle = failing(model, 3, Boom("x"))
        with pytest.raises(ModelForwardError):
            for _ in engine.stream(PROMPTS, GREEDY):
                pass
        assert_idle(engine)
        handle.remove()
        handle = failing(model, 2, Boom("x"))
        output = engine.submit(PROMPTS[0], GREEDY)
        engine.step()
        with pytest.raises(ModelForwardError):
            engine.step()
        assert output.finish_reason == "error"
        assert output.token_ids == good()[0][:1]
        assert_idle(engine)
        handle.remove()
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def check_after_interruption(engine: flatbed.Engine, model: nn.Module, state: dict[str, Any]) -> list[flatbed.Output]:
    """Nothing is left behind, the engine works; returns the partial outputs, which are beginnings of the whole ones."""
    partial = engine.partial_outputs
    assert changes(state, model) == []
    assert_idle(engine)
    for output, prompt, whole in zip(partial, PROMPTS, good(), strict=False):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == whole[: len(output.token_ids)]
        assert output.finish_reason in ("cancelled", "length", "eos", "stop")
        assert (output.finish_reason == "length") == (len(output.token_ids) == NEW)
        assert output.finished
    for _ in range(2):
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()
    assert_idle(engine)
    return partial


@pytest.mark.parametrize("callback", ["on_output", "on_step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Boom])
def test_an_exception_from_a_callback_leaves_partial_outputs(callback: str, error: type[BaseException]) -> None:
    model = build("llama")
    params = [GREEDY, replace(GREEDY, max_new_tokens=3), GREEDY, GREEDY]
    steps = []

    def interrupt(*args: Any) -> None:
        steps.append(1)
        if callback == "on_output" or len(steps) == 5:
            raise error

    with flatbed.Engine(model, byte_tokenizer()) as engine:
        state = snapshot(model)
        with pytest.raises(error):
            engine.generate(PROMPTS, params, **{callback: interrupt})
        partial = engine.partial_outputs
        lengths = [len(output.token_ids) for output in partial]
        assert lengths == ([3, 3, 3, 3] if callback == "on_output" else [5, 3, 5, 5])
        assert [output.finish_reason for output in partial] == ["cancelled", "length", "cancelled", "cancelled"]
        assert all(output.text is not None for output in partial)
        partial[1].samples[0].finish_reason = "cancelled"  # shorter than the others by its own limit
        check_after_interruption(engine, model, state)
        assert engine.partial_outputs == [], "of the last call"


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_during_a_forward(at: int) -> None:
    """The signal itself, raised while the model runs: what that step would have computed is not served later."""
    model = build("llama")
    calls = []

    def hook(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)

    with flatbed.Engine(model, block_size=4) as engine:
        handle = model.model.layers[1].register_forward_pre_hook(hook)
        state = snapshot(model)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
        assert changes(state, model) == []
        handle.remove()
        partial = check_after_interruption(engine, model, snapshot(model))
        del partial


def test_the_outputs_of_a_call_that_was_interrupted_are_those_of_that_call() -> None:
    model = build("llama")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with flatbed.Engine(model) as engine:
        engine.generate(PROMPTS, GREEDY)
        assert engine.partial_outputs == []
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:2], GREEDY, on_step=interrupt)
        assert [output.prompt_token_ids for output in engine.partial_outputs] == PROMPTS[:2]


SOURCE = str(Path(flatbed.__file__).parent)


class InterruptAtLine:
    """Raises KeyboardInterrupt at the n-th line that runs inside of Flatbed, as Ctrl-C might; counts the lines."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0
        self.where = ""

    def __enter__(self) -> InterruptAtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def test_ctrl_c_at_any_line_leaves_the_engine_whole() -> None:
    """Most of an engine's time in Python goes into its books: an interruption must not leave them half written."""
    model = build("llama")
    params = [GREEDY, replace(GREEDY, max_new_tokens=3), GREEDY, replace(GREEDY, n=2)]
    settings = {"capacity": "24 blocks", "block_size": 4, "token_budget": 30}

    def run(engine: flatbed.Engine) -> None:
        engine.release()  # lest the prefix cache makes one run shorter than another
        with interruption:
            engine.generate(PROMPTS, params)

    draw, reached = random.Random(0), 0
    with flatbed.Engine(model, byte_tokenizer(), **settings) as engine:
        for _ in range(2):
            interruption = InterruptAtLine()
            run(engine)
        lines = interruption.lines
        assert lines > 5000
        for _ in range(60):
            interruption = InterruptAtLine(draw.randrange(1, lines))
            try:
                run(engine)
            except KeyboardInterrupt:
                reached += 1
            else:
                assert interruption.where == "", "the interruption was swallowed"
            try:
                assert_idle(engine)
                for output, whole in zip(engine.partial_outputs, good(), strict=False):
                    for sample in output.samples:
                        assert sample.token_ids == whole[: len(sample.token_ids)]
                        assert sample.finish_reason is not None
                assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()
                assert_idle(engine)
            except (AssertionError, Exception) as error:
                raise AssertionError(f"after an interruption at {interruption.where}: {error!r}") from error
    assert reached > 50


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_from_another_thread_ends_that_request_alone() -> None:
    model = build("llama")
    gate, slow = threading.Event(), Params(max_new_tokens=400)
    wanted = expected("llama", PROMPTS[1:3], 400)
    with flatbed.Engine(model, byte_tokenizer()) as engine:

        def cancel() -> None:
            gate.wait(60)
            engine.cancel("second")

        thread = threading.Thread(target=cancel)
        thread.start()
        steps = []

        def on_step() -> None:
            steps.append(1)
            if len(steps) == 5:
                gate.set()
                thread.join()

        outputs = engine.generate(
            [PROMPTS[1], PROMPTS[0], PROMPTS[2]], slow, request_ids=["first", "second", "third"], on_step=on_step
        )
        assert outputs[1].finish_reason == "cancelled"
        assert outputs[1].error is None
        assert 5 <= len(outputs[1].token_ids) <= 6
        assert outputs[1].text == byte_tokenizer().decode(outputs[1].token_ids, skip_special_tokens=True)
        assert [outputs[0].token_ids, outputs[2].token_ids] == wanted
        assert_idle(engine)


def test_cancelling_ends_all_samples_waiting_or_running() -> None:
    with flatbed.Engine(shared("llama"), max_requests=2) as engine:
        outputs = [engine.submit(prompt, replace(GREEDY, n=3), request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
        for _ in range(3):
            engine.step()
        engine.cancel("0")
        engine.cancel("2")
        events = engine.step()
        ended = [(event.request_id, event.sample) for event in events if event.finish_reason == "cancelled"]
        assert sorted(ended) == [(name, sample) for name in ("0", "2") for sample in range(3)]
        assert {event.output.request_id for event in events if event.output is not None} == {"0", "2"}
        while engine.has_work:
            engine.step()
        assert [[s.finish_reason for s in o.samples] for o in (outputs[0], outputs[2])] == [["cancelled"] * 3] * 2
        assert [[s.token_ids for s in o.samples] for o in (outputs[1], outputs[3])] == [
            [good()[1]] * 3,
            [good()[3]] * 3,
        ]
        assert_idle(engine)


def test_cancelling_what_is_not_under_way_changes_nothing() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        engine.cancel("a")  # not yet there
        outputs = engine.generate(PROMPTS, GREEDY, request_ids=["a", "b", "c", "d"])
        assert tokens_of(outputs) == good()
        engine.cancel("b")  # already done; a later request may have that name
        outputs = engine.generate(PROMPTS, GREEDY, request_ids=["a", "b", "c", "d"])
        assert tokens_of(outputs) == good()


# ---- leaving a stream, closing ---------------------------------------------------------------------------------------


def test_abandoning_a_stream_cancels_what_is_under_way() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        stream = engine.stream(PROMPTS, GREEDY)
        for _ in range(6):
            next(stream)
        assert engine.has_work
        stream.close()
        assert_idle(engine)
        assert [output.finish_reason for output in engine.partial_outputs] == ["cancelled"] * 4
        stream = engine.stream(PROMPTS, GREEDY)
        next(stream)
        del stream  # nobody holds it any more
        assert_idle(engine)
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == good()


def test_a_stream_that_was_never_begun_costs_nothing() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        engine.stream(PROMPTS, GREEDY)
        assert_idle(engine)


def test_leaving_a_call_ends_nothing_that_was_submitted_before_it() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        mine = engine.submit(PROMPTS[0], GREEDY)
        for _ in engine.stream(PROMPTS[1:], GREEDY):
            break
        assert engine.has_work
        while engine.has_work:
            engine.step()
        assert mine.token_ids == good()[0]
        assert_idle(engine)


def test_a_closed_engine_says_so() -> None:
    engine = flatbed.Engine(shared("llama"))
    output = engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert output.finish_reason == "cancelled"
    assert output.token_ids == good()[0][:1]
    for use in (
        lambda: engine.generate(PROMPTS, GREEDY),
        lambda: list(engine.stream(PROMPTS, GREEDY)),
        lambda: engine.submit(PROMPTS[0], GREEDY),
        engine.step,
        engine.release,
        engine.__enter__,
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    assert not engine.has_work
    assert engine.memory().committed == 0


def test_closing_in_the_middle_of_a_stream_ends_it() -> None:
    engine = flatbed.Engine(shared("llama"))
    stream = engine.stream(PROMPTS, GREEDY)
    next(stream)
    engine.close()
    rest = list(stream)
    assert len(rest) <= 3


def test_an_exception_inside_of_with_closes_the_engine() -> None:
    engine = flatbed.Engine(shared("llama"))

    def use() -> None:
        with engine:
            engine.submit(PROMPTS[0], GREEDY)
            raise Boom

    with pytest.raises(Boom):
        use()
    with pytest.raises(EngineClosedError):
        engine.step()


def test_stepping_without_work_does_nothing() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        start = time.perf_counter()
        assert [engine.step() for _ in range(100)] == [[]] * 100
        assert time.perf_counter() - start < 1.0
        assert engine.stats().steps == 0


def test_a_failed_step_names_a_few_of_many_requests() -> None:
    model = build("llama")
    with flatbed.Engine(model) as engine:
        for i in range(30):
            engine.submit([i + 1], flatbed.SamplingParams(max_new_tokens=4), request_id=f"r{i}")
        engine.step()
        engine._runner._call = lambda *args: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ModelForwardError, match=r"r0, r1, .*, r7 and 22 more\)") as caught:
            engine.step()
        assert caught.value.request_ids == tuple(f"r{i}" for i in range(30))
