"""Five TRL training steps, timed: how much of a step generation takes, and how much memory.

    python benchmarks/trl_steps.py --out OUT.json                     # GRPO, 64 completions of 128 tokens, 8 a prompt
    python benchmarks/trl_steps.py --cases grpo:128:8,rloo:128:8,grpo:512:8,grpo:128:32 --rollouts none,flatbed
    python benchmarks/trl_steps.py --tiny                             # two layers, on the CPU, in seconds

A case is an algorithm, the new tokens, and the completions of each prompt. The model has the shape of Qwen2.5-0.5B and
random weights. Each of `--rollouts` trains a fresh copy of it in turn:

    none            completions are made up: what training alone takes, in seconds and in memory
    generate        TRL's default, padded `generate`
    continuous      TRL's `use_transformers_continuous_batching`: half of the free memory for the cache
    continuous-64   the same with `num_blocks=64`
    flatbed         flatbed.integrations.trl, with TRL's importance-sampling correction as in TRL's own default
    flatbed-plain   without that correction, which costs one more forward pass a step; `generate` has none either

`setup_s` builds the trainer, `seconds` is all of `trainer.train()`, `generation_s` what of it passes in TRL's
`_generate_single_turn` (the first step's start-up, graphs and compilation included) and `release_s` in what surrounds
it: tokenizing, decoding, and giving memory back. Memory is the most that torch had allocated in each phase, and with
Flatbed what its pool had committed besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatbed.integrations import trl as ours
from flatbed.lab.models import load

WORDS = 250
ROWS = 64
ARMS = ("none", "generate", "continuous", "continuous-64", "flatbed", "flatbed-plain")
# DESIGN.md, section 7: all five steps, and generation in them.
TARGETS = {"seconds": 2.5, "generation_s": 1.2}


@dataclass(frozen=True)
class Case:
    """What is trained: `grpo` or `rloo`, completions of how many tokens, how many of each prompt."""

    algorithm: str
    new_tokens: int
    generations: int

    @classmethod
    def parse(cls, text: str) -> Case:
        algorithm, new_tokens, generations = text.split(":")
        if algorithm not in ("grpo", "rloo"):
            raise SystemExit(f"unknown algorithm {algorithm!r}; known: grpo, rloo")
        return cls(algorithm, int(new_tokens), int(generations))


@dataclass
class Phases:
    """Times and memory of one training run, taken around each generation.

    Attributes:
        each_generation_s, each_release_s: seconds of each step.
        generation_bytes, training_bytes: the most that torch had allocated in any generation, and outside of them.
        pool_bytes: the most that Flatbed's pool and graphs had beside that, in a generation.
        left_bytes: what of it is left outside of generations.
    """

    each_generation_s: list[float] = field(default_factory=list)
    each_release_s: list[float] = field(default_factory=list)
    generation_bytes: int = 0
    training_bytes: int = 0
    pool_bytes: int = 0
    left_bytes: int = 0


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak() -> int:
    """The most that torch had allocated since this was last asked."""
    if not torch.cuda.is_available():
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few words; other ids of the model's vocabulary decode to nothing."""
    vocabulary = {"<eos>": 0, "<pad>": 1, **{f"w{at}": at + 2 for at in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_prompts(count: int) -> Dataset:
    """Prompts of 16 to 64 tokens."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randrange(16, 65))) for _ in range(count)]
    return Dataset.from_list([{"prompt": text} for text in texts])


def make_trainer(arm: str, case: Case, args: argparse.Namespace, folder: str) -> Any:
    on_flatbed = arm.startswith("flatbed")
    algorithm = case.algorithm.upper()
    trainer_class = getattr(ours if on_flatbed else trl, f"{algorithm}Trainer")
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.rows,
        "num_generations": case.generations,
        "max_completion_length": case.new_tokens,
        "learning_rate": 1e-6,
        "beta": 0.0,  # RLOO's default would have a reference model, and so one more forward pass
        "bf16": not args.tiny,
        "use_cpu": args.tiny,
        "gradient_checkpointing": args.checkpointing,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if arm.startswith("continuous"):
        settings["use_transformers_continuous_batching"] = True
        if arm == "continuous-64":
            settings["transformers_continuous_batching_config"] = {"num_blocks": 64}
    if arm == "flatbed-plain" and case.algorithm == "grpo":
        settings["vllm_importance_sampling_correction"] = False
    device = "cpu" if args.tiny else "cuda"
    model, _ = load("shape:tiny" if args.tiny else "shape:qwen2.5-0.5b", device, args.dtype, args.attention)
    return trainer_class(
        model=model.train(),
        args=getattr(trl, f"{algorithm}Config")(**settings),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=make_prompts(args.steps * args.rows // case.generations),
        processing_class=make_tokenizer(),
    )


def watch(trainer: Any, case: Case, *, made_up: bool) -> Phases:
    """Puts a stopwatch around the trainer's generation; `made_up`: and random completions in its place."""
    phases = Phases()
    turn, generate = trainer._generate_single_turn, trainer._generate
    draw = random.Random(1)

    def make_up(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        completions = [[draw.randrange(2, WORDS) for _ in range(case.new_tokens)] for _ in prompt_ids]
        return (completions, None) if case.algorithm == "grpo" else completions

    def engine_bytes() -> int:
        if not hasattr(trainer, "flatbed") or trainer.flatbed.engine is None:
            return 0
        memory = trainer.flatbed.engine.memory()
        return memory.committed + memory.graphs

    def timed_turn(*given: Any, **named: Any) -> Any:
        start = now()
        result = (make_up if made_up else turn)(*given, **named)
        phases.each_generation_s.append(now() - start)
        phases.pool_bytes = max(phases.pool_bytes, engine_bytes())
        return result

    def timed_generate(*given: Any, **named: Any) -> Any:
        phases.training_bytes = max(phases.training_bytes, peak())
        start, before = now(), sum(phases.each_generation_s)
        result = generate(*given, **named)
        ended = now()
        phases.each_release_s.append(ended - start - (sum(phases.each_generation_s) - before))
        phases.generation_bytes = max(phases.generation_bytes, peak())
        phases.left_bytes = max(phases.left_bytes, engine_bytes())
        return result

    trainer._generate_single_turn, trainer._generate = timed_turn, timed_generate
    return phases


def run(arm: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start = now()
        trainer = make_trainer(arm, case, args, folder)
        setup = now() - start
        phases = watch(trainer, case, made_up=arm == "none")
        peak()
        start = now()
        trainer.train()
        seconds = now() - start
        phases.training_bytes = max(phases.training_bytes, peak())
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    sampling = {
        name: [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
    }
    if hasattr(trainer, "flatbed"):
        trainer.flatbed.close()
    return {
        **asdict(case),
        "rollouts": arm,
        "setup_s": round(setup, 3),
        "seconds": round(seconds, 3),
        "generation_s": round(sum(phases.each_generation_s), 3),
        "first_generation_s": round(phases.each_generation_s[0], 3),
        "release_s": round(sum(phases.each_release_s), 3),
        "mean_completion": sum(lengths) / max(1, len(lengths)),
        **{name: values for name, values in sampling.items() if values},
        **asdict(phases),
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="grpo:128:8", help="ALGORITHM:NEW_TOKENS:COMPLETIONS of a prompt, by commas")
    parser.add_argument("--rollouts", default="none,generate,continuous-64,flatbed", help="in this order, or `all`")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; float32 ones are trained under autocast")
    parser.add_argument("--attention", default="sdpa", help="of the model, and so of training")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.rows = ROWS
    if args.tiny:
        args.dtype, args.rows = "float32", 16
    # On a CPU, half of the memory for Transformers' cache takes minutes a step.
    every = tuple(arm for arm in ARMS if not (args.tiny and arm == "continuous"))
    arms = every if args.rollouts == "all" else tuple(args.rollouts.split(","))
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise SystemExit(f"unknown rollouts {', '.join(unknown)}; known: {', '.join(ARMS)}")
    if not args.tiny:
        torch.ones(1, device="cuda").sum().item()  # the CUDA context is nobody's start-up
    results: list[dict[str, Any]] = []
    for case in map(Case.parse, args.cases.split(",")):
        if args.tiny:
            case = replace(case, new_tokens=min(case.new_tokens, 12))
        alone = None
        for arm in arms:
            row = run(arm, case, args)
            results.append(row)
            alone = row if arm == "none" else alone
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print_row(row, alone)
    report = {
        "benchmark": "trl_steps",
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")},
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "targets": TARGETS,
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps([[row["rollouts"], row["seconds"], row["generation_s"]] for row in results]))


def print_row(row: dict[str, Any], alone: dict[str, Any] | None) -> None:
    """One line, with training memory beside that of a run without generation where there was one."""
    beside = ""
    if alone is not None:
        more = row["training_bytes"] + row["left_bytes"] - alone["training_bytes"]
        beside = f", training {more / 2**20:+.0f} MiB"
    case = f"{row['algorithm']} {row['new_tokens']:4d} x {row['generations']:2d} {row['rollouts']:14s}"
    print(
        f"{case} {row['seconds']:8.2f} s, generation {row['generation_s']:7.2f} "
        f"(first {row['first_generation_s']:.2f}), setup {row['setup_s']:.2f}; peak "
        f"{max(row['training_bytes'], row['generation_bytes'] + row['pool_bytes']) / 1e9:.1f} GB{beside}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
