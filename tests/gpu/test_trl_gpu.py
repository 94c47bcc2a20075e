"""Rollouts in TRL on a CUDA device: graphs that live through training, mixed precision in them, memory given back."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytest.importorskip("trl")

from trl_training import GREEDY, QUIET, Seen, logged, make_trainer, tiny_model, train

pytestmark = [pytest.mark.gpu, QUIET]

CUDA: dict[str, Any] = {"use_cpu": False}
UNCORRECTED: dict[str, dict[str, Any]] = {"grpo": {"vllm_importance_sampling_correction": False}, "rloo": {}}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_five_steps_are_those_of_padded_generate(algorithm: str, tmp_path: Path) -> None:
    options = {"generation_kwargs": GREEDY, **CUDA, **UNCORRECTED[algorithm]}
    _, padded = train(algorithm, tmp_path, on_flatbed=False, **options)
    trainer, rolled = train(algorithm, tmp_path, on_flatbed=True, **options)
    assert rolled.completions == padded.completions
    assert rolled.completions[0] != rolled.completions[1]
    assert trainer.flatbed.engine.memory().committed == 0


def test_graphs_that_may_not_stay_are_captured_again(tmp_path: Path) -> None:
    def watch() -> None:
        engine = trainer.flatbed.engine
        held.append((engine.memory().committed, engine.memory().graphs, len(engine._steps._graphs)))

    held: list[tuple[int, int, int]] = []
    options = {"generation_kwargs": GREEDY, **CUDA, **UNCORRECTED["grpo"]}
    _, padded = train("grpo", tmp_path, on_flatbed=False, **options)
    more = {"flatbed": {"held": "1 KB"}}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, reward=Seen(watch), more=more, **options)
    trainer.train()
    assert trainer.reward_funcs[0].completions == padded.completions
    assert held == [(0, 0, 0)] * 5


def test_graphs_and_addresses_live_through_training(tmp_path: Path) -> None:
    found: list[Any] = []

    def watch() -> None:
        engine = trainer.flatbed.engine
        assert (engine.memory().committed, engine.memory().live) == (0, 0)
        graphs = engine._steps._graphs
        found.append((set(map(id, graphs._graphs.values())), engine._pool.layers[0].key.data_ptr()))

    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, reward=Seen(watch), **CUDA)
    trainer.train()
    graphs, addresses = zip(*found, strict=True)
    assert len(graphs[0]) >= 1
    assert all(before <= after for before, after in pairwise(graphs)), "none was captured again"
    assert len(set(addresses)) == 1


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_graphs_in_mixed_precision_see_every_update(masters: torch.dtype, tmp_path: Path) -> None:
    """Weights that autocast had cast once and kept would be those of the capture: far from what is trained."""
    model = tiny_model(initializer_range=0.1).to(masters)
    options = {"bf16": True, "learning_rate": 3e-2, "temperature": 1.0, **CUDA}
    trainer, _ = train("grpo", tmp_path, on_flatbed=True, model=model, **options)
    engine = trainer.flatbed.engine
    assert engine._pool.dtype == torch.bfloat16
    assert engine._steps._graphs.refused is None
    assert len(engine._steps._graphs) >= 1
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {masters}
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05


def test_log_probabilities_in_float32(tmp_path: Path) -> None:
    model = tiny_model(initializer_range=0.1)
    trainer, _ = train("grpo", tmp_path, on_flatbed=True, model=model, temperature=0.7, learning_rate=1e-3, **CUDA)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
