"""Rollouts in TRL's GRPO and RLOO: the same tokens as padded `generate`, step after step, and nothing left changed."""

from __future__ import annotations

import copy
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import byte_tokenizer, scripted
from torch import nn
from transformers import ContinuousBatchingConfig
from trl_training import (
    GREEDY,
    GROUP,
    NEW,
    PROMPTS,
    QUIET,
    ROWS,
    TRAINERS,
    Seen,
    arguments,
    generated,
    logged,
    make_trainer,
    tiny_model,
    train,
)

import flatbed
from flatbed.engine import Engine
from flatbed.errors import FlatbedWarning
from flatbed.integrations.trl import Rollouts, use_flatbed

ALGORITHMS = ("grpo", "rloo")
# Without TRL's correction the loss is the very same function of the tokens, and so are the weights.
UNCORRECTED: dict[str, dict[str, Any]] = {"grpo": {"vllm_importance_sampling_correction": False}, "rloo": {}}

pytestmark = QUIET


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- the same tokens, step after step --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_five_steps_are_those_of_padded_generate_while_the_weights_change(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation_kwargs": GREEDY, **UNCORRECTED[algorithm]}
    theirs, padded = train(algorithm, tmp_path, on_flatbed=False, **options)
    ours, rolled = train(algorithm, tmp_path, on_flatbed=True, **options)
    assert rolled.prompts == padded.prompts
    assert rolled.completions == padded.completions
    assert len(rolled.completions) == 5
    for mine, other in zip(weights(ours.model), weights(theirs.model), strict=True):
        assert torch.equal(mine, other)
    # Old weights or an old cache would show: every step has the same prompts, and other tokens than the one before.
    assert all(prompts == rolled.prompts[0] for prompts in rolled.prompts)
    for before, after in pairwise(rolled.completions):
        assert before != after
    first = generated(tiny_model(), rolled.prompts[0])
    assert [step == first for step in rolled.completions] == [True, False, False, False, False]


@pytest.mark.parametrize("fault", ["an old cache", "old weights"])
def test_the_comparison_above_would_notice(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with an engine that keeps what it should forget, and with one over weights that are not trained."""
    if fault == "an old cache":
        monkeypatch.setattr(Engine, "_follow_model", lambda self: None)
        monkeypatch.setattr(Engine, "_forget_old_weights", lambda self: False)
        monkeypatch.setattr(Engine, "release", lambda self, *, graphs=False: None)
    else:
        monkeypatch.setattr(
            Rollouts, "_model", lambda self, frozen={}: frozen.setdefault(0, copy.deepcopy(tiny_model()))
        )
    options: dict[str, Any] = {"generation_kwargs": GREEDY, **UNCORRECTED["grpo"]}
    _, padded = train("grpo", tmp_path, on_flatbed=False, **options)
    _, rolled = train("grpo", tmp_path, on_flatbed=True, **options)
    assert rolled.completions[0] == padded.completions[0]
    assert rolled.completions[1] != padded.completions[1]


def test_a_trainer_that_exists_can_be_given_flatbed(tmp_path: Path) -> None:
    _, rolled = train("grpo", tmp_path, on_flatbed=True, generation_kwargs=GREEDY, max_steps=2)
    trainer = make_trainer("grpo", tmp_path, on_flatbed=False, generation_kwargs=GREEDY, max_steps=2)
    assert use_flatbed(trainer, capacity="64 blocks") is trainer
    assert type(trainer) is trl.GRPOTrainer
    trainer.train()
    assert trainer.reward_funcs[0].completions == rolled.completions
    assert trainer.flatbed.engine.config.capacity == "64 blocks"
    assert trainer.flatbed.engine.stats().finished == 2 * ROWS
    trainer.flatbed.close()
    assert trainer.flatbed.engine is None


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trls_own_continuous_batching_on_an_installed_model(algorithm: str, lora: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation_kwargs": GREEDY, "max_steps": 3}
    if lora:
        adapter = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
        options |= {"more": {"peft_config": adapter}, "learning_rate": 0.1}
    _, padded = train(algorithm, tmp_path, on_flatbed=False, **options)
    model = flatbed.install(tiny_model())
    _, rolled = train(
        algorithm, tmp_path, on_flatbed=False, model=model, use_transformers_continuous_batching=True, **options
    )
    assert rolled.completions == padded.completions
    assert rolled.completions[0] != rolled.completions[2]
    engine = model.generate_batch._engine
    assert engine.stats().finished == 3 * ROWS
    assert engine.config.capacity == "50%", "what TRL asks for"
    flatbed.uninstall(model)


def test_a_config_for_transformers_continuous_batching_is_translated(tmp_path: Path) -> None:
    names = {one.name for one in fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in names else "block_size"  # its former name
    options: dict[str, Any] = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 8, size: 64, "max_batch_tokens": 100},
    }
    engine = make_trainer("grpo", tmp_path, on_flatbed=True, **options).flatbed.engine
    assert (engine.config.capacity, engine.config.token_budget) == ("512 tokens", 100)
    more = {"flatbed": {"capacity": "9 blocks"}}
    engine = make_trainer("grpo", tmp_path, on_flatbed=True, more=more, **options).flatbed.engine
    assert (engine.config.capacity, engine.config.token_budget) == ("9 blocks", 100)


# ---- what a rollout costs and gives ----------------------------------------------------------------------------------


def test_a_group_is_prefilled_once(tmp_path: Path) -> None:
    trainer, seen = train("grpo", tmp_path, on_flatbed=True, distinct=False, max_steps=1, temperature=2.0)
    lengths = [len(byte_tokenizer()(prompt)["input_ids"]) for prompt in PROMPTS]
    stats = trainer.flatbed.engine.stats()
    assert stats.prompt_tokens == GROUP * sum(lengths)
    assert stats.cached_tokens == (GROUP - 1) * sum(length - 1 for length in lengths), (
        "all but the last, always computed"
    )
    assert seen.prompts[0] == [prompt for prompt in PROMPTS for _ in range(GROUP)]
    assert len({tuple(ids) for ids in seen.completions[0]}) == ROWS, "and its completions are different samples"


def test_memory_is_given_back_before_rewards_and_addresses_stay(tmp_path: Path) -> None:
    found: list[tuple[int, int]] = []

    def watch() -> None:
        engine = trainer.flatbed.engine
        assert (engine.memory().committed, engine.memory().live) == (0, 0)
        assert engine.memory().peak > 0
        found.append((id(engine), engine._pool.layers[0].key.data_ptr()))

    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, reward=Seen(watch))
    trainer.train()
    assert len(found) == 5
    assert len(set(found)) == 1


def test_log_probabilities_reach_trls_correction_and_its_logs(tmp_path: Path) -> None:
    model = tiny_model(initializer_range=0.1)  # logits of a size that float32 holds to 1e-5
    trainer, _ = train("grpo", tmp_path, on_flatbed=True, model=model, temperature=0.7, learning_rate=1e-3)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    for name in ("min", "mean", "max"):
        ratios = logged(trainer, f"sampling/importance_sampling_ratio/{name}")
        assert len(ratios) == 5
        assert ratios == pytest.approx([1.0] * 5, abs=1e-4)
    assert logged(trainer, "entropy")[0] > 0.1, "so that there is something to compare"


def test_log_probabilities_of_another_distribution_would_show_there(tmp_path: Path) -> None:
    more = {"flatbed": {"logprobs": "raw"}}
    with pytest.warns(FlatbedWarning, match=r"raw.*temperature"):
        trainer = make_trainer("grpo", tmp_path, on_flatbed=True, temperature=0.7, more=more, max_steps=2)
    trainer.train()
    assert min(logged(trainer, "sampling/sampling_logp_difference/mean")) > 0.1


@pytest.mark.parametrize("which", ["processed", "raw"])
def test_which_distribution_log_probabilities_are_of(which: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "vllm_importance_sampling_correction": False}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, more={"flatbed": {"logprobs": which}}, **options)
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    _, completions, logprobs, ids = trainer.flatbed.generate(prompts, None, 1)
    assert [[one for (one,) in each] for each in ids] == completions
    for prompt, completion, given in zip(prompts, completions, logprobs, strict=True):
        with torch.no_grad():
            logits = trainer.model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        if which == "processed":
            logits = logits / 0.7
            logits = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert [one for (one,) in given] == pytest.approx(expected.tolist(), abs=1e-5)


def test_log_probabilities_are_those_of_the_trainers_own_forward(tmp_path: Path) -> None:
    """Float32: within 1e-5 of the numbers that TRL trains on."""
    model = tiny_model(initializer_range=0.1)
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, model=model, temperature=1.3)
    prompts = [byte_tokenizer()(f"{PROMPTS[0]} {at}")["input_ids"] for at in range(4)]
    prompts = [prompt[: min(map(len, prompts))] for prompt in prompts]
    _, completions, logprobs, _ = trainer.flatbed.generate(prompts, None, 1)
    rows = [p + c + [0] * (NEW - len(c)) for p, c in zip(prompts, completions, strict=True)]
    mask = torch.tensor(
        [[1] * (len(p) + len(c)) + [0] * (NEW - len(c)) for p, c in zip(prompts, completions, strict=True)]
    )
    with torch.no_grad():
        theirs = trainer._get_per_token_logps_and_entropies(trainer.model, torch.tensor(rows), mask, NEW)[0]
    for row, given in zip(theirs, logprobs, strict=True):
        assert [one for (one,) in given] == pytest.approx(row[: len(given)].tolist(), abs=1e-5)


def test_a_deterministic_engine_gives_a_prompt_the_same_bits_in_any_company(tmp_path: Path) -> None:
    more = {"flatbed": {"deterministic": True}}
    model = tiny_model(initializer_range=0.1)
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, model=model, more=more, generation_kwargs=GREEDY)
    assert trainer.flatbed.engine.config.deterministic
    prompts = [byte_tokenizer()(f"{PROMPTS[0]} {'and on ' * at}")["input_ids"] for at in range(6)]
    together = trainer.flatbed.generate(prompts, None, 1)
    for at, prompt in enumerate(prompts):
        alone = trainer.flatbed.generate([prompt], None, 1)
        assert [part[0] for part in alone] == [part[at] for part in together]


def test_rollouts_follow_the_seed_of_the_arguments_or_their_own(tmp_path: Path) -> None:
    def rolled(**kwargs: Any) -> list[list[list[int]]]:
        return train("grpo", tmp_path, on_flatbed=True, max_steps=2, temperature=2.0, **kwargs)[1].completions

    first = rolled(seed=1)
    assert rolled(seed=1) == first
    assert rolled(seed=2) != first
    own = rolled(seed=1, more={"flatbed": {"seed": 3}})
    assert own != first
    assert rolled(seed=1, more={"flatbed": {"seed": 3}}) == own
    assert own[0] != own[1], "each generation draws anew"


# ---- ways to train ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lora_with_checkpointed_activations(algorithm: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
    options: dict[str, Any] = {
        "generation_kwargs": GREEDY,
        "learning_rate": 0.1,
        "gradient_checkpointing": True,
        "more": {"peft_config": lora},
        **UNCORRECTED[algorithm],
    }
    theirs, padded = train(algorithm, tmp_path, on_flatbed=False, **options)
    ours, rolled = train(algorithm, tmp_path, on_flatbed=True, **options)
    assert rolled.completions == padded.completions
    assert rolled.completions[4] != rolled.completions[0]
    for mine, other in zip(weights(ours.model), weights(theirs.model), strict=True):
        assert torch.equal(mine, other)


def test_rollouts_are_without_dropout(tmp_path: Path) -> None:
    """As vLLM's are, and unlike those of `generate`, which TRL calls on a model that is in training mode."""

    def watch() -> None:
        torch.manual_seed(1)
        expected.append(generated(trainer.model, [f"{PROMPTS[at // GROUP]} {at}" for at in range(ROWS)]))

    expected: list[list[list[int]]] = []
    lora = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.5, target_modules=["q_proj", "v_proj", "down_proj"])
    options: dict[str, Any] = {"generation_kwargs": GREEDY, "learning_rate": 0.1, "more": {"peft_config": lora}}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, reward=Seen(watch), **options)
    trainer.train()
    assert trainer.reward_funcs[0].completions == expected
    assert expected[4] != expected[0]


def test_a_pretrained_adapter_with_a_reference_beside_it(tmp_path: Path) -> None:
    """TRL adds a second adapter to the model and switches to it for the reference's log-probabilities."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        return get_peft_model(tiny_model(), lora)

    options: dict[str, Any] = {"generation_kwargs": GREEDY, "beta": 0.1, "max_steps": 3, "learning_rate": 0.1}
    _, padded = train("grpo", tmp_path, on_flatbed=False, model=adapted(), **options, **UNCORRECTED["grpo"])
    _, rolled = train("grpo", tmp_path, on_flatbed=True, model=adapted(), **options, **UNCORRECTED["grpo"])
    assert rolled.completions == padded.completions
    assert rolled.completions[0] != generated(tiny_model(), rolled.prompts[0])


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_bf16_training_rolls_out_in_the_precision_that_it_trains_in(masters: torch.dtype, tmp_path: Path) -> None:
    """Under autocast over float32 weights, K/V and products are bfloat16, and the weights stay float32."""
    found: list[torch.dtype] = []

    def watch() -> None:
        found.append(trainer.flatbed.engine._pool.dtype)

    model = tiny_model(initializer_range=0.1).to(masters)
    options: dict[str, Any] = {"bf16": True, "learning_rate": 1e-3}
    trainer = make_trainer("grpo", tmp_path, on_flatbed=True, model=model, reward=Seen(watch), **options)
    trainer.train()
    assert found == [torch.bfloat16] * 5
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {masters}
    difference = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert 0 < max(difference) < 0.03
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 5, abs=0.02)


def test_a_compiled_model_rolls_out_as_what_is_inside(tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation_kwargs": GREEDY, "max_steps": 3, **UNCORRECTED["grpo"]}
    _, padded = train("grpo", tmp_path, on_flatbed=False, **options)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer, rolled = train("grpo", tmp_path, on_flatbed=True, **options, **compiled)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert rolled.completions == padded.completions


def test_several_updates_on_one_generation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "generation_kwargs": GREEDY}
    _, padded = train("grpo", tmp_path, on_flatbed=False, **options, **UNCORRECTED["grpo"])
    trainer, rolled = train("grpo", tmp_path, on_flatbed=True, **options, **UNCORRECTED["grpo"])
    assert rolled.completions == padded.completions
    assert len(rolled.completions) == 2
    assert trainer.flatbed.engine.stats().finished == 2 * ROWS


def test_evaluation_generates_too_and_leaves_the_mode_as_it_was(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": f"evaluate {at}"} for at in range(4)])
    options: dict[str, Any] = {
        "generation_kwargs": GREEDY,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "num_generations_eval": 2,
        "per_device_eval_batch_size": 4,
        "more": {"eval_dataset": rows},
    }
    theirs, padded = train("grpo", tmp_path, on_flatbed=False, **options, **UNCORRECTED["grpo"])
    ours, rolled = train("grpo", tmp_path, on_flatbed=True, **options, **UNCORRECTED["grpo"])
    assert rolled.prompts == padded.prompts
    assert rolled.completions == padded.completions
    assert len(logged(ours, "eval_reward")) == 2
    assert ours.model.training == theirs.model.training


CALL = '<call>{"name":"add","arguments":{"a":2,"b":3}}</call>'
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ":",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number.
        b: another.
    """
    return a + b


class Environment:
    """Has that tool as a method."""

    def reset(self, **_: Any) -> None:
        """Nothing to say."""

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: a number.
            b: another.
        """
        return add(a, b)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.13") or Version(trl.__version__) < Version("1.12"),
    reason="answers are parsed by a schema and jmespath there, not by a response_template",
)
@pytest.mark.parametrize("environment", [False, True])
def test_tools_of_several_turns_go_on_from_the_cache(environment: bool, tmp_path: Path) -> None:
    """A model that says by heart: a call of a tool, then what comes of it. The second turn's prompt is the first one's,
    its completion and the tool's answer: of these, only the answer is computed."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE
    prompt = [{"role": "user", "content": "add"}]
    start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    first = tokenizer(CALL)["input_ids"] + [0]
    answer = tokenizer("<tool>5:")["input_ids"]
    second = tokenizer("five")["input_ids"] + [0]
    script = first + answer + second + [0] * (len(first) + 8)
    model = scripted(script, len(tokenizer), len(start))
    model.generation_config.eos_token_id = model.config.eos_token_id = 0

    seen = Seen()
    trainer = TRAINERS["grpo"][2](
        model=model,
        args=arguments("grpo", tmp_path, max_steps=1, max_completion_length=len(script), generation_kwargs=GREEDY),
        reward_funcs=seen,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 2),
        processing_class=tokenizer,
        **({"environment_factory": Environment} if environment else {"tools": [add]}),
    )
    asked: list[list[list[int]]] = []
    own = trainer.flatbed.generate

    def spy(prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        asked.append(prompts)
        return own(prompts, *args, **kwargs)

    trainer.flatbed.generate = spy
    trainer.train()
    assert asked == [[start] * ROWS, [start + first + answer] * ROWS]
    assert seen.completions == [[first + answer + second] * ROWS]
    assert logged(trainer, "tools/call_frequency") == [1.0]
    stats = trainer.flatbed.engine.stats()
    block = trainer.flatbed.engine.config.block_size
    whole = (len(start) + len(first) - 1) // block * block
    assert whole > len(start), "the completion's K/V are among them"
    twins = (ROWS - 1) * (len(start) - 1 + len(start + first + answer) - 1)
    assert stats.cached_tokens == whole + twins
