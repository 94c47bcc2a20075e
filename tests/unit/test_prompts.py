"""Prompt files and files of results, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatbed.errors import ConfigError, InvalidRequestError
from flatbed.prompts import PromptFile, ResultFile, parse_prompts, read_prompts, record_of, seed_of
from flatbed.request import Completion, Output, SamplingParams, Timings

BASE = SamplingParams(max_new_tokens=7, temperature=0.5)


def parse(text: str, **options: bool) -> PromptFile:
    return parse_prompts(text.encode(), BASE, **options)


def output(request_id: str, *, error: bool = False, reason: str = "length", samples: int = 1) -> Output:
    return Output(
        request_id,
        prompt_token_ids=[1, 2, 3],
        samples=[Completion(i, [4, 5], "hi", "error" if error else reason) for i in range(samples)],  # type: ignore[arg-type]
        timings=Timings(submitted=10.0, started=10.5, first_token=11.0, finished=13.0),
        error=InvalidRequestError("must be more", request_id=request_id, field="top_k") if error else None,
        cached_tokens=2,
    )


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------- prompts


def test_torch_is_not_imported() -> None:
    code = "import sys, flatbed.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_three_kinds_of_prompt_and_their_ids() -> None:
    chat = [{"role": "user", "content": "hi"}]
    file = parse(
        f'{{"prompt": "a"}}\n\n{{"messages": {json.dumps(chat)}, "id": "x"}}\n{{"token_ids": [1, 2], "id": 77}}\r\n'
    )
    assert not file.errors
    assert [(line.line, line.request_id, line.prompt) for line in file.lines] == [
        (1, "1", "a"),
        (3, "x", chat),
        (4, "77", [1, 2]),
    ]


def test_sampling_fields_of_a_line_go_over_those_of_the_run() -> None:
    (line,) = parse('{"prompt": "a", "temperature": 0, "stop": ["x", "y"], "seed": 3}').lines
    assert line.sampling == SamplingParams(max_new_tokens=7, temperature=0, stop=("x", "y"), seed=3)


def test_a_value_out_of_range_is_left_to_the_engine() -> None:
    """It refuses that request alone, with its own typed error."""
    (line,) = parse('{"prompt": "a", "top_p": NaN}').lines
    assert line.sampling.problem() is not None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ("[" * 100_000, "not JSON"),
        (
            '{"prompt": "a", "token_ids": [1]}',
            "exactly one of prompt, messages, token_ids; it has prompt and token_ids",
        ),
        ('{"id": "only"}', "exactly one of prompt, messages, token_ids; it has none"),
        ('{"prompt": 3}', "`prompt` must be a string, got 3"),
        ('{"prompt": null}', "`prompt` must be a string"),
        ('{"messages": "hi"}', "`messages` must be a list of objects"),
        ('{"messages": []}', "`messages` must be a list of objects"),
        ('{"messages": [{"role": "user"}]}', "`messages` must be a list of objects"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "`messages` must be a list of objects"),
        ('{"token_ids": [1, "2"]}', "`token_ids` must be a list of whole numbers"),
        ('{"token_ids": [true]}', "`token_ids` must be a list of whole numbers"),
        ('{"prompt": "a", "id": 1.5}', "`id` must be a string or a whole number"),
        ('{"prompt": "a", "id": true}', "`id` must be a string or a whole number"),
        (
            '{"prompt": "a", "temprature": 1}',
            "unknown field 'temprature'; known: prompt, messages, token_ids, id, max_new",
        ),
        ('{"prompt": "a", "processors": 1}', "unknown field 'processors'"),
        ('{"prompt": "\\ud83d"}', "half a surrogate pair"),
        ('{"prompt": "a", "id": "first"}', "the id 'first' is that of line 1 already"),
    ],
)
def test_a_malformed_line_is_told_and_stops_no_other(line: str, reason: str) -> None:
    file = parse(f'{{"prompt": "a", "id": "first"}}\n{line}\n{{"prompt": "b"}}\n')
    assert [good.request_id for good in file.lines] == ["first", "3"]
    (error,) = file.errors
    assert error.line == 2
    assert str(error).startswith("line 2: ")
    assert reason in str(error)


def test_a_line_that_is_not_utf8() -> None:
    file = parse_prompts(b"good\n\xff\xfe\n", BASE)
    assert [line.prompt for line in file.lines] == ["good"]
    assert [error.line for error in file.errors] == [2]


def test_a_number_of_a_line_that_was_given_as_an_id_before() -> None:
    file = parse('{"prompt": "a", "id": "2"}\n{"prompt": "b"}\n')
    assert [line.prompt for line in file.lines] == ["a"]
    assert [error.line for error in file.errors] == [2]


def test_text_is_a_prompt_a_line() -> None:
    file = parse("  two words \r\n\n{not json}\nline\u2028separator\n")
    assert not file.errors
    assert [(line.request_id, line.prompt) for line in file.lines] == [
        ("1", "  two words "),
        ("3", "{not json}"),
        ("4", "line\u2028separator"),
    ]


def test_a_json_string_may_hold_what_python_takes_for_a_line_end() -> None:
    assert [line.prompt for line in parse('{"prompt": "a\u2028b\u0085c"}').lines] == ["a\u2028b\u0085c"]


def test_a_byte_order_mark_is_no_text() -> None:
    assert [line.prompt for line in parse("\ufeffhello").lines] == ["hello"]
    assert [line.prompt for line in parse('\ufeff{"prompt": "hello"}').lines] == ["hello"]


@pytest.mark.parametrize(
    ("name", "content", "prompts", "errors"),
    [
        ("a.jsonl", "plain\n", [], 1),
        ("a.JSON", '{"prompt": "p"}\n', ["p"], 0),
        ("a.txt", '{"prompt": "p"}\n', ["p"], 0),
        ("a", '\n\n{"prompt": "p"}\nbad\n', ["p"], 1),
        ("a.txt", '7\n{"prompt": "p"}\n', ["7", '{"prompt": "p"}'], 0),
        ("a.txt", "", [], 0),
        ("a.jsonl", "\n \n", [], 0),
    ],
)
def test_json_or_text(tmp_path: Path, name: str, content: str, prompts: list[str], errors: int) -> None:
    (tmp_path / name).write_text(content)
    file = read_prompts(tmp_path / name, BASE)
    assert [line.prompt for line in file.lines] == prompts
    assert len(file.errors) == errors


def test_chat_wraps_plain_prompts_only() -> None:
    file = parse('{"prompt": "a"}\n{"token_ids": [1]}\n{"messages": [{"role": "system", "content": "s"}]}\n', chat=True)
    assert [line.prompt for line in file.lines] == [
        [{"role": "user", "content": "a"}],
        [1],
        [{"role": "system", "content": "s"}],
    ]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl", BASE)


def test_seeds_differ_by_run_and_request_and_are_the_same_everywhere() -> None:
    assert len({seed_of(seed, name) for seed in range(10) for name in "abc"}) == 30
    assert seed_of(0, "1") == 5509842535781378034
    assert SamplingParams(seed=seed_of(1, "é")).problem() is None


# ------------------------------------------------------------------------------------------------------------- results


def test_record_of_one_sample() -> None:
    assert record_of(output("a")) == {
        "id": "a",
        "text": "hi",
        "token_ids": [4, 5],
        "finish_reason": "length",
        "error": None,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "timings": {"queued_s": 0.5, "time_to_first_token_s": 1.0, "total_s": 3.0},
    }


def test_record_of_several_samples_and_log_probabilities() -> None:
    many = output("a", samples=2)
    many.samples[1].logprobs = [-0.5, -1.5]
    many.samples[1].raw_logprobs = [-0.25, -1.25]
    plain = {"text": "hi", "token_ids": [4, 5], "finish_reason": "length"}
    record = record_of(many)
    assert record["samples"] == [plain, {**plain, "logprobs": [-0.5, -1.5], "raw_logprobs": [-0.25, -1.25]}]
    assert record["text"] == "hi"
    assert "logprobs" not in record


def test_every_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl") as results:
        for name in ("a", "b"):
            assert results.write(output(name))
            assert ids_in(results.path)[-1] == name
        assert not results.write(output("a"))
        assert not results.write(output("c", reason="cancelled"))
        half = output("d", samples=2)
        half.samples[1].finish_reason = None
        assert not results.write(half)
    assert ids_in(results.path) == ["a", "b"]


def test_text_stays_readable_and_half_a_character_does_no_harm(tmp_path: Path) -> None:
    strange = output("é\ud800")
    strange.samples[0].text = "雪\u2028"
    with ResultFile(tmp_path / "out.jsonl") as results:
        results.write(strange)
    data = results.path.read_bytes()
    assert "雪".encode() in data
    assert data.count(b"\n") == 1
    assert json.loads(data)["id"] == "é\ud800"


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match="--resume"):
        ResultFile(path)
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize("content", ["precious\n", '{"id": "a"}\n', "precious", '{"id": "a", "error": null}\n{"other'])
def test_resume_leaves_a_file_alone_that_is_no_result(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="cannot resume: line"):
        ResultFile(path, resume=True)
    assert path.read_text() == content


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_nothing_there_yet(tmp_path: Path, resume: bool, there: bool) -> None:
    path = tmp_path / "out.jsonl"
    if there:
        path.touch()
    with ResultFile(path, resume=resume) as results:
        assert results.done == set()
        results.write(output("a"))
    assert ids_in(path) == ["a"]


def test_resume_after_a_kill_anywhere_in_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.write(output("a"))
        results.write(output("b"))
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data)):
        path.write_bytes(data[:cut])
        with ResultFile(path, resume=True) as results:
            assert results.done == {"a"}
            results.write(output("b"))
        assert path.read_bytes() == data


def test_resume_runs_again_what_ended_in_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        for name, error in (("a", False), ("b", True), ("c", False)):
            results.write(output(name, error=error))
    path.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with ResultFile(link, resume=True) as results:
        assert results.done == {"a", "c"}
        assert ids_in(path) == ["a", "c"]
        results.write(output("b"))
    assert ids_in(path) == ["a", "c", "b"]
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.jsonl", "out.jsonl"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write results"):
        ResultFile(tmp_path / "no" / "out.jsonl")


def test_a_device_has_nothing_to_resume() -> None:
    with ResultFile("/dev/null", resume=True) as results:
        assert results.write(output("a"))


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no /dev/stdout")
def test_results_may_go_into_a_pipe() -> None:
    code = "from test_prompts import *; ResultFile('/dev/stdout').write(output('a'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["id"] == "a"
