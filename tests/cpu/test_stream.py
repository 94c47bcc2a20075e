"""`Engine.stream` yields each token as it comes; put together, the events are the outputs of `generate`."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from tiny import assert_idle, byte_ids, byte_tokenizer, draw_prompts, expected, scripted, shared, tokens_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import flatbed

Params = flatbed.SamplingParams
TEXT = "hello world: Grüße aus 東京 🙂 stop here, and then stop again."


@pytest.fixture(scope="module")
def talker() -> nn.Module:
    """A random model over the bytes' vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class Story:
    """What a stream told, put together per request and sample; checks the order of events as they come."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.reasons: dict[tuple[str, int], str] = {}
        self.outputs: dict[str, flatbed.Output] = {}

    def add(self, event: flatbed.StreamEvent) -> None:
        key = (event.request_id, event.sample)
        assert key not in self.reasons, "an event after the sample's last"
        assert event.request_id not in self.outputs, "an event after the request's last"
        if event.token_id is not None:
            self.tokens[key].append(event.token_id)
        if event.text is not None:
            self.text[key] += event.text
        if event.finish_reason is not None:
            self.reasons[key] = event.finish_reason
        else:
            assert event.token_id is not None, "an event without a token that ends nothing"
            assert event.output is None
        if event.output is not None:
            self.outputs[event.request_id] = event.output

    def check(self, outputs: list[flatbed.Output], *, text: bool) -> None:
        """The story is that of these outputs, whole."""
        assert set(self.outputs) == {output.request_id for output in outputs}
        for output in outputs:
            told = self.outputs[output.request_id]
            assert told.finished
            for sample, same in zip(output.samples, told.samples, strict=True):
                key = (output.request_id, sample.index)
                assert self.tokens[key] == sample.token_ids == same.token_ids
                assert self.reasons[key] == sample.finish_reason == same.finish_reason
                if text:
                    assert self.text[key] == sample.text == same.text
                else:
                    assert key not in self.text
                    assert sample.text is None


def both(model: nn.Module, tokenizer: Any, prompts: list[Any], params: Any, **settings: Any) -> list[flatbed.Output]:
    """Streams and generates the same, compares, and returns the outputs."""
    names = [f"request {i}" for i in range(len(prompts))]
    story = Story()
    with flatbed.Engine(model, tokenizer, **settings) as engine:
        for event in engine.stream(prompts, params, request_ids=names):
            story.add(event)
        assert_idle(engine)
        assert engine.partial_outputs == []
        outputs = engine.generate(prompts, params, request_ids=names)
    story.check(outputs, text=tokenizer is not None)
    return outputs


def test_tokens_without_a_tokenizer() -> None:
    prompts = draw_prompts((3, 40, 9, 1), seed=1)
    outputs = both(shared("llama"), None, prompts, Params(max_new_tokens=15), token_budget=20)
    assert tokens_of(outputs) == expected("llama", prompts, 15)


@pytest.mark.parametrize("settings", [{}, {"token_budget": 5}, {"capacity": "16 blocks", "block_size": 8}])
def test_tokens_and_text_of_many_samples(talker: nn.Module, settings: dict[str, Any]) -> None:
    prompts = ["hello", "Grüße aus", byte_ids("東京"), "x"]
    params = [
        Params(max_new_tokens=40, temperature=1.5, seed=1, n=3),
        Params(max_new_tokens=30),
        Params(max_new_tokens=40, temperature=0.9, seed=2, stop=["a", "e", "\ufffd"]),
        Params(max_new_tokens=40, temperature=2.0, seed=3, n=4, stop="q"),
    ]
    outputs = both(talker, byte_tokenizer(), prompts, params, **settings)
    tokenizer = byte_tokenizer()
    for output in outputs:
        for sample in output.samples:
            whole = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert sample.text == whole if sample.finish_reason != "stop" else whole.startswith(sample.text)


@pytest.mark.parametrize("by_bytes", [True, False])
def test_a_character_comes_whole(by_bytes: bool) -> None:
    """No event carries a piece of a character, and no text waits longer than it must."""
    script = byte_ids(TEXT) if by_bytes else byte_tokenizer()(TEXT)["input_ids"]
    model, tokenizer = scripted(script, len(byte_tokenizer())), byte_tokenizer()
    with flatbed.Engine(model, tokenizer) as engine:
        events = list(engine.stream([[5]], Params(max_new_tokens=len(script))))
    assert [event.token_id for event in events] == script
    assert "".join(event.text for event in events) == TEXT
    told = ""
    for at, event in enumerate(events):
        assert "\ufffd" not in event.text
        told += event.text
        assert told == tokenizer.decode(script[: at + 1]).rstrip("\ufffd")


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    text = "a sto, a stor, then stop!"
    script = byte_ids(text)
    model, tokenizer = scripted(script, len(byte_tokenizer())), byte_tokenizer()
    with flatbed.Engine(model, tokenizer) as engine:
        events = list(engine.stream([[5]], Params(max_new_tokens=len(script), stop=["stop"])))
    told = ""
    for at, event in enumerate(events[:-1]):
        told += event.text
        seen = text[: at + 1]
        held = next((n for n in (3, 2, 1) if seen.endswith("stop"[:n])), 0)
        assert told == seen[: len(seen) - held]
    assert told + events[-1].text == "a sto, a stor, then "
    assert (events[-1].finish_reason, events[-1].output.text) == ("stop", "a sto, a stor, then ")


def test_text_that_was_held_back_comes_with_the_last_event_when_no_stop_string_follows() -> None:
    script = byte_ids("a sto")
    model = scripted(script, len(byte_tokenizer()))
    with flatbed.Engine(model, byte_tokenizer()) as engine:
        events = list(engine.stream([[5]], Params(max_new_tokens=len(script), stop=["stop"])))
    assert [event.text for event in events] == ["a", " ", "", "", "sto"]
    assert events[-1].output.text == "a sto"


def test_finish_events_carry_the_output_of_their_request() -> None:
    prompts = draw_prompts((3, 5), seed=1)
    full = expected("llama", prompts, 8)
    params = [Params(max_new_tokens=8, eos_token_ids=(full[0][4],)), Params(max_new_tokens=8, n=2)]
    with flatbed.Engine(shared("llama")) as engine:
        events = list(engine.stream(prompts, params, request_ids=["a", "b"]))
    last = [event for event in events if event.finish_reason is not None]
    assert [(event.request_id, event.sample, event.finish_reason) for event in last] == [
        ("a", 0, "eos"),
        ("b", 0, "length"),
        ("b", 1, "length"),
    ]
    assert [event.token_id for event in last] == [full[0][4], full[1][7], full[1][7]], (
        "the last token comes with the end"
    )
    assert [None if event.output is None else event.output.request_id for event in last] == ["a", None, "b"]


def test_a_refused_request_is_one_event_and_the_others_go_on() -> None:
    prompts = [draw_prompts((3,), seed=1)[0], [], draw_prompts((5,), seed=1)[0]]
    with flatbed.Engine(shared("llama")) as engine:
        events = list(engine.stream(prompts, Params(max_new_tokens=4), request_ids=["a", "bad", "c"]))
        assert_idle(engine)
    bad = [event for event in events if event.request_id == "bad"]
    assert [(event.sample, event.token_id, event.text, event.finish_reason) for event in bad] == [
        (0, None, None, "error")
    ]
    assert isinstance(bad[0].output.error, flatbed.errors.InvalidRequestError)
    assert [sum(event.request_id == name for event in events) for name in ("a", "c")] == [4, 4]


def test_a_cancelled_request_ends_with_an_event_without_a_token() -> None:
    with flatbed.Engine(shared("llama")) as engine:
        story = Story()
        for event in engine.stream(draw_prompts((3, 5), seed=1), Params(max_new_tokens=20), request_ids=["a", "b"]):
            story.add(event)
            if len(story.tokens[("a", 0)]) == 5 and not story.reasons:
                engine.cancel("a")
        assert story.reasons == {("a", 0): "cancelled", ("b", 0): "length"}
        assert 5 <= len(story.tokens[("a", 0)]) <= 6
        assert story.outputs["a"].token_ids == story.tokens[("a", 0)]
        assert len(story.tokens[("b", 0)]) == 20
        assert_idle(engine)


def test_breaking_out_cancels_what_is_under_way() -> None:
    prompts = draw_prompts((3, 40, 5), seed=1)
    with flatbed.Engine(shared("llama")) as engine:
        for count, _ in enumerate(engine.stream(prompts, Params(max_new_tokens=50, n=2)), start=1):
            if count == 20:
                break
        assert_idle(engine)
        partial = engine.partial_outputs
        assert [output.prompt_token_ids for output in partial] == prompts
        assert {sample.finish_reason for output in partial for sample in output.samples} == {"cancelled"}
        assert 20 <= sum(len(sample.token_ids) for output in partial for sample in output.samples) <= 26
        assert tokens_of(engine.generate(prompts, Params(max_new_tokens=6))) == expected("llama", prompts, 6)


def test_an_exception_in_the_loop_cancels_what_is_under_way() -> None:
    with flatbed.Engine(shared("llama")) as engine:

        def consume() -> str:
            try:
                for event in engine.stream(draw_prompts((3, 5), seed=1), Params(max_new_tokens=50)):
                    raise ZeroDivisionError(f"at token {event.token_id}")
            except ZeroDivisionError as error:
                return str(error)
            return "nothing was raised"

        assert consume().startswith("at token")
        gc.collect()
        assert_idle(engine)


def test_tokens_come_as_they_are_made() -> None:
    """The first event is there before the last token could be."""
    with flatbed.Engine(shared("llama")) as engine:
        stream = engine.stream(draw_prompts((3,), seed=1), Params(max_new_tokens=100))
        next(stream)
        assert engine.stats().generated_tokens <= 2
        rest = list(stream)
        assert len(rest) == 99


def test_requests_may_be_submitted_while_others_run() -> None:
    prompts = draw_prompts((3, 40, 9), seed=1)
    params = Params(max_new_tokens=12)
    with flatbed.Engine(shared("llama"), token_budget=16) as engine:
        outputs, events = [], []
        for prompt in prompts:
            outputs.append(engine.submit(prompt, params, request_id=f"r{len(outputs)}"))
            for _ in range(3):
                events += engine.step()
        while engine.has_work:
            events += engine.step()
        story = Story()
        for event in events:
            story.add(event)
        story.check(outputs, text=False)
        assert tokens_of(outputs) == expected("llama", prompts, 12)


def test_timings_and_token_times() -> None:
    start = time.perf_counter()
    prompts = draw_prompts((3, 40, 9), seed=1)
    with flatbed.Engine(shared("llama"), max_requests=1) as engine:
        outputs = engine.generate(prompts, Params(max_new_tokens=5), record_token_times=True)
        for output in outputs:
            timings = output.timings
            moments = [start, timings.submitted, timings.started, timings.first_token, timings.finished]
            assert moments == sorted(moments)
            assert timings.finished < time.perf_counter()
            times = output.samples[0].token_times
            assert len(times) == 5
            assert times == sorted(times)
            assert (times[0], times[-1]) == (timings.first_token, timings.finished)
            assert timings.queued_s == timings.started - timings.submitted
            assert timings.time_to_first_token_s == timings.first_token - timings.submitted
            assert timings.total_s == timings.finished - timings.submitted
        ends = [output.timings.finished for output in outputs]
        assert ends == sorted(ends), "one at a time, in order of arrival"
        assert engine.generate(prompts[:1], Params(max_new_tokens=2))[0].samples[0].token_times is None


# ---- prompts that are text -------------------------------------------------------------------------------------------


def test_strings_and_chats_are_encoded_as_the_tokenizer_does(talker: nn.Module) -> None:
    tokenizer = byte_tokenizer()
    chat = [
        {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": "?"},
    ]
    with flatbed.Engine(talker, tokenizer) as engine:
        text, talk = engine.generate(["hello world", chat], Params(max_new_tokens=4))
    assert text.prompt_token_ids == tokenizer("hello world")["input_ids"]
    assert talk.prompt_token_ids == tokenizer("<user>Grüße<assistant>hm<user>?:")["input_ids"]
    assert talk.prompt_token_ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_a_chat_template_that_raises_refuses_that_request_alone(talker: nn.Module) -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = [{"role": "user", "content": "x"}]
    with flatbed.Engine(talker, tokenizer) as engine:
        with pytest.warns(flatbed.FlatbedWarning, match="roles must alternate"):
            refused, fine = engine.generate([chat, "hello"], Params(max_new_tokens=3))
        assert isinstance(refused.error, flatbed.errors.InvalidRequestError)
        assert (refused.error.field, len(fine.token_ids)) == ("prompt", 3)
        tokenizer.chat_template = None
        with pytest.warns(flatbed.FlatbedWarning, match="chat template"):
            [refused] = engine.generate([chat], Params(max_new_tokens=3))


def test_tokens_that_the_tokenizer_does_not_know_have_no_text(talker: nn.Module) -> None:
    """A model's vocabulary is often padded beyond the tokenizer's, and some tokenizers raise on the difference."""

    class Strict:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return byte_tokenizer()(text)

        def decode(self, ids: list[int], **settings: Any) -> str:
            if any(token % 3 == 0 for token in ids):
                raise IndexError("piece id is out of range")
            return byte_tokenizer().decode(ids, **settings)

    with flatbed.Engine(talker, Strict()) as engine:
        [output] = engine.generate(["hello"], Params(max_new_tokens=12, ignore_eos=True))
    known = [token for token in output.token_ids if token % 3]
    assert output.error is None
    assert 0 < len(known) < 12
    assert output.text == byte_tokenizer().decode(known, skip_special_tokens=True)


def test_callbacks_see_each_output_once_it_is_complete() -> None:
    prompts = draw_prompts((3, 40, 9), seed=1)
    params = [Params(max_new_tokens=n) for n in (9, 2, 5)]
    done: list[tuple[str, int]] = []
    steps: list[int] = []
    with flatbed.Engine(shared("llama")) as engine:

        def on_output(output: flatbed.Output) -> None:
            assert output.finished
            assert output.timings.finished is not None
            done.append((output.request_id, len(steps)))

        engine.generate(
            prompts, params, request_ids=["a", "b", "c"], on_output=on_output, on_step=lambda: steps.append(1)
        )
        assert done == [("b", 1), ("c", 4), ("a", 8)]
        assert len(steps) == engine.stats().steps == 9
        assert engine.stats().finished == 3
        assert engine.stats().generated_tokens == 16
        assert engine.stats().prompt_tokens == 52
