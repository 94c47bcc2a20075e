"""How near the log-probabilities of rollouts are to those that the trainer computes for the same tokens.

    python benchmarks/fidelity.py --model FOLDER --out OUT.json        # SmolLM2-135M, say
    python benchmarks/fidelity.py --model shape:qwen2.5-0.5b           # random weights of that shape
    python benchmarks/fidelity.py --model shape:tiny --device cpu      # in seconds

Completions are sampled at temperature 1, nothing truncated, so that what is drawn from is the model's own distribution.
The reference is TRL's own forward, `GRPOTrainer._get_per_token_logps_and_entropies` over padded batches, as a training
step makes it. Compared with it, for each of `--engines` and `--precisions`:

    flatbed         the log-probabilities that the engine gives
    deterministic   the same with `Engine(deterministic=True)`
    transformers    those of Transformers' continuous batching (`return_logprobs=True`)

    float32, bfloat16    weights, and all that is computed from them
    mixed                float32 weights under bfloat16 autocast, as a TRL trainer with `bf16=True` runs them

`difference` is the trainer's less the engine's, token by token; `ratio` is its exponential, the importance weight of a
token; `sequence_ratio` that of a whole completion. The target in float32 is a difference within 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

import flatbed
from flatbed.lab.models import load, vocabulary_of

ENGINES = ("flatbed", "deterministic", "transformers")
PRECISIONS = ("float32", "bfloat16", "mixed")
FLOAT32_TARGET = 1e-5
# Of Transformers' continuous batching, whose own choice follows the free memory and may take all of it.
TOKEN_BUDGET = 1024
QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Name three red fruits.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet?",
    "Give me a synonym of happy.",
)


@dataclass
class Rolled:
    """One completion: token ids, and the log-probability of each that the engine gave."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def make_prompts(tokenizer: Any, vocabulary: int, count: int) -> list[list[int]]:
    """Chats for a model with a template; otherwise random tokens, 16 to 64 of them."""
    if tokenizer is not None and tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": QUESTIONS[at % len(QUESTIONS)]}] for at in range(count)]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    draw = random.Random(0)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randrange(16, 65))] for _ in range(count)]


def by_flatbed(model: Any, prompts: list[list[int]], args: argparse.Namespace, **settings: Any) -> list[Rolled]:
    params = flatbed.SamplingParams(
        max_new_tokens=args.new_tokens, temperature=1.0, n=args.samples, logprobs=True, seed=0
    )
    with flatbed.Engine(model, **settings) as engine:
        outputs = engine.generate(prompts, params)
    return [Rolled(o.prompt_token_ids, list(s.token_ids), list(s.logprobs or ())) for o in outputs for s in o.samples]


def by_transformers(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[Rolled]:
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(max_new_tokens=args.new_tokens, pad_token_id=0, **sampling)
    config.eos_token_id = model.generation_config.eos_token_id
    results = model.generate_batch(
        [prompt for prompt in prompts for _ in range(args.samples)],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=args.blocks, max_batch_tokens=TOKEN_BUDGET, return_logprobs=True
        ),
        progress_bar=False,
    )
    return [Rolled(list(r.prompt_ids), list(r.generated_tokens), list(r.logprobs)) for r in results.values()]


def roll_out(engine: str, model: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[Rolled]:
    if engine == "transformers":
        return by_transformers(model, prompts, args)
    return (
        by_flatbed(model, prompts, args, deterministic=True)
        if engine == "deterministic"
        else by_flatbed(model, prompts, args)
    )


def make_trainer(model: Any, precision: str, args: argparse.Namespace, folder: str) -> Any:
    """A trainer for its forward alone."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1}, unk_token="<pad>")),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2, "report_to": "none"}
    return trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            output_dir=folder, bf16=precision == "mixed", use_cpu=args.device == "cpu", beta=0.0, **settings
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "-"}] * 2),
        processing_class=tokenizer,
    )


@torch.no_grad()
def by_trainer(trainer: Any, rolled: list[Rolled], args: argparse.Namespace) -> list[list[float]]:
    """The trainer's log-probabilities of each completion's tokens, in batches padded as TRL pads them."""
    found = []
    device = trainer.accelerator.device
    for start in range(0, len(rolled), args.batch):
        part = rolled[start : start + args.batch]
        left, right = max(len(one.prompt) for one in part), max(len(one.tokens) for one in part)
        ids = torch.zeros(len(part), left + right, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(part):
            both = one.prompt + one.tokens
            at = left - len(one.prompt)
            ids[row, at : at + len(both)] = torch.tensor(both)
            mask[row, at : at + len(both)] = 1
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids.to(device), mask.to(device), right)[0]
        found += [row[: len(one.tokens)].float().tolist() for row, one in zip(logps, part, strict=True)]
    return found


def compare(rolled: list[Rolled], theirs: list[list[float]]) -> dict[str, Any]:
    per_sequence = [
        [a - b for a, b in zip(their, one.logprobs, strict=True)] for one, their in zip(rolled, theirs, strict=True)
    ]
    differences = sorted(abs(d) for each in per_sequence for d in each)
    ratios = [math.exp(d) for each in per_sequence for d in each]
    sequences = [math.exp(min(700.0, sum(each))) for each in per_sequence]
    return {
        "tokens": len(differences),
        "difference": {
            "mean": statistics.fmean(differences),
            "p99": differences[int(0.99 * (len(differences) - 1))],
            "max": differences[-1],
        },
        "ratio": spread(ratios),
        "sequence_ratio": spread(sequences),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {
        "min": min(values),
        "mean": statistics.fmean(values),
        "max": max(values),
        "deviation": statistics.pstdev(values),
    }


def run(engine: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    dtype = "bfloat16" if precision == "bfloat16" else "float32"
    model, tokenizer = load(args.model, args.device, dtype, args.attention)
    prompts = make_prompts(tokenizer, vocabulary_of(model.config), args.prompts)
    mixed = torch.autocast(args.device, torch.bfloat16) if precision == "mixed" else contextlib.nullcontext()
    start = time.perf_counter()
    with mixed:
        rolled = roll_out(engine, model, prompts, args)
    took = time.perf_counter() - start
    if any(len(one.tokens) != len(one.logprobs) or not one.tokens for one in rolled):
        return {"engine": engine, "precision": precision, "failed": "no log-probability for some tokens"}
    with tempfile.TemporaryDirectory() as folder:
        theirs = by_trainer(make_trainer(model.eval(), precision, args, folder), rolled, args)
    return {"engine": engine, "precision": precision, "generation_s": round(took, 3), **compare(rolled, theirs)}


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen2.5-0.5b", help="a folder, a shape of the lab's, or `demo`")
    parser.add_argument("--engines", default="flatbed,transformers")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="rows of the trainer's forward")
    parser.add_argument("--blocks", type=int, default=128, help="of Transformers' cache, 256 tokens each")
    parser.add_argument("--attention", default="sdpa", help="of the model, and so of the trainer's forward")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines, precisions = args.engines.split(","), args.precisions.split(",")
    for given, known in ((engines, ENGINES), (precisions, PRECISIONS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SystemExit(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    results = []
    for precision in precisions:
        for engine in engines:
            row = run(engine, precision, args)
            results.append(row)
            print_row(row)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    report = {
        "benchmark": "fidelity",
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "float32_target": FLOAT32_TARGET,
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(results))


def print_row(row: dict[str, Any]) -> None:
    head = f"{row['precision']:9s} {row['engine']:14s}"
    if "failed" in row:
        print(f"{head} {row['failed']}", file=sys.stderr, flush=True)
        return
    difference, ratio, whole = row["difference"], row["ratio"], row["sequence_ratio"]
    target = ""
    if row["precision"] == "float32":
        target = "  within 1e-5" if difference["max"] <= FLOAT32_TARGET else "  NOT within 1e-5"
    print(
        f"{head} |difference| mean {difference['mean']:.1e} max {difference['max']:.1e}{target}; token ratio "
        f"{ratio['min']:.4f} to {ratio['max']:.4f}, deviation {ratio['deviation']:.1e}; sequence ratio "
        f"{whole['min']:.3f} to {whole['max']:.3f}; {row['tokens']} tokens in {row['generation_s']:.2f} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
