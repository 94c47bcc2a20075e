"""GRPO on sums that can be checked: SmolLM2-135M learns to add two digits and to end with "Answer: N".

    python examples/grpo_arithmetic.py --out RESULTS                 # the demonstration model; a minute or so on a GPU
    python examples/grpo_arithmetic.py --rollouts flatbed,generate --seeds 0,1 --out RESULTS  # and TRL's own generate
    python examples/grpo_arithmetic.py --plot RESULTS                # compares and draws the runs that are there
    python examples/grpo_arithmetic.py --tiny                        # a random model, on the CPU, in seconds

The reward of a completion is 1 for the right sum in the right form, 0.2 for the form alone, 0 otherwise. All that
Flatbed needs of a TRL script is in one line: where GRPOTrainer comes from. (OPTIONS is for speed.)

RESULTS gets grpo-arithmetic-ROLLOUTS-SEED.json of each run when it ends, grpo-arithmetic.png, and grpo-arithmetic.json
with the comparison. A run that is there already is not made again, so that an interrupted command can be repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import re
import statistics
import tempfile
import time
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig

import flatbed
from flatbed.integrations.trl import GRPOTrainer
from flatbed.models import load_model

TRAINERS = {"flatbed": GRPOTrainer, "generate": trl.GRPOTrainer}
# Under autocast CUDA graphs hold cast weights; there is memory for them to stay while a step is trained.
OPTIONS = {"flatbed": {"flatbed": {"held": "8 GiB"}}, "generate": {}}
FORM_ALONE = 0.2
EXAMPLE = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 plus 3 is 5.\nAnswer: 5"},
]
ANSWER = re.compile(r"Answer:\s*(\d+)\s*$")
EVERY_SUM = [(a, b) for a in range(1, 10) for b in range(1, 10)]
# Rewards of steps that follow each other are alike: what is compared is means of so many steps.
BLOCK = 5
# What a run is made with; one with others is another run.
SETTINGS = ("model", "steps", "prompts", "samples", "new_tokens", "learning_rate", "tiny")


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
    """The share of all 81 sums that the model answers rightly, greedily, in the precision of rollouts."""
    kind = model.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"), flatbed.Engine(model, tokenizer) as engine:
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


class TimeLimit(TrainerCallback):
    """Ends training after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.reached = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if time.monotonic() > self.end and state.global_step < state.max_steps:
            self.reached = control.should_training_stop = True
        return control


def train(rollouts: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run; gives what is logged of it."""
    model, tokenizer = tiny_model() if args.tiny else load_model(args.model, dtype="float32")
    on_gpu = model.device.type == "cuda"
    limit = TimeLimit(args.limit)
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
                seed=seed,
            ),
            reward_funcs=reward,
            train_dataset=sums(args.prompts * args.steps, seed),
            processing_class=tokenizer,
            callbacks=[limit],
            **OPTIONS[rollouts],
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
        "seed": seed,
        "machine": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": settings_of(args),
        "ended_by_the_time_limit": limit.reached,
        "seconds": round(seconds, 2),
        "generation_s": round(sum(generation_s), 2),
        "greedy_accuracy": {"before": before, "after": after},
        "steps": [{name: entry[name] for name in watched if name in entry} for entry in steps],
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {**{name: getattr(args, name) for name in SETTINGS}, "model": Path(args.model).name}


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


def rewards_of(run: dict[str, Any]) -> list[float]:
    return [step["reward"] for step in run["steps"]]


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Flatbed's rewards less those of padded `generate`, step by step over the same prompts.

    Its mean, and the standard error of that: of means of BLOCK steps, or from three seeds on of whole runs, which also
    differ by how their training went. The same within noise is a difference of at most two standard errors.
    """
    by_name = {(run["rollouts"], run["seed"]): rewards_of(run) for run in runs}
    seeds = [seed for rollouts, seed in by_name if rollouts == "flatbed" and ("generate", seed) in by_name]
    found: dict[str, Any] = {"seeds": seeds}
    blocks, wholes = [], []
    for seed in seeds:
        pairs = zip(by_name["flatbed", seed], by_name["generate", seed], strict=False)
        differences = [ours - theirs for ours, theirs in pairs]
        wholes.append(statistics.fmean(differences))
        blocks += [statistics.fmean(differences[at : at + BLOCK]) for at in range(0, len(differences), BLOCK)]
    samples, what = (wholes, "runs") if len(wholes) >= 3 else (blocks, f"blocks of {BLOCK} steps")
    if len(samples) < 2 or not statistics.stdev(samples):
        return {**found, "verdict": "there is too little to compare"}
    mean, error = statistics.fmean(samples), statistics.stdev(samples) / math.sqrt(len(samples))
    same = "the same within noise" if abs(mean) <= 2 * error else "NOT the same within noise"
    return {
        **found,
        "mean_difference": mean,
        "standard_error": error,
        "verdict": f"mean reward with Flatbed less that with padded generate: {mean:+.3f}, two standard errors of "
        f"{len(samples)} {what}: {2 * error:.3f}; {same}",
    }


def say(run: dict[str, Any]) -> str:
    rewards = rewards_of(run)
    tenth = max(1, len(rewards) // 10)
    ended = ", ended by the time limit" if run["ended_by_the_time_limit"] else ""
    return (
        f"{run['rollouts']}, seed {run['seed']}: {len(rewards)} steps in {run['seconds']} s{ended}, "
        f"{run['generation_s']} s of it generation; mean reward {sum(rewards[:tenth]) / tenth:.2f} -> "
        f"{sum(rewards[-tenth:]) / tenth:.2f}; greedy accuracy on all sums "
        f"{run['greedy_accuracy']['before']:.0%} -> {run['greedy_accuracy']['after']:.0%}"
    )


def summarise(folder: Path) -> None:
    """Compares the runs in the folder in words, and draws them."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("grpo-arithmetic-*-*.json"))]
    if not runs:
        raise SystemExit(f"no runs in {folder}")
    summary = {"runs": [say(run) for run in runs], "comparison": compare(runs)}
    (folder / "grpo-arithmetic.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(*summary["runs"], summary["comparison"]["verdict"], sep="\n", flush=True)
    if importlib.util.find_spec("matplotlib") is None:
        print("nothing is drawn: matplotlib is not installed")
    else:
        print(plot(runs, folder))


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and up to BLOCK - 1 before it."""
    return [statistics.fmean(values[max(0, at - BLOCK + 1) : at + 1]) for at in range(len(values))]


def plot(runs: list[dict[str, Any]], folder: Path) -> Path:
    """Draws reward over steps and over time; thin lines are single steps, thick ones means of the last few."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    colours = {"flatbed": "tab:blue", "generate": "tab:orange"}
    labels = {}
    for rollouts in colours:
        of_it = [run for run in runs if run["rollouts"] == rollouts]
        seconds, generation = (
            statistics.fmean(run[name] for run in of_it or runs) for name in ("seconds", "generation_s")
        )
        labels[rollouts] = f"{rollouts}: {seconds:.0f} s, of it generation {generation:.0f}"
    for run in runs:
        rewards, colour = rewards_of(run), colours[run["rollouts"]]
        share, label = run["seconds"] / max(1, len(rewards)), labels.pop(run["rollouts"], None)
        for axes, across in ((by_step, 1.0), (by_time, share)):
            at = [across * (step + 1) for step in range(len(rewards))]
            axes.plot(at, rewards, color=colour, linewidth=0.5, alpha=0.5)
            axes.plot(at, smooth(rewards), color=colour, label=label)
    settings = runs[0]["settings"]
    name = "a random model" if settings["tiny"] else {"demo": "SmolLM2-135M"}.get(settings["model"], settings["model"])
    by_step.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1.05), title=f"GRPO on sums, {name}")
    by_time.set(xlabel="seconds of training", title=", ".join(sorted({run["machine"] for run in runs})))
    by_step.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    path = folder / "grpo-arithmetic.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def is_there(path: Path, args: argparse.Namespace) -> bool:
    """Whether this run was made, with these settings and to its end."""
    if not path.is_file():
        return False
    run = json.loads(path.read_text())
    return run["settings"] == settings_of(args) and not run["ended_by_the_time_limit"]


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
    parser.add_argument("--seeds", default="0", help="a run of each of --rollouts for each of these")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a run ends early")
    parser.add_argument("--tiny", action="store_true", help="a random model, on the CPU")
    parser.add_argument("--out", type=Path, help="a folder for logs and the plot")
    parser.add_argument("--plot", type=Path, help="only compares and draws the runs that were logged in this folder")
    args = parser.parse_args()
    if args.plot is not None:
        summarise(args.plot)
        return
    if args.tiny:
        args.steps, args.prompts, args.samples, args.new_tokens = 3, 2, 4, 12
    unknown = [one for one in args.rollouts.split(",") if one not in TRAINERS]
    if unknown:
        raise SystemExit(f"unknown rollouts {', '.join(unknown)}; known: {', '.join(TRAINERS)}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if args.out is None else args.out
        out.mkdir(parents=True, exist_ok=True)
        for seed in map(int, args.seeds.split(",")):
            for rollouts in args.rollouts.split(","):
                path = out / f"grpo-arithmetic-{rollouts}-{seed}.json"
                if not is_there(path, args):
                    path.write_text(json.dumps(train(rollouts, seed, args), indent=1) + "\n")
        summarise(out)


if __name__ == "__main__":
    main()
