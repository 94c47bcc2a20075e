"""GRPO on sums that can be checked: SmolLM2-135M learns to add two digits and to end with "Answer: N".

    python examples/grpo_arithmetic.py --out RESULTS                 # the demonstration model; a minute or so on a GPU
    python examples/grpo_arithmetic.py --rollouts flatbed,generate   # and with TRL's own padded generate beside it
    python examples/grpo_arithmetic.py --plot RESULTS                # draws the runs that were logged there
    python examples/grpo_arithmetic.py --tiny                        # a random model, on the CPU, in seconds

The reward of a completion is 1 for the right sum in the right form, 0.2 for the form alone, 0 otherwise. All that
Flatbed needs of a TRL script is in one line: where GRPOTrainer comes from.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

import flatbed
from flatbed.integrations.trl import GRPOTrainer
from flatbed.models import load_model

TRAINERS = {"flatbed": GRPOTrainer, "generate": trl.GRPOTrainer}
FORM_ALONE = 0.2
EXAMPLE = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 plus 3 is 5.\nAnswer: 5"},
]
ANSWER = re.compile(r"Answer:\s*(\d+)\s*$")
EVERY_SUM = [(a, b) for a in range(1, 10) for b in range(1, 10)]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [*EXAMPLE, {"role": "user", "content": f"What is {a} + {b}?"}]


def score(text: str, total: int) -> float:
    """The reward of one completion."""
    match = ANSWER.search(text)
    if match is None:
        return 0.0
    return 1.0 if int(match[1]) == total else FORM_ALONE


def reward(completions: list[list[dict[str, str]]], total: list[int], **_: Any) -> list[float]:
    """What TRL calls: one message for each completion, and the dataset's own column."""
    return [score(message["content"], right) for (message,), right in zip(completions, total, strict=True)]


def sums(count: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    picked = [draw.choice(EVERY_SUM) for _ in range(count)]
    return Dataset.from_list([{"prompt": question(a, b), "total": a + b} for a, b in picked])


def accuracy(model: Any, tokenizer: Any, new_tokens: int) -> float:
    """The share of all 81 sums that the model answers rightly, greedily."""
    with flatbed.Engine(model, tokenizer) as engine:
        outputs = engine.generate(
            [question(a, b) for a, b in EVERY_SUM], flatbed.SamplingParams(max_new_tokens=new_tokens)
        )
    right = [score(output.text or "", a + b) == 1 for output, (a, b) in zip(outputs, EVERY_SUM, strict=True)]
    return sum(right) / len(right)


def tiny_model() -> tuple[Any, Any]:
    """A random model of two layers, and a tokenizer of letters; nothing needs to be there for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {"<eos>": 0, **{letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", chat_template=template
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=len(letters), num_key_value_heads=2, bos_token_id=None, eos_token_id=0, **sizes)
    return Qwen2ForCausalLM(config), tokenizer


def train(rollouts: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run; gives what is logged of it."""
    model, tokenizer = tiny_model() if args.tiny else load_model(args.model, dtype="float32")
    on_gpu = model.device.type == "cuda"
    before = accuracy(model, tokenizer, args.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[rollouts](
            model=model.train(),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.prompts * args.samples,
                num_generations=args.samples,
                max_completion_length=args.new_tokens,
                learning_rate=args.learning_rate,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=2,
                temperature=1.0,
                bf16=on_gpu,  # float32 weights, trained and rolled out under bfloat16 autocast
                use_cpu=not on_gpu,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=args.seed,
            ),
            reward_funcs=reward,
            train_dataset=sums(args.prompts * args.steps, args.seed),
            processing_class=tokenizer,
        )
        generation_s = time_generation(trainer)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    after = accuracy(trainer.model, tokenizer, args.new_tokens)
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    watched = ("reward", "completions/mean_length", "entropy", "sampling/sampling_logp_difference/mean", "step_time")
    if rollouts == "flatbed":
        trainer.flatbed.close()
    return {
        "rollouts": rollouts,
        "machine": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "arguments": {name: str(value) for name, value in vars(args).items() if name not in ("out", "plot")},
        "seconds": round(seconds, 2),
        "generation_s": round(sum(generation_s), 2),
        "greedy_accuracy": {"before": before, "after": after},
        "steps": [{name: entry[name] for name in watched if name in entry} for entry in steps],
    }


def time_generation(trainer: Any) -> list[float]:
    """Puts a stopwatch around the trainer's generation, which fills the list that is returned."""
    taken: list[float] = []
    generate = trainer._generate

    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = generate(*given, **named)
        taken.append(time.perf_counter() - start)
        return result

    trainer._generate = timed
    return taken


def plot(folder: Path) -> Path:
    """Draws reward over steps and over time of every run in the folder."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("grpo-arithmetic-*.json"))]
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for run in runs:
        rewards = [step["reward"] for step in run["steps"]]
        share = run["seconds"] / max(1, len(rewards))
        label = f"{run['rollouts']}: {run['seconds']:.0f} s, {run['generation_s']:.0f} s of it generation"
        by_step.plot(range(1, len(rewards) + 1), rewards, label=label)
        by_time.plot([share * (at + 1) for at in range(len(rewards))], rewards)
    by_step.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1.05), title="GRPO on sums, SmolLM2-135M")
    by_time.set(xlabel="seconds of training", title=", ".join(sorted({run["machine"] for run in runs})))
    by_step.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    path = folder / "grpo-arithmetic.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", default="flatbed", help="flatbed, generate, or both: in this order")
    parser.add_argument("--model", default="demo", help="a folder, a .gguf file, a hub name, or `demo`")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a random model, on the CPU")
    parser.add_argument("--out", type=Path, help="a folder for logs and the plot")
    parser.add_argument("--plot", type=Path, help="only draws the runs that were logged in this folder")
    args = parser.parse_args()
    if args.plot is not None:
        print(plot(args.plot))
        return
    if args.tiny:
        args.steps, args.prompts, args.samples, args.new_tokens = 3, 2, 4, 12
    for rollouts in args.rollouts.split(","):
        if rollouts not in TRAINERS:
            raise SystemExit(f"unknown rollouts {rollouts!r}; known: {', '.join(TRAINERS)}")
        run = train(rollouts, args)
        rewards = [step["reward"] for step in run["steps"]]
        tenth = max(1, len(rewards) // 10)
        print(
            f"{rollouts}: {run['seconds']} s, {run['generation_s']} s of it generation; mean reward "
            f"{sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}; greedy accuracy on all sums "
            f"{run['greedy_accuracy']['before']:.0%} -> {run['greedy_accuracy']['after']:.0%}",
            flush=True,
        )
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"grpo-arithmetic-{rollouts}.json").write_text(json.dumps(run, indent=1) + "\n")
    if args.out is not None:
        print(plot(args.out))


if __name__ == "__main__":
    main()
