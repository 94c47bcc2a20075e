"""One comparison of log-probabilities: what fidelity.py has run in another process."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import trl
from datasets import Dataset
from jobs import Comparison
from tokenizers import Tokenizer, models
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

import flatbed
from flatbed.lab.models import load, vocabulary_of

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


def by_flatbed(model: Any, prompts: list[list[int]], job: Comparison, **settings: Any) -> list[Rolled]:
    params = flatbed.SamplingParams(
        max_new_tokens=job.new_tokens, temperature=1.0, n=job.samples, logprobs=True, seed=0
    )
    with flatbed.Engine(model, **settings) as engine:
        outputs = engine.generate(prompts, params)
    return [Rolled(o.prompt_token_ids, list(s.token_ids), list(s.logprobs or ())) for o in outputs for s in o.samples]


def by_transformers(model: Any, prompts: list[list[int]], job: Comparison) -> list[Rolled]:
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(max_new_tokens=job.new_tokens, pad_token_id=0, **sampling)
    config.eos_token_id = model.generation_config.eos_token_id
    results = model.generate_batch(
        [prompt for prompt in prompts for _ in range(job.samples)],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=job.blocks, max_batch_tokens=TOKEN_BUDGET, return_logprobs=True
        ),
        progress_bar=False,
    )
    return [Rolled(list(r.prompt_ids), list(r.generated_tokens), list(r.logprobs)) for r in results.values()]


def roll_out(engine: str, model: Any, prompts: list[list[int]], job: Comparison) -> list[Rolled]:
    if engine == "transformers":
        return by_transformers(model, prompts, job)
    return (
        by_flatbed(model, prompts, job, deterministic=True)
        if engine == "deterministic"
        else by_flatbed(model, prompts, job)
    )


def make_trainer(model: Any, precision: str, job: Comparison, folder: str) -> Any:
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
            output_dir=folder, bf16=precision == "mixed", use_cpu=job.device == "cpu", beta=0.0, **settings
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "-"}] * 2),
        processing_class=tokenizer,
    )


@torch.no_grad()
def by_trainer(trainer: Any, rolled: list[Rolled], job: Comparison) -> list[list[float]]:
    """The trainer's log-probabilities of each completion's tokens, in batches padded as TRL pads them."""
    found = []
    device = trainer.accelerator.device
    for start in range(0, len(rolled), job.batch):
        part = rolled[start : start + job.batch]
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


@torch.no_grad()
def in_float64(model: Any, rolled: list[Rolled]) -> list[list[float]]:
    """Log-probabilities of each completion's tokens, one by one, by this model with its weights as float64."""
    model = model.double()
    found = []
    for one in rolled:
        ids = torch.tensor([one.prompt + one.tokens], device=model.device)
        logits = model(ids, logits_to_keep=len(one.tokens) + 1).logits[0, :-1]
        tokens = ids[0, len(one.prompt) :, None]
        found.append((logits.gather(1, tokens)[:, 0] - logits.logsumexp(-1)).tolist())
    return found


def distance(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Absolute differences, token by token."""
    found = sorted(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return {"mean": statistics.fmean(found), "p99": found[int(0.99 * (len(found) - 1))], "max": found[-1]}


def compare(rolled: list[Rolled], theirs: list[list[float]]) -> dict[str, Any]:
    per_sequence = [
        [a - b for a, b in zip(their, one.logprobs, strict=True)] for one, their in zip(rolled, theirs, strict=True)
    ]
    ratios = [math.exp(d) for each in per_sequence for d in each]
    sequences = [math.exp(min(700.0, sum(each))) for each in per_sequence]
    return {
        "tokens": len(ratios),
        "difference": distance([one.logprobs for one in rolled], theirs),
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


def run(job: Comparison) -> dict[str, Any]:
    """Rolls out by the job's engine and compares; raises ValueError where tokens have no log-probability."""
    warnings.filterwarnings("ignore")
    dtype = "bfloat16" if job.precision == "bfloat16" else "float32"
    model, tokenizer = load(job.model, job.device, dtype, job.attention)
    prompts = make_prompts(tokenizer, vocabulary_of(model.config), job.prompts)
    mixed = torch.autocast(job.device, torch.bfloat16) if job.precision == "mixed" else contextlib.nullcontext()
    start = time.perf_counter()
    with mixed:
        rolled = roll_out(job.engine, model, prompts, job)
    took = time.perf_counter() - start
    if any(len(one.tokens) != len(one.logprobs) or not one.tokens for one in rolled):
        raise ValueError("no log-probability for some tokens")
    with tempfile.TemporaryDirectory() as folder:
        theirs = by_trainer(make_trainer(model.eval(), job.precision, job, folder), rolled, job)
    found = {"generation_s": round(took, 3), **compare(rolled, theirs)}
    if job.float64:
        del model
        exact, _ = load(job.model, job.device, dtype, job.attention)
        truth = in_float64(exact, rolled)
        found["engine_from_float64"] = distance([one.logprobs for one in rolled], truth)
        found["trainer_from_float64"] = distance(theirs, truth)
        del exact
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def prepare() -> str:
    """Makes the CUDA context. Returns the name of the machine."""
    if not torch.cuda.is_available():
        return "CPU"
    torch.ones(1, device="cuda").sum().item()
    return torch.cuda.get_device_name()
