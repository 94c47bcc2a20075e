"""What Flatbed relies on in TRL (1.7 to 1.16) and in accelerate: a change there fails the test that says what moved.

Another version is looked at with its folder (`pip install --no-deps --target FOLDER trl==1.7.0`) in PYTHONPATH.
"""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset
from packaging.version import Version
from tiny import byte_tokenizer
from transformers import ContinuousBatchingConfig, GenerationConfig
from trl.distributed import DistributedBackend
from trl_training import GREEDY, GROUP, NEW, QUIET, ROWS, Seen, accelerator, arguments, make_trainer, tiny_model

from flatbed.integrations import trl as ours

pytestmark = QUIET

ALGORITHMS = ("grpo", "rloo")


class Spy:
    """Stands where `Rollouts` stand, and answers every prompt with the same two tokens."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.synced = 0

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        prompts = kwargs["prompts"]
        return prompts, [[7, 8] for _ in prompts], [[[-0.5], [-0.25]] for _ in prompts], [[[7], [8]] for _ in prompts]


def spied(algorithm: str, folder: Path, **kwargs: Any) -> tuple[Any, Spy]:
    trainer = make_trainer(algorithm, folder, on_flatbed=True, **kwargs)
    spy = trainer.vllm_generation = Spy()
    return trainer, spy


def test_the_versions_that_were_read() -> None:
    assert Version("1.7") <= Version(trl.__version__) < Version("1.17"), "read the trainers' sources, then widen this"
    assert Version("5.8") <= Version(tf.__version__)


@pytest.mark.parametrize("kind", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_trls_trainers_have_what_is_used_of_them(kind: type, tmp_path: Path) -> None:
    algorithm = "grpo" if kind is trl.GRPOTrainer else "rloo"
    trainer = make_trainer(algorithm, tmp_path, on_flatbed=False)
    for name in ours._NEEDED:
        assert hasattr(trainer, name), name
    assert trainer.use_vllm is False
    for name in ("temperature", "top_p", "top_k", "min_p", "_tokenizer", "processing_class", "state", "args"):
        assert hasattr(trainer, name), name
    assert hasattr(trainer.args, "ds3_gather_for_generation")
    assert isinstance(trainer.generation_config, GenerationConfig)
    assert trainer.generation_config.max_new_tokens == NEW
    assert list(inspect.signature(kind._generate).parameters)[:2] == ["self", "prompts"]  # type: ignore[attr-defined]


def test_only_grpo_takes_log_probabilities(tmp_path: Path) -> None:
    for algorithm in ALGORITHMS:
        trainer = make_trainer(algorithm, tmp_path, on_flatbed=False)
        assert hasattr(trainer, "vllm_importance_sampling_correction") == (algorithm == "grpo")
    modes = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        assert mode in modes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_asks_for_completions_once_with_these_arguments(algorithm: str, tmp_path: Path) -> None:
    trainer, spy = spied(algorithm, tmp_path, max_steps=2)
    trainer.train()
    assert [set(call) for call in spy.calls] == [{"prompts", "images", "num_generations", "profiler"}] * 2
    for call in spy.calls:
        assert len(call["prompts"]) == ROWS
        assert all(isinstance(token, int) for prompt in call["prompts"] for token in prompt)
        assert (call["images"], call["num_generations"]) == (None, GROUP)
        assert isinstance(call["profiler"], AbstractContextManager)
    assert spy.synced == 2
    assert trainer.reward_funcs[0].completions == [[[7, 8]] * ROWS] * 2
    assert set(inspect.signature(ours.Rollouts.generate).parameters) == {"self", *spy.calls[0]}


def test_log_probabilities_come_as_lists_of_one_for_each_token(tmp_path: Path) -> None:
    trainer, _ = spied("grpo", tmp_path)
    given: list[Any] = []
    own = trainer._generate

    def watch(prompts: Any) -> Any:
        given.append(own(prompts))
        return given[-1]

    trainer._generate = watch
    trainer.args.max_steps = 1
    trainer.train()
    assert [[-0.5, -0.25]] * ROWS in list(given[0]), "flattened by TRL"


def test_the_correction_is_switched_by_use_vllm_and_its_own_option(tmp_path: Path) -> None:
    def logs(**kwargs: Any) -> set[str]:
        trainer, _ = spied("grpo", tmp_path, max_steps=1, **kwargs)
        trainer.train()
        return {name for entry in trainer.state.log_history for name in entry if name.startswith("sampling/")}

    told = {f"sampling/importance_sampling_ratio/{what}" for what in ("min", "mean", "max")}
    told |= {f"sampling/sampling_logp_difference/{what}" for what in ("mean", "max")}
    assert logs() == told
    assert logs(vllm_importance_sampling_correction=False) == set()
    gate = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert gate in inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    assert gate in inspect.getsource(trl.GRPOTrainer._compute_loss)


def test_what_use_vllm_switches_beside_that_is_known() -> None:
    """Every place in which the trainers look at it: a new one needs a look."""
    places = {
        "GRPOTrainer": {
            "__init__",
            "_generate_single_turn",
            "_tool_call_loop",
            "_generate",
            "_generate_and_score_completions",
            "_compute_loss",
            "compute_liger_loss",
        },
        "RLOOTrainer": {"__init__", "_generate_single_turn"},
    }
    for name, known in places.items():
        methods = inspect.getmembers(getattr(trl, name), inspect.isfunction)
        looking = {method for method, code in methods if re.search(r"\buse_vllm\b", inspect.getsource(code))}
        assert looking <= known, name
    tools = inspect.getsource(trl.GRPOTrainer._tool_call_loop)
    assert 'self.use_vllm and self.vllm_mode == "colocate"' in tools, "any other mode takes the model's own limit"


def test_how_sharded_weights_are_told_and_gathered() -> None:
    for name in ("gather_params", "summon_full_params", "is_zero3"):
        assert hasattr(DistributedBackend, name), name
    backend = DistributedBackend(accelerator())
    assert (backend.is_zero3, backend.fsdp_version) == (False, None)
    assert "kwargs" in inspect.signature(DistributedBackend.summon_full_params).parameters
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    assert {"recurse", "writeback"} <= set(inspect.signature(FullyShardedDataParallel.summon_full_params).parameters)
    assert hasattr(FSDPModule, "unshard")
    assert hasattr(FSDPModule, "reshard")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_trls_own_continuous_batching_asks_of_the_model(algorithm: str, tmp_path: Path) -> None:
    """The way that `flatbed.install` serves."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def generate_batch(*args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append((args, kwargs))
        return {f"{at}": type("Result", (), {"generated_tokens": [7, at + 9]}) for at in range(len(args[0]))}

    model = tiny_model()
    model.__dict__["generate_batch"] = generate_batch
    trainer = make_trainer(
        algorithm, tmp_path, on_flatbed=False, model=model, use_transformers_continuous_batching=True, max_steps=1
    )
    trainer.train()
    ((args, kwargs),) = calls
    assert len(args) == 1
    assert len(args[0]) == ROWS
    assert set(kwargs) == {"generation_config", "continuous_batching_config", "progress_bar"}
    assert isinstance(kwargs["generation_config"], GenerationConfig)
    assert isinstance(kwargs["continuous_batching_config"], ContinuousBatchingConfig)
    assert trainer.reward_funcs[0].completions == [[[7, at + 9] for at in range(ROWS)]], "in order, these tokens alone"
    from flatbed.integrations.transformers import GenerateBatch

    assert set(kwargs) <= set(inspect.signature(GenerateBatch.__call__).parameters)


def test_arguments_of_the_trainers_pass_through_to_trls_own(tmp_path: Path) -> None:
    for name in ("GRPOTrainer", "RLOOTrainer"):
        assert issubclass(getattr(ours, name), getattr(trl, name))
    assert "flatbed" not in inspect.signature(trl.GRPOTrainer).parameters
    rows = Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}])
    trainer = ours.GRPOTrainer(tiny_model(), Seen(), arguments("grpo", tmp_path), rows, None, byte_tokenizer())
    assert trainer.use_vllm


def test_the_precision_that_trl_runs_its_own_forward_in() -> None:
    names = ("_get_per_token_logps_and_entropies", "_full_logits_logps")  # the second is 1.14's, which the first calls
    methods = [getattr(trl.GRPOTrainer, name) for name in names if hasattr(trl.GRPOTrainer, name)]
    source = "".join(map(inspect.getsource, methods))
    if "self.accelerator.autocast()" not in source:  # earlier: only what accelerate put into the model's forward
        assert "model(**model_inputs)" in source
    with accelerator("bf16").autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_what_the_shadow_uses_of_autocast() -> None:
    assert torch.autocast("cpu", torch.bfloat16)._cache_enabled is True
    assert torch.autocast("cpu", torch.bfloat16, cache_enabled=False)._cache_enabled is False


def test_the_prompts_of_a_group_stand_together(tmp_path: Path) -> None:
    """Not relied on (equal prompts are found wherever they are), but what `num_generations` means."""
    trainer, spy = spied("grpo", tmp_path, distinct=False, max_steps=1, generation_kwargs=GREEDY)
    trainer.train()
    prompts = spy.calls[0]["prompts"]
    assert [prompts.index(prompt) for prompt in prompts] == [at // GROUP * GROUP for at in range(ROWS)]
