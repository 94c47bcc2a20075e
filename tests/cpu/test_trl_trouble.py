"""When something goes wrong in a TRL step: a clear error, the model as it was, and training that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import PromptTuningConfig
from tiny import assert_idle, byte_tokenizer, changes, snapshot
from transformers import BloomConfig, BloomForCausalLM
from trl_training import GREEDY, NEW, PROMPTS, QUIET, ROWS, Seen, logged, make_trainer, tiny_model, train

from flatbed.errors import CapacityError, ConfigError, ModelForwardError, NonFiniteLogitsError, UnsupportedModelError
from flatbed.integrations.trl import use_flatbed

pytestmark = QUIET


def tokens_of(texts: list[str]) -> list[list[int]]:
    return [byte_tokenizer()(text)["input_ids"] for text in texts]


def assert_goes_on(trainer: Any, steps: int = 2) -> None:
    """Nothing is under way, no memory is held, and the trainer can train."""
    engine = trainer.flatbed.engine
    assert_idle(engine)
    assert engine.memory().committed == 0
    before = trainer.state.global_step
    trainer.args.max_steps = before + steps
    trainer.train()
    assert trainer.state.global_step == before + steps
    assert_idle(engine)


# ---- a generation changes nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_after_a_generation_what_it_was_before(
    training: bool, checkpointing: bool, tmp_path: Path
) -> None:
    """Mode, checkpointing, cache, attention, dtype, hooks, forward, parameters: in the middle of training, where
    accelerate and TRL have put forwards of their own into it."""
    found: list[list[str]] = []

    def watch() -> None:
        model = trainer.model
        model.train(training)
        model.config.use_cache = training
        before = snapshot(model)
        flags = [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
        assert (True in flags) == checkpointing
        trainer.flatbed.generate(tokens_of(PROMPTS), None, 1)
        found.append(changes(before, model))
        assert [getattr(module, "gradient_checkpointing", None) for module in model.modules()] == flags
        model.train()

    options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "bf16": True, "max_steps": 2}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, reward=Seen(watch), **options)
    trainer.train()
    assert found == [[], []]


def test_trls_generation_is_not_needed_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tiny_model()), "generate", None)
    train("rloo", tmp_path, on_flatbed=True, max_steps=1)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("error", [ValueError("no reward"), KeyboardInterrupt()])
def test_a_reward_function_that_raises(error: BaseException, algorithm: str, tmp_path: Path) -> None:
    def fail_in_the_second_step(on_flatbed: bool) -> tuple[Any, set[str]]:
        """The trainer, and what of its model (weights aside) is no longer as it was before training."""

        def watch() -> None:
            if len(seen.completions) == 1:
                seen.completions.append([])
                raise error

        seen = Seen(watch)
        trainer = make_trainer(algorithm, tmp_path, on_flatbed=on_flatbed, reward=seen)
        before = snapshot(trainer.model)
        with pytest.raises(type(error)):
            trainer.train()
        return trainer, {name for name in changes(before, trainer.model) if not name.startswith("tensor")}

    _, by_training = fail_in_the_second_step(False)
    trainer, touched = fail_in_the_second_step(True)
    assert touched <= by_training
    assert_goes_on(trainer)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a kernel failed")])
def test_a_generation_that_is_interrupted(error: BaseException, tmp_path: Path, monkeypatch: Any) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True)
    runner = trainer.flatbed.engine._runner
    own, calls = runner.forward, []

    def forward(plan: Any) -> torch.Tensor:
        calls.append(plan)
        if len(calls) == NEW + 4:  # in the middle of the second generation
            state.append(snapshot(trainer.model))
            raise error
        return own(plan)

    state: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "forward", forward)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ModelForwardError):
        trainer.train()
    assert trainer.state.global_step == 1
    assert changes(state[0], trainer.model) == []
    assert_goes_on(trainer)


def test_a_prompt_that_is_too_long_for_the_capacity(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPTS[0]}, {"prompt": "long " * 30}]
    options: dict[str, Any] = {"more": {"flatbed": {"capacity": "96 tokens"}}, "rows": rows, "distinct": False}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, **options)
    with pytest.raises(CapacityError, match=rf"prompt 5 of {ROWS}.*capacity.*'96 tokens'"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.train_dataset = Dataset.from_list([{"prompt": "short"}, {"prompt": "shorter"}])
    assert_goes_on(trainer)


def test_a_model_that_gives_nan(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True)
    kept = trainer.model.lm_head.weight.detach().clone()
    with torch.no_grad():
        trainer.model.lm_head.weight[:] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match=f"prompt 1 of {ROWS}"):
        trainer.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(kept)
    assert_goes_on(trainer)


def test_completions_end_with_the_models_positions(tmp_path: Path) -> None:
    """As vLLM's do. TRL itself only leaves out prompts that are longer than the model."""
    options: dict[str, Any] = {"max_completion_length": 40, "generation_kwargs": {"eos_token_id": None}}
    model = tiny_model(max_position_embeddings=64, eos_token_id=None)
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, model=model, **options)
    prompts = [[5] * 63, [6] * 50, [7] * 10]
    assert [len(ids) for ids in trainer.flatbed.generate(prompts, None, 1)[1]] == [1, 14, 40]
    with pytest.raises(CapacityError, match="64 positions"):
        trainer.flatbed.generate([[5] * 64], None, 1)


# ---- what cannot be, said at construction ----------------------------------------------------------------------------


def test_an_unsupported_model_is_refused_at_construction(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=len(byte_tokenizer()), hidden_size=32, n_layer=1, n_head=2, eos_token_id=0)
    with pytest.raises(UnsupportedModelError, match=r"Bloom.*attention interface"):
        make_trainer("grpo", tmp_path, on_flatbed=True, model=BloomForCausalLM(config))
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        make_trainer("grpo", tmp_path, on_flatbed=True, more={"peft_config": prompt})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"capacity": "many"}, "unknown capacity 'many'"),
        ({"blocks": 3}, "unknown engine setting 'blocks'"),
        ({"logprobs": "both"}, "unknown kind of log-probabilities 'both'; known: processed, raw"),
        ({"token_budget": 0}, "token_budget must be"),
        ({"held": "50%"}, "unknown amount held '50%'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=False, generation_kwargs=GREEDY, max_steps=1)
    before = dict(vars(trainer))
    with pytest.raises(ConfigError, match=told):
        use_flatbed(trainer, **settings)
    assert vars(trainer) == before, "and the trainer is TRL's own, as it was"
    trainer.train()


def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True)
    with pytest.raises(ConfigError, match=r"vLLM or Flatbed already"):
        use_flatbed(trainer)


def test_a_loss_that_needs_ratios_of_tokens(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss_type": "vespo", "max_steps": 1}
    with pytest.raises(ConfigError, match=r"vllm_importance_sampling_mode.*'sequence_mask'"):
        make_trainer("grpo", tmp_path, on_flatbed=True, vllm_importance_sampling_mode="sequence_mask", **options)
    train("grpo", tmp_path, on_flatbed=True, vllm_importance_sampling_mode="token_truncate", **options)


def test_other_trainers_are_refused_by_name() -> None:
    class Other:
        use_vllm = False

    with pytest.raises(ConfigError, match=f"Other of TRL {trl.__version__} lacks _generate, "):
        use_flatbed(Other())


def test_images_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True)
    with pytest.raises(ConfigError, match="images"):
        trainer.flatbed.generate(tokens_of(PROMPTS), [["an image"], None], 1)
    assert len(trainer.flatbed.generate(tokens_of(PROMPTS), [None, None], 1)[1]) == 2


def test_weights_that_zero3_leaves_in_pieces_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, on_flatbed=False, ds3_gather_for_generation=False)
    trainer._dist.zero_stage = 3
    with pytest.raises(ConfigError, match="ds3_gather_for_generation=False"):
        use_flatbed(trainer)


# ---- rollouts of one's own -------------------------------------------------------------------------------------------


def test_a_rollout_function_can_ask_several_times(tmp_path: Path) -> None:
    """TRL's `rollout_func`: two turns, of which the second goes on from the first one's cache."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = tokens_of(prompts)
        _, first, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        longer = [p + c + [9] for p, c in zip(ids, first, strict=True)]
        _, second, more, _ = trainer.vllm_generation.generate(longer, None, 1)
        return {
            "prompt_ids": ids,
            "completion_ids": [a + [9] + b for a, b in zip(first, second, strict=True)],
            "logprobs": [
                [one for (one,) in a] + [0.0] + [one for (one,) in b] for a, b in zip(logprobs, more, strict=True)
            ],
            "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in zip(first, second, strict=True)],
        }

    model = tiny_model(initializer_range=0.1, eos_token_id=None)
    options: dict[str, Any] = {"max_steps": 1, "generation_kwargs": {"eos_token_id": None}, "distinct": False}
    trainer, seen = train("grpo", tmp_path, on_flatbed=True, model=model, more={"rollout_func": rollout}, **options)
    assert [len(ids) for ids in seen.completions[0]] == [2 * NEW + 1] * ROWS
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    stats = trainer.flatbed.engine.stats()
    lengths = [len(ids) for ids in tokens_of(PROMPTS)]
    block = trainer.flatbed.engine.config.block_size
    groups = sum((ROWS // 2 - 1) * (length - 1) for length in lengths)
    again = sum(ROWS // 2 * ((length + NEW - 1) // block * block) for length in lengths)
    assert stats.cached_tokens == groups + again
    assert_idle(trainer.flatbed.engine)
