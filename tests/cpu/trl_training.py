"""Small TRL trainers for tests: a two-layer model, a tokenizer of bytes, the same two prompts in every step.

Greedy completions of a group are all alike, so their advantages cancel and nothing would be learned. So each row of a
batch has a number of its own at its end: a group is then of several prompts, and rewards move the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from tiny import byte_tokenizer
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, RLOOConfig

from flatbed.integrations import trl as ours

ROWS, GROUP, NEW = 8, 4, 12
# Longer than a block of the engine's, so that there are whole blocks that could be served when they are old.
PROMPTS = [f"{what} the old world will be told well {what}" for what in ("hello", "how")]
GREEDY = {"do_sample": False}
# TRL and Transformers warn of much that is no concern of these tests; Flatbed's own warnings stay errors.
QUIET = pytest.mark.filterwarnings("ignore", "error::flatbed.FlatbedWarning")

TRAINERS: dict[str, tuple[type, type, type]] = {
    "grpo": (GRPOConfig, trl.GRPOTrainer, ours.GRPOTrainer),
    "rloo": (RLOOConfig, trl.RLOOTrainer, ours.RLOOTrainer),
}


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    """A Qwen2 of two layers whose greedy decoding wanders, with the vocabulary and the EOS of `byte_tokenizer`."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(byte_tokenizer()),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))


def arguments(algorithm: str, folder: Path, **changes: Any) -> Any:
    """A config whose learning rate changes greedy completions in every step."""
    config = TRAINERS[algorithm][0]
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP,
        "max_completion_length": NEW,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "shuffle_dataset": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return config(**{**settings, **changes})


def accelerator(precision: str = "no") -> Accelerator:
    """One of its own on the CPU; what an earlier one in this process was made for is forgotten."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, mixed_precision=precision)


def numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A collator that gives each row a prompt of its own."""
    return [{**row, "prompt": f"{row['prompt']} {at}"} for at, row in enumerate(rows)]


@dataclass
class Seen:
    """A reward function that remembers what it was given.

    Attributes:
        prompts, completions: of each call, in order.
        watch: called at each call, when the generation is over and nothing is trained yet.
    """

    watch: Callable[[], None] = lambda: None
    prompts: list[list[Any]] = field(default_factory=list)
    completions: list[list[list[int]]] = field(default_factory=list)
    __name__ = "seen"

    def __call__(self, prompts: list[Any], completions: list[Any], completion_ids: Any, **_: Any) -> list[float]:
        self.watch()
        self.prompts.append(list(prompts))
        self.completions.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(
    algorithm: str,
    folder: Path,
    *,
    on_flatbed: bool,
    model: nn.Module | None = None,
    reward: Any = None,
    rows: list[dict[str, Any]] | None = None,
    distinct: bool = True,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer over `tiny_model`. `distinct` numbers the rows of a batch; `more` goes to the trainer itself."""
    kind = TRAINERS[algorithm][2 if on_flatbed else 1]
    trainer = kind(
        model=tiny_model() if model is None else model,
        args=arguments(algorithm, folder, **changes),
        reward_funcs=Seen() if reward is None else reward,
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS] if rows is None else rows),
        processing_class=byte_tokenizer(),
        **(more or {}),
    )
    if distinct:
        trainer.data_collator = numbered
    return trainer


def train(algorithm: str, folder: Path, *, on_flatbed: bool, **kwargs: Any) -> tuple[Any, Seen]:
    trainer = make_trainer(algorithm, folder, on_flatbed=on_flatbed, **kwargs)
    trainer.train()
    return trainer, trainer.reward_funcs[0]


def generated(model: nn.Module, prompts: list[str], new_tokens: int = NEW) -> list[list[int]]:
    """What the model's own `generate` makes of each prompt alone, greedily, up to and with EOS."""
    made, training = [], model.training
    model.eval()
    for prompt in prompts:
        ids = torch.tensor([byte_tokenizer()(prompt)["input_ids"]])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **GREEDY, pad_token_id=0
        )
        tokens = out[0, ids.shape[1] :].tolist()
        made.append(tokens[: tokens.index(0) + 1] if 0 in tokens else tokens)
    model.train(training)
    return made


def logged(trainer: Any, name: str) -> list[float]:
    """A metric in each step's log."""
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]
