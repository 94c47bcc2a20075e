"""`flatbed trace` end to end on the CPU, with both engines, and with engines that do work of the capacity's size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.generation.continuous_batching import continuous_api, model_runner
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestStatus, create_warmup_future_states
from transformers.modeling_utils import AttentionInterface
from typer.testing import CliRunner

from flatbed.cli import app
from flatbed.errors import ConfigError
from flatbed.lab import models
from flatbed.lab.engines.base import EngineSpec, Settings, Setup
from flatbed.lab.engines.flatbed import FlatbedAdapter
from flatbed.lab.engines.transformers import TransformersAdapter
from flatbed.lab.measure import InProcess
from flatbed.lab.tables import console
from flatbed.lab.trace import free_path, run_trace
from flatbed.lab.trace_events import DECODE, PREFILL
from flatbed.lab.trace_names import CATEGORIES, DECODE_ATTENTION, IDLE, PREFILL_ATTENTION, PRODUCTS, ZEROING
from flatbed.lab.trace_render import render, said_of
from flatbed.lab.trace_watch import CONSTRUCTION, WARM_UP
from flatbed.lab.traced import Trace, TraceError, trace_adapter
from flatbed.lab.worker import Session
from flatbed.lab.workloads import Workload, make
from flatbed.model import runner
from flatbed.model.buffers import StepInputs, step_inputs

SETUP = Setup("shape:tiny", "cpu", "float32")
TOKEN_BUDGET = 256
_LOADED: list[Any] = []


def loaded() -> Any:
    if not _LOADED:
        _LOADED.append(models.load("shape:tiny", "cpu", "float32"))
    return _LOADED[0]


def tiny_workload(scale: float = 0.1) -> Workload:
    return make("article", 509, 2048, scale=scale)


def traced(
    engine: str | type, *, capacity: str = "4096 tokens", workload: Workload | None = None, **options: Any
) -> Trace:
    """A trace in this process, on a model that is loaded once."""
    text = engine if isinstance(engine, str) else f"{engine.__module__}.{engine.__qualname__}"
    spec = EngineSpec.parse(text)
    kinds = {"flatbed": FlatbedAdapter, "transformers": TransformersAdapter}
    kind: Any = kinds[spec.name] if isinstance(engine, str) else engine
    adapter = kind(spec, Settings(capacity=capacity, token_budget=TOKEN_BUDGET), SETUP)
    adapter.model, adapter.tokenizer = loaded()
    adapter.load()
    try:
        return trace_adapter(adapter, workload or tiny_workload(), **options)
    finally:
        adapter.close()
        loaded()[0].set_attn_implementation("sdpa")


# ---- both engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["flatbed", "transformers:sdpa", "transformers:eager"])
def test_a_trace_says_where_the_time_goes_and_what_attention_was_given(engine: str, tmp_path: Path) -> None:
    workload = tiny_workload()
    out = tmp_path / "trace.json"
    if engine.endswith("eager"):
        loaded()[0].set_attn_implementation("eager")
    found = traced(engine, workload=workload, out=out)
    assert found.tokens == workload.tokens
    # Every moment of the window is in one phase and one category.
    assert sum(sum(phase.values()) for phase in found.phases.values()) == pytest.approx(found.window)
    assert {CONSTRUCTION, PREFILL, DECODE} <= set(found.phases)
    assert {category for phase in found.phases.values() for category in phase} <= set(CATEGORIES)
    for category in (PREFILL_ATTENTION, DECODE_ATTENTION, PRODUCTS, IDLE):
        assert found.category(category) > 0
    assert found.phases[DECODE].get(PREFILL_ATTENTION, 0) == 0 == found.phases[PREFILL].get(DECODE_ATTENTION, 0)
    # One prefill of all prompts, then a step for each further token.
    prefill, decode = found.lengths
    steps = workload.requests[0].new_tokens - 1
    assert (prefill.kind, prefill.forwards, prefill.layers) == (PREFILL, 1, 2)
    assert prefill.queries == prefill.live == workload.prompt_tokens
    assert (decode.kind, decode.forwards) == (DECODE, steps)
    assert decode.live == sum(len(r.prompt) * steps + steps * (steps + 1) // 2 for r in workload.requests)
    assert (prefill.keys, decode.keys) == (prefill.live, decode.live)
    assert (found.ratio(PREFILL), found.ratio(DECODE)) == (1, 1)
    # SDPA and eager attention lay every query of the batch against every key of it, and mask what does not belong.
    dense = engine.startswith("transformers")
    assert decode.live_pairs == decode.live  # one query each
    assert decode.pairs == decode.live_pairs * (len(workload.requests) if dense else 1)
    assert any("belong together" in said for said in said_of(found)) == dense
    # The file is the profiler's own, and has the marks in it.
    names = {event.get("name") for event in json.loads(out.read_text())["traceEvents"]}
    assert {"flatbed trace: prefill", "flatbed trace: decode"} <= names
    assert found.file == str(out)
    assert Trace.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_second_call_is_traced_without_what_the_first_one_built() -> None:
    found = traced("flatbed", warm=True)
    assert found.warm
    assert CONSTRUCTION not in found.phases
    assert {row.phase for row in found.lengths} == {PREFILL, DECODE}


def test_nothing_stays_wrapped() -> None:
    owners = (
        model_runner.ModelRunner,
        continuous_api.ContinuousBatchProcessor,
        continuous_api.ContinuousBatchingManager,
        PagedAttentionCache,
    )
    before = [dict(vars(owner)) for owner in owners], dict(AttentionInterface._global_mapping)
    traced("transformers:sdpa")
    assert ([dict(vars(owner)) for owner in owners], dict(AttentionInterface._global_mapping)) == before


def test_layers_with_a_window_are_told_apart() -> None:
    from families import build

    workload = make("article", 211, 512, scale=0.3)
    lengths = {}
    for name, kind in (("flatbed", FlatbedAdapter), ("transformers:sdpa", TransformersAdapter)):
        adapter = kind(EngineSpec.parse(name), Settings(capacity="4096 tokens", token_budget=TOKEN_BUDGET), SETUP)
        adapter.model, adapter.tokenizer = build("gemma3"), None
        found = trace_adapter(adapter, workload)
        adapter.close()
        lengths[name] = {(row.kind, row.window): row for row in found.lengths}
        assert {(row.kind, row.window) for row in found.lengths} == {
            (kind_, window) for kind_ in (PREFILL, DECODE) for window in (None, 24)
        }
        assert lengths[name][DECODE, 24].live < lengths[name][DECODE, None].live
        assert any("over 2 layers" in said for said in said_of(found))
    flatbed_, theirs = lengths["flatbed"], lengths["transformers:sdpa"]
    assert {key: row.live for key, row in flatbed_.items()} == {key: row.live for key, row in theirs.items()}


# ---- work over empty capacity ----------------------------------------------------------------------------------------


def test_an_engine_that_attends_over_its_whole_capacity_shows_in_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flatbed, but every prompt is given K/V of the length of the pool."""
    blocks, size = 64, 32

    def whole(plan: Any, *more: Any) -> StepInputs:
        inputs = step_inputs(plan, *more)
        batch = inputs.batch
        if batch.decodes:
            return inputs
        count = len(batch.lengths)
        tables = np.tile(np.arange(blocks, dtype=np.int32), (count, 1))
        longer = dataclasses.replace(batch, lengths=np.full(count, blocks * size), tables=tables)
        return dataclasses.replace(inputs, batch=longer)

    monkeypatch.setattr(runner, "step_inputs", whole)
    workload = tiny_workload()
    found = traced("flatbed", capacity=f"{blocks * size} tokens", workload=workload)
    prefill = found.lengths[0]
    assert prefill.keys == blocks * size * len(workload.requests)
    assert prefill.live == workload.prompt_tokens
    assert found.ratio(PREFILL) == prefill.keys / prefill.live > 100
    assert found.ratio(DECODE) == 1
    said = said_of(found)[0]
    assert f"prefill attention ran over {prefill.keys:,} keys" in said
    assert f"of which {prefill.live:,} were live" in said


def test_a_warm_up_over_the_whole_pool_shows_in_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Transformers did up to 5.20: one batch that attends from the token budget over all of the pool."""

    def warmup(self: Any, model: Any) -> None:
        queries = 64
        past = self.cache.num_blocks * 256 - queries
        states = create_warmup_future_states(1, RequestStatus.PREFILLING, queries, past, self.cache)
        io = self.inputs_and_outputs
        io.prepare_batch_tensors(states, self.logit_processor, False, queries, past, use_padding=False)
        self.compute_batch(model, io.get_model_kwargs())
        self.cache.free_blocks(states[0].state.request_id)

    monkeypatch.setattr(model_runner.ModelRunner, "warmup", warmup)
    workload = tiny_workload()
    rows = {}
    for tokens in (2048, 4096):
        found = traced("transformers:sdpa", capacity=f"{tokens} tokens", workload=workload)
        row = next(row for row in found.lengths if row.phase == WARM_UP)
        assert (row.kind, row.queries, row.keys, row.live, row.copied) == (PREFILL, 64, tokens, 0, tokens)
        assert found.phases[WARM_UP][PREFILL_ATTENTION] > 0
        rows[tokens] = found
    assert rows[4096].ratio(PREFILL) == pytest.approx((4096 + workload.prompt_tokens) / workload.prompt_tokens)
    assert "were live" in said_of(rows[4096])[0]


def test_zeroing_of_a_larger_pool_shows(tmp_path: Path) -> None:
    """SDPA's mask spans the pool, and is filled when it is made."""
    small, large = (traced("transformers:sdpa", capacity=f"{n} blocks").category(ZEROING) for n in (8, 512))
    assert large > 3 * small


# ---- in a process of its own -----------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_leaves_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["trace", "--model", "shape:tiny", "--engine", "flatbed", "--scale", "0.05", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--capacity", "16 blocks"])
    assert result.exit_code == 0, result.output
    for said in (
        "matrix products",
        "decode attention",
        "prefill attention ran over",
        "were live",
        "trace-flatbed.json",
    ):
        assert said in result.output
    assert "transformers 5." in result.output
    assert (tmp_path / "trace-flatbed.json").is_file()
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.output)["file"].endswith("trace-flatbed-1.json")


def in_process(spec: EngineSpec, settings: Settings, setup: Setup) -> InProcess:
    return InProcess(Session(spec, settings, setup, loaded=loaded()))


class Broken(FlatbedAdapter):
    """Cannot be run."""

    def run(self, workload: Workload, *, latency: bool = False) -> Any:
        raise RuntimeError("the device is on fire")


@pytest.mark.filterwarnings("ignore::flatbed.FlatbedWarning")
@pytest.mark.parametrize(
    ("engine", "settings", "told"),
    [
        ("nonsense", Settings(), "nonsense"),
        ("flatbed:nonsense", Settings(), "nonsense"),
        ("vllm", Settings(), "cannot be traced"),
        ("transformers@9.9.9", Settings(), "9.9.9"),
        (f"{__name__}.Broken", Settings(), "on fire"),
        ("flatbed", Settings(capacity="32 tokens"), "requests failed"),
    ],
)
def test_an_engine_that_cannot_be_run_is_told(engine: str, settings: Settings, told: str) -> None:
    with pytest.raises(TraceError) as error:
        run_trace(EngineSpec.parse(engine), settings, SETUP, tiny_workload(0.3), start=in_process)
    assert told in str(error.value)


def test_bad_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--gpu-only"):
        run_trace(EngineSpec.parse("flatbed"), Settings(), SETUP, tiny_workload(), gpu_only=True, start=in_process)
    taken = tmp_path / "there.json"
    taken.write_text("mine")
    with pytest.raises(ConfigError, match=r"there\.json"):
        free_path(taken, EngineSpec.parse("flatbed"))
    with pytest.raises(ConfigError, match="no folder"):
        free_path(tmp_path / "none" / "trace.json", EngineSpec.parse("flatbed"))
    result = CliRunner().invoke(
        app, ["trace", "--model", "shape:tiny", "--engine", "flatbed", "--out", str(taken), "--device", "cpu"]
    )
    assert result.exit_code == 2
    assert taken.read_text() == "mine"


def test_what_is_not_classified_is_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = traced("flatbed")
    strange = dataclasses.replace(
        found, names=[dataclasses.replace(found.names[0], name="secret_kernel", category="not classified")]
    )
    render(strange, console())
    assert "not classified: secret_kernel" in capsys.readouterr().out
