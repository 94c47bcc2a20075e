"""The lab's adapters of Flatbed, Transformers and padded generate, on a tiny model on the CPU."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

from flatbed.errors import ConfigError
from flatbed.lab import assert_flat, models
from flatbed.lab.engines import transformers as transformers_engine
from flatbed.lab.engines.base import Adapter, EngineSpec, MissingEngine, ModelAdapter, Settings, Setup, adapter_class
from flatbed.lab.workloads import LabRequest, Workload

SETUP = Setup("shape:tiny", "cpu", "float32", longest=64, seed=1)
WORK = Workload("w", tuple(LabRequest([1 + i, 2, 3, 4, 5], 8) for i in range(4)))
UNEVEN = Workload("uneven", (LabRequest([1, 2, 3], 3), LabRequest([4, 5], 9), LabRequest([6], 1)))
SAMPLED = Workload("sampled", (LabRequest([1, 2, 3], 4), LabRequest([4], 4)), temperature=1.0, n=3, logprobs=True)
ENGINES = ("flatbed", "transformers:sdpa", "transformers:sdpa,persistent", "generate")


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load("shape:tiny", "cpu", "float32", "sdpa")[0]


def engine(
    model: Any, text: str, capacity: str | None = "8 blocks", token_budget: int | None = 64, **more: Any
) -> Adapter:
    spec = EngineSpec.parse(text)
    made = adapter_class(spec)(spec, Settings(capacity, token_budget, **more), SETUP)
    assert isinstance(made, ModelAdapter)
    made.model = model
    made.load()
    return made


@pytest.mark.parametrize("work", [WORK, UNEVEN, SAMPLED], ids=lambda work: work.name)
@pytest.mark.parametrize("text", ENGINES)
def test_every_engine_makes_the_workload(model: Any, text: str, work: Workload) -> None:
    made = engine(model, text)
    made.construct(work)
    made.warm_up()
    first = made.run(work)
    timed = made.run(work.varied(1), latency=True)
    memory, facts = made.memory(), made.facts()
    made.close()
    made.close()
    for result in (first, timed):
        assert result.error is None
        assert result.tokens == work.tokens
        assert result.parts is not None
        assert sum(result.parts.values()) == pytest.approx(result.seconds)
        assert min(result.parts.values()) >= 0
        assert result.preemptions == 0
    assert first.first_token_s == [] == first.between_tokens_s
    samples = 1 if text == "generate" else len(work.requests) * (work.n if text == "flatbed" else 1)
    assert len(timed.first_token_s) == samples
    assert 0 < min(timed.first_token_s) <= max(timed.first_token_s) < timed.seconds
    assert timed.between_tokens_s
    assert memory.committed is not None
    assert memory.live is not None
    assert 0 < memory.live <= memory.committed
    assert memory.outside_torch == 0
    if text != "generate":
        assert memory.capacity_tokens == 8 * 256
    assert (facts["device"], facts["dtype"], facts["attn_implementation"]) == ("cpu", "float32", "sdpa")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("text", ["flatbed", "transformers:sdpa"])
def test_arrivals_are_honoured(model: Any, text: str) -> None:
    made = engine(model, text)
    work = Workload("w", (LabRequest([1, 2], 2, arrival_s=0.4), LabRequest([3], 2)))
    made.construct(work)
    result = made.run(work, latency=True)
    made.close()
    assert result.tokens == 4
    assert result.seconds > 0.4
    assert result.notes == []


def test_padded_generate_says_that_it_ignores_arrivals(model: Any) -> None:
    made = engine(model, "generate")
    work = Workload("w", (LabRequest([1, 2], 2, arrival_s=30.0), LabRequest([3], 5)))
    made.construct(work)
    result = made.run(work)
    assert result.tokens == 7
    assert result.seconds < 30
    assert [note.split(":")[0] for note in result.notes] == [
        "arrivals are ignored",
        "every row runs to the longest completion; only the tokens asked for are counted",
    ]


def test_transformers_is_split_by_phase(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow pool, a slow warm-up and a slow end are found where they are."""
    manager = transformers_engine._manager_class()
    create, warmup, stop = manager._create_batch_processor, manager.warmup, manager.stop

    def slow(original: Any, seconds: float) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            time.sleep(seconds)
            return result

        return method

    def only_when_new(self: Any) -> Any:
        return create(self) if self.batch_processor is not None else slow(create, 0.3)(self)

    monkeypatch.setattr(manager, "_create_batch_processor", only_when_new)
    monkeypatch.setattr(manager, "warmup", slow(warmup, 0.6))
    monkeypatch.setattr(manager, "stop", slow(stop, 0.9))
    before = (manager._create_batch_processor, manager.warmup, manager.stop)
    made = engine(model, "transformers:sdpa")
    made.construct(WORK)
    result = made.run(WORK)
    parts = result.parts
    assert parts is not None
    assert parts["construction"] >= 0.3
    assert parts["warm_up"] >= 0.6
    assert parts["teardown"] >= 0.9
    assert parts["generation"] > 0
    assert sum(parts.values()) == pytest.approx(result.seconds)
    assert (manager._create_batch_processor, manager.warmup, manager.stop) == before
    cold = engine(model, "transformers:sdpa,warmup=false")
    cold.construct(WORK)
    parts = cold.run(WORK).parts
    assert parts is not None
    assert parts["construction"] >= 0.3
    assert parts["warm_up"] == 0


def test_a_persistent_manager_is_built_once(model: Any) -> None:
    made = engine(model, "transformers:sdpa,persistent")
    made.construct(WORK)
    first, second = made.run(WORK), made.run(WORK.varied(1))
    assert first.parts is not None
    assert second.parts is not None
    assert first.parts["construction"] > 0
    assert second.parts["construction"] == second.parts["warm_up"] == 0
    assert made.memory().capacity_tokens == 8 * 256
    made.close()
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert TransformersAdapter.holding(made.spec) == "always"
    assert TransformersAdapter.holding(EngineSpec.parse("transformers:sdpa")) == "in calls"


TransformersAdapter = transformers_engine.TransformersAdapter


@pytest.mark.parametrize("name", ["_create_batch_processor", "warmup", "stop"])
def test_another_version_without_these_names_is_not_split(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    named = transformers_engine._named
    manager = transformers_engine._manager_class()

    class Lacking:
        """The manager's class with one name less, as far as the probe can see."""

        __name__ = manager.__name__

        def __getattr__(self, wanted: str) -> Any:
            if wanted == name:
                raise AttributeError(wanted)
            return getattr(manager, wanted)

        def __setattr__(self, changed: str, value: Any) -> None:
            setattr(manager, changed, value)

    lacking = Lacking()
    monkeypatch.setattr(
        transformers_engine,
        "_named",
        lambda module, wanted: lacking if wanted == manager.__name__ else named(module, wanted),
    )
    made = engine(model, "transformers:sdpa")
    made.construct(WORK)
    result = made.run(WORK)
    assert result.tokens == WORK.tokens
    assert result.parts is None
    (note,) = result.notes
    assert note == f"not split by phase: this Transformers has no ContinuousBatchingManager.{name}"


def test_a_transformers_without_continuous_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_engine, "_named", lambda module, name: None)
    with pytest.raises(MissingEngine, match="has no continuous batching"):
        TransformersAdapter.import_packages()


def test_names_of_other_versions_are_told_from_a_broken_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transformers_engine._named("continuous_api", "NoSuchClass") is None
    assert transformers_engine._named("no_such_module", "NoSuchClass") is None

    def broken(path: str) -> Any:
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(MissingEngine, match="transformers cannot be imported: No module named 'httpx'"):
        TransformersAdapter.import_packages()

    def wrong(path: str) -> Any:
        raise ImportError("cannot import name 'x' from 'torch'", name="torch")

    monkeypatch.setattr(importlib, "import_module", wrong)
    with pytest.raises(ImportError, match="cannot import name 'x'") as told:
        TransformersAdapter.import_packages()
    assert not isinstance(told.value, MissingEngine), "it is broken, not missing"
    with pytest.raises(ImportError, match="cannot import name 'x'"):
        transformers_engine._named("continuous_api", "ContinuousBatchingManager")


def test_settings_reach_transformers(model: Any) -> None:
    made = engine(
        model, "transformers:sdpa,page_size=32,use_cuda_graph=false,max_requests_per_batch=3", "4 blocks",
        token_budget=96, schedule="prefill_first",
    )  # fmt: skip
    made.construct(WORK)
    made.run(WORK)
    facts = made.facts()
    wanted = {
        "num_blocks": 32, "page_size": 32, "max_batch_tokens": 96, "scheduler_type": "prefill_first",
        "auto_switch_to_flash": False, "max_requests_per_batch": 3, "seed": 1,
    }  # fmt: skip
    assert {name: facts[name] for name in wanted} == wanted
    assert made.memory().capacity_tokens == 4 * 256
    with pytest.raises(ConfigError, match=r"unknown ContinuousBatchingConfig field 'nonsense'; known: .*page_size"):
        engine(model, "transformers:sdpa,nonsense=1").construct(WORK)


@pytest.mark.parametrize(
    ("capacity", "fields"),
    [
        ("64 blocks", {"num_blocks": 64}),
        ("1000 tokens", {"num_blocks": 4}),
        ("25%", {"max_memory_percent": 0.25}),
        ("1 MiB", {"num_blocks": 8}),
        (None, {}),
    ],
)
def test_capacities_of_transformers(capacity: str | None, fields: dict[str, Any]) -> None:
    assert transformers_engine.capacity_fields(Settings(capacity), 256, token_bytes=512) == fields


def test_settings_reach_flatbed(model: Any) -> None:
    made = engine(model, "flatbed:torch,prefix_cache=false,block_size=16", "2 blocks", token_budget=40)
    made.construct(WORK)
    facts = made.facts()
    assert {name: facts[name] for name in ("attention", "prefix_cache", "block_size", "token_budget", "capacity")} == {
        "attention": "torch", "prefix_cache": False, "block_size": 16, "token_budget": 40, "capacity": "512 tokens",
    }  # fmt: skip
    assert made.memory().capacity_tokens == 512
    made.close()


@pytest.mark.parametrize("text", ["flatbed:block_size=16", "transformers:sdpa,page_size=16"])
def test_preemptions_are_seen(model: Any, text: str) -> None:
    work = Workload("w", tuple(LabRequest([1 + i] * 20, 40) for i in range(3)))
    made = engine(model, text, "96 tokens")
    made.construct(work)
    result = made.run(work)
    made.close()
    assert result.tokens == work.tokens
    assert result.preemptions is not None
    assert result.preemptions > 0


def test_a_request_that_never_fits_is_an_error_of_the_run(model: Any) -> None:
    work = Workload("w", (LabRequest([1] * 300, 80), LabRequest([1], 2)))
    made = engine(model, "flatbed", "1 blocks")
    made.construct(work)
    with pytest.warns(match="requests failed"):
        result = made.run(work)
    made.close()
    assert result.error is not None
    assert result.error.startswith("1 of 2 requests failed: request")


def test_eos_ends_a_completion_only_when_asked() -> None:
    """The model says the same token over and over; that token is its EOS."""
    model, _ = models.load("shape:tiny", "cpu", "float32", "sdpa")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.generation_config.eos_token_id = 0
    for text in ENGINES:
        made = engine(model, text)
        fixed = Workload("w", WORK.requests)
        until = Workload("w", WORK.requests, fixed_lengths=False)
        counts = []
        for work in (fixed, until):
            made.construct(work)
            counts.append(made.run(work).tokens)
            made.close()
        assert counts == [32, 4], text
        assert model.generation_config.eos_token_id == 0


def test_a_loaded_model_keeps_its_attention(model: Any) -> None:
    with pytest.raises(ConfigError, match="loaded with attention 'sdpa'; load it with attn_implementation='eager'"):
        engine(model, "transformers:eager")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_shapes_are_the_published_ones() -> None:
    small, large = models.load_config("shape:qwen2.5-0.5b"), models.load_config("shape:qwen3-8b")
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (896, 24, 151936)
    assert (large.hidden_size, large.num_hidden_layers, large.head_dim) == (4096, 36, 128)
    assert models.kv_token_bytes(small, 2) == 2 * 24 * 2 * 64 * 2
    assert models.kv_token_bytes(large, 2) == 2 * 36 * 8 * 128 * 2
    assert (models.longest_of(small), models.vocabulary_of(small)) == (32768, 151936)
    for config in (small, large):
        assert config.eos_token_id is None


def test_shapes_have_the_same_weights_everywhere(tmp_path: Any) -> None:
    one, other = (models.load("shape:tiny", "cpu", "float32")[0] for _ in range(2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    folder = models.save("shape:tiny", tmp_path / "checkpoint")
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert models.save("shape:tiny", folder) == folder
    assert written == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, tokenizer = models.load(str(folder), "cpu", "float32")
    assert tokenizer is None
    assert torch.equal(again.lm_head.weight, one.lm_head.weight.bfloat16().float())
    assert models.save(str(folder), "elsewhere") == folder


@pytest.mark.parametrize("name", ["shape:none", "./no/such/folder"])
def test_models_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'none'; known: qwen2.5-0.5b|cannot read the config of model"):
        models.load_config(name)
    assert models.load_tokenizer("shape:tiny") is None


def test_an_attention_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="attention 'flash_attention_2' cannot be used here"):
        models.load("shape:tiny", "cpu", "float32", "flash_attention_2")


# ---- assert_flat -----------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_assert_flat_on_ones_own_model(model: Any) -> None:
    before = model.training, model.config._attn_implementation
    verdict = assert_flat(model, workload=WORK, capacities=("1 blocks", "50%"), limit=4, repeats=4)
    assert " from 1 blocks to " in verdict
    assert (model.training, model.config._attn_implementation) == before


@pytest.mark.timing
def test_assert_flat_finds_growth_and_says_where() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_flat(
            "shape:tiny", engine="test_lab_engines.Zeroing", workload=WORK, capacities=("1 MiB", "512 MiB"), limit=4,
            device="cpu", repeats=3,
        )  # fmt: skip
    said = str(raised.value)
    assert "test_lab_engines.Zeroing on w: steady calls grow" in said
    assert "from 1 MiB to 512 MiB, all of it in generation (the gate is 4)" in said
    assert said.count("\n") == 2


def test_assert_flat_names_failures() -> None:
    with pytest.raises(AssertionError, match="4 blocks: refused in the start: unknown ContinuousBatchingConfig field"):
        assert_flat(
            "shape:tiny", engine="transformers:nonsense=1", workload=WORK, capacities=("4 blocks",), device="cpu"
        )


class Zeroing(ModelAdapter):
    """Fills memory of the size of its capacity in every call."""

    package = "torch"

    @classmethod
    def holding(cls, spec: EngineSpec) -> Any:
        return "live"

    def construct(self, workload: Workload) -> dict[str, float]:
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> Any:
        from flatbed.lab.engines.base import RunResult

        amount = self.settings.capacity_amount
        assert amount is not None
        start = time.perf_counter()
        torch.ones(int(amount.amount), dtype=torch.uint8)
        seconds = time.perf_counter() - start
        return RunResult(seconds, workload.tokens, {"generation": seconds})

    def memory(self) -> Any:
        from flatbed.lab.engines.base import MemoryResult

        return MemoryResult()

    def close(self) -> None:
        pass
