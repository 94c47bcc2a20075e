"""Workloads: the published ones to the token, how they shrink and fit, and files of prompts and lengths."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import latencies
from flatbed.lab.workloads import (
    WORKLOADS,
    LabRequest,
    Workload,
    check_names,
    from_json,
    make,
    needs_tokenizer,
    to_json,
)

VOCABULARY, LONGEST = 151936, 32768


def shape(workload: Workload) -> tuple[list[list[int]], list[int]]:
    return [list(r.prompt) for r in workload.requests], [r.new_tokens for r in workload.requests]


def test_article_is_the_published_one() -> None:
    draw = random.Random(0)
    prompts = []
    for _ in range(64):
        length = draw.randrange(16, 65)
        prompts.append([draw.randrange(1000, 150000) for _ in range(length)])
    work = make("article", VOCABULARY, LONGEST)
    assert shape(work) == (prompts, [128] * 64)
    assert (work.tokens, work.temperature, work.n, work.logprobs) == (8192, 0.0, 1, False)


def test_mixed_is_the_published_one() -> None:
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        length = draw.randint(100, 1024)
        prompts.append([draw.randint(0, 10000) for _ in range(length)])
    work = make("mixed", VOCABULARY, LONGEST)
    assert shape(work) == (prompts, [draw.randint(100, 1024) for _ in range(256)])
    assert (work.tokens, work.temperature) == (133966, 0.6)


def test_rollout_is_the_published_one() -> None:
    draw = random.Random(1)
    work = make("rollout", VOCABULARY, LONGEST)
    assert shape(work) == ([[draw.randrange(1000, 150000) for _ in range(200)] for _ in range(8)], [512] * 8)
    assert (work.tokens, work.temperature, work.n, work.logprobs) == (65536, 1.0, 16, True)


def test_the_others() -> None:
    facts = {name: make(name, VOCABULARY, LONGEST).facts() for name in ("one", "concurrent", "long")}
    assert {name: (f["requests"], f["prompt_tokens"], f["new_tokens"]) for name, f in facts.items()} == {
        "one": (1, 40, 128),
        "concurrent": (1024, 32768, 65536),
        "long": (8, 256000, 128),
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_small_models_get_the_same_shape(name: str) -> None:
    work = make(name, 101, 600, scale=0.1)
    assert all(0 <= token < 101 for request in work.requests for token in request.prompt)
    assert work.longest <= 600
    whole = make(name, VOCABULARY, LONGEST)
    assert len(work.requests) == max(1, round(len(whole.requests) * 0.1))
    assert work.temperature == whole.temperature


def test_blocks_and_live_tokens() -> None:
    work = Workload("w", (LabRequest([1] * 10, 7), LabRequest([1] * 3, 2)), n=2)
    assert work.smallest_blocks(16) == 2 * (1 + 1)  # 16 tokens: the last one is never attended to
    assert work.smallest_blocks(8) == 2 * (2 + 1)
    assert work.live_tokens == 2 * (16 + 4)
    assert (work.tokens, work.prompt_tokens, work.longest) == (18, 13, 17)


def test_calls_have_other_prompts_of_the_same_lengths() -> None:
    work = make("article", VOCABULARY, LONGEST)
    calls = [work.varied(call) for call in range(5)]
    assert calls[0] is work
    for one, other in pairwise(calls):
        assert [len(r.prompt) for r in one.requests] == [len(r.prompt) for r in other.requests]
        assert all(a.prompt[:8] != b.prompt[:8] for a, b in zip(one.requests, other.requests, strict=True))
    real = Workload("real", work.requests, synthetic=False)
    assert real.varied(3) is real


def test_json_keeps_all_of_it() -> None:
    work = make("rollout", VOCABULARY, LONGEST, scale=0.05)
    assert from_json(json.loads(json.dumps(to_json(work)))) == work


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = "yes"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]


def write(folder: Path, *lines: Any) -> str:
    path = folder / "my work.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt_tokens": 5, "new_tokens": 3},
        {"prompt_tokens": 2, "new_tokens": 9, "arrival_s": 1.5, "id": "b"},
    )
    work = make(path, 100, 50)
    assert [(len(r.prompt), r.new_tokens, r.arrival_s) for r in work.requests] == [(5, 3, 0.0), (2, 9, 1.5)]
    assert (work.name, work.synthetic, work.arrives_over_time) == ("my work", True, True)
    assert make(path, 100, 50) == work
    assert make(path, 100, 50, seed=7) != work
    assert not needs_tokenizer(path)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "abc", "max_new_tokens": 4},
        {"messages": [{"role": "user", "content": "cab"}]},
        {"token_ids": [7, 8]},
    )
    work = make(path, 100, 500, tokenizer=Letters())
    assert [list(r.prompt) for r in work.requests] == [[1, 2, 3], [3, 1, 2], [7, 8]]
    assert [r.new_tokens for r in work.requests] == [4, 128, 128]
    assert not work.synthetic
    assert needs_tokenizer(path)
    with pytest.raises(ConfigError, match="line 1: `prompt` needs a tokenizer"):
        make(path, 100, 500)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting"),
        ([1], "line 2: must be a JSON object"),
        ({"prompt_tokens": 3}, "line 2: `new_tokens` must be a whole number, at least 1, got None"),
        ({"prompt_tokens": 0, "new_tokens": 1}, "`prompt_tokens` must be a whole number, at least 1, got 0"),
        ({"prompt_tokens": True, "new_tokens": 1}, "`prompt_tokens` must be a whole number"),
        ({"token_ids": []}, "`token_ids` must be a list of whole numbers that is not empty"),
        ({"token_ids": [1, -1]}, "`token_ids` must be a list"),
        ({"token_ids": [1], "prompt": "a"}, "needs exactly one of prompt, messages, token_ids, or the lengths"),
        ({"max_new_tokens": 3}, "needs exactly one of"),
        ({"token_ids": [1], "arrival_s": -1}, "`arrival_s` must be a number, at least 0, got -1"),
        ({"token_ids": [1], "arrival_s": float("inf")}, "`arrival_s` must be a number"),
        ({"token_ids": [1], "max_tokens": 3}, "unknown field 'max_tokens'; known: prompt, messages"),
        ({"token_ids": [1], "max_new_tokens": 3.5}, "`max_new_tokens` must be a whole number"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path, {"token_ids": [1]}, line)
    with pytest.raises(ConfigError) as raised:
        make(path, 100, 500)
    assert said in str(raised.value)


def test_what_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown workload 'nonsense'; known: article, mixed, rollout, one"):
        make("nonsense", 100, 100)
    with pytest.raises(ConfigError, match="there is no such file"):
        check_names([str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match="has no requests"):
        make(write(tmp_path, ""), 100, 100)
    for scale in (0, -1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="scale must be above 0 and at most 1"):
            make("article", 100, 100, scale=scale)
    with pytest.raises(ConfigError, match="request 1: 128 new tokens do not fit into the model's 100 positions"):
        make("article", 100, 100)


def test_latencies() -> None:
    first, between = latencies({"a": 1.0, "b": 2.0, "c": 0.0}, {"a": [1.5, 1.7, 2.0], "b": [2.25], "c": []})
    assert first == [0.5, 0.25]
    assert between == pytest.approx([0.2, 0.3])
