"""The adapter of vLLM against a stand-in (fake_vllm) with the names and arguments of vLLM 0.24.0's sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import EngineSpec, MissingEngine, Settings, Setup
from flatbed.lab.engines.vllm import VllmAdapter
from flatbed.lab.measure import Experiment, measure
from flatbed.lab.workloads import LabRequest, Workload

FAKE = Path(__file__).parent / "fake_vllm"
WORK = Workload("w", tuple(LabRequest([1] * 20, 12) for _ in range(6)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def adapter(tmp_path: Path, capacity: str | None, spec: str = "vllm:FLASH_ATTN", **settings: Any) -> VllmAdapter:
    setup = Setup("shape:tiny", "cuda", "auto", longest=64, checkpoint=str(tmp_path), seed=3)
    made = VllmAdapter(EngineSpec.parse(spec), Settings(capacity, **settings), setup)
    made.load()
    return made


@pytest.mark.parametrize(
    ("capacity", "arguments", "tokens"),
    [
        ("64 blocks", {"num_gpu_blocks_override": 1025, "block_size": 16}, 16384),
        ("1000 tokens", {"num_gpu_blocks_override": 64, "block_size": 16}, 1008),
        ("90%", {"gpu_memory_utilization": 0.9}, (2600 - 1) * 16),
        ("1 MiB", {"kv_cache_memory_bytes": 1 << 20}, (128 - 1) * 16),
        (None, {}, (2680 - 1) * 16),
    ],
)
def test_capacities(fake: None, tmp_path: Path, capacity: str | None, arguments: dict[str, Any], tokens: int) -> None:
    engine = adapter(tmp_path, capacity)
    engine.construct(WORK)
    assert engine.facts() == {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 3, "max_model_len": 64,
        "attention_backend": "FLASH_ATTN", **arguments,
    }  # fmt: skip
    memory = engine.memory()
    assert memory.capacity_tokens == tokens
    assert memory.committed == (tokens + 16) * 512


def test_token_budget_and_any_argument(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, None, "vllm:enable_prefix_caching=false,max_model_len=32", token_budget=256)
    engine.construct(WORK)
    assert engine.facts()["max_num_batched_tokens"] == 256
    assert engine.facts()["enable_prefix_caching"] is False
    assert engine.facts()["max_model_len"] == 32
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        adapter(tmp_path, None, "vllm:nonsense=1").construct(WORK)


def test_loading_and_warm_up_are_no_construction(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, "64 blocks")
    phases = engine.construct(WORK)
    assert phases["load"] == pytest.approx(0.2, abs=0.15)
    assert phases["warm_up"] == pytest.approx(0.1, abs=0.09)
    from vllm.v1.worker.gpu_worker import Worker

    assert not hasattr(Worker.load_model, "__wrapped__"), "vLLM was left changed"
    assert engine.construct(WORK) == {}, "it is built once"


def test_calls(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, "64 blocks")
    engine.construct(WORK)
    plain = engine.run(WORK)
    assert (plain.tokens, plain.preemptions, plain.first_token_s) == (72, 0, [])
    timed = engine.run(WORK, latency=True)
    assert timed.tokens == 72
    assert len(timed.first_token_s) == 6
    assert len(timed.between_tokens_s) == 6 * 11
    assert 0 < min(timed.first_token_s) <= max(timed.first_token_s) < timed.seconds
    live = engine.memory().live
    assert live is not None
    assert live == pytest.approx(6 * 2 * 16 * 512, rel=0.01)  # 31 tokens at the longest are two blocks


def test_samples_and_logprobs(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, "64 blocks")
    work = Workload("w", WORK.requests, temperature=1.0, n=3, logprobs=True)
    engine.construct(work)
    assert engine.run(work).tokens == work.tokens == 216
    timed = engine.run(work, latency=True)
    assert (timed.tokens, len(timed.first_token_s)) == (216, 18)


def test_preemptions_are_counted(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, "128 tokens")  # four requests fit at their longest, eight at the beginning
    engine.construct(WORK)
    result = engine.run(WORK)
    assert result.tokens == 72
    assert result.preemptions is not None
    assert engine.run(WORK).preemptions == result.preemptions, "of one call, not of all"
    assert adapter(tmp_path, "64 blocks").check(EngineSpec.parse("vllm"), Settings()) is None


def test_arrivals_are_honoured(fake: None, tmp_path: Path) -> None:
    engine = adapter(tmp_path, "64 blocks")
    work = Workload("w", (LabRequest([1], 4), LabRequest([1], 4, arrival_s=0.3)))
    engine.construct(work)
    result = engine.run(work, latency=True)
    assert 0.3 < result.seconds < 1.0
    assert max(result.first_token_s) < 0.2, "counted from each request's own arrival"
    assert engine.run(work).seconds > 0.3


def test_out_of_sight_in_another_process(fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = adapter(tmp_path, "64 blocks")
    engine.construct(WORK)
    result = engine.run(WORK, latency=True)
    assert result.preemptions is None
    assert engine.memory().live is None
    assert "set VLLM_ENABLE_V1_MULTIPROCESSING=0" in result.notes[0]


def test_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(MissingEngine, match="vllm cannot be imported"):
        VllmAdapter.import_packages()


def test_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the name of an attention backend"):
        VllmAdapter.check(EngineSpec.parse("vllm:A,B"), Settings())


def test_a_whole_experiment(tmp_path: Path) -> None:
    """Each capacity in a process of its own, one after the other; a capacity below the weights is a result."""
    spec = EngineSpec.parse("vllm@0.24.0:FLASH_ATTN")
    variables = {"PYTHONPATH": str(FAKE), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    experiment = Experiment(
        "capacity",
        Setup("shape:tiny", "cuda", longest=64, checkpoint=str(tmp_path)),
        [spec, EngineSpec.parse("vllm@0.23.0")],
        [Settings("10%"), Settings("50%"), Settings("90%")],
        [WORK, Workload("again", WORK.requests)],
        repeats=2,
        environments={"vllm": variables},
    )
    records = measure(experiment)
    wanted = [r for r in records if r["engine"] == spec.text]
    assert {r["outcome"] for r in wanted if r["settings"]["capacity"] == "10%"} == {"failed"}
    assert "No available memory for the cache blocks" in wanted[0]["error"]
    well = [r for r in wanted if r["settings"]["capacity"] == "90%"]
    assert [r["phase"] for r in well] == ["start", "first", "steady", "steady", "latency"] * 2
    assert {r["order"] for r in well} == {"one after the other"}
    first, again = (r for r in well if r["phase"] == "start")
    assert first["load_s"] == pytest.approx(0.2, abs=0.15)
    assert first["parts"]["warm_up"] == pytest.approx(0.1, abs=0.09)
    assert again["seconds"] < 0.05, "the engine is kept for the next workload"
    (missing,) = (r for r in records if r["engine"] == "vllm@0.23.0")
    assert "vllm 0.23.0 was asked for, and this Python has 0.24.0" in missing["error"]
    assert missing["outcome"] == "missing"
