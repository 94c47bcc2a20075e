"""Five TRL training steps, timed: how much of a step generation takes, and how much memory.

    python benchmarks/trl_steps.py --out OUT.json                     # GRPO, 64 completions of 128 tokens, 8 a prompt
    python benchmarks/trl_steps.py --cases grpo:128:8,rloo:128:8,grpo:512:8,grpo:128:32 --rollouts none,flatbed
    python benchmarks/trl_steps.py --fresh --rollouts none,flatbed    # each run in a process of its own
    python benchmarks/trl_steps.py --tiny --rollouts all              # two layers, on the CPU, in a minute or two

A case is an algorithm, the new tokens, and the completions of each prompt. The model has the shape of Qwen2.5-0.5B and
random weights. Each of `--rollouts` trains a fresh copy of it in turn:

    none            completions are made up: what training alone takes, in seconds and in memory
    generate        TRL's default, padded `generate`
    continuous      TRL's `use_transformers_continuous_batching`: half of the free memory for the cache
    continuous-64   the same with `num_blocks=64`
    flatbed         flatbed.integrations.trl, with TRL's importance-sampling correction as in TRL's own default
    flatbed-plain   without that correction, which costs one more forward pass a step; `generate` has none either
    flatbed-held    with graphs that stay, however large (`held`); for `--dtype float32`, where they are large

`setup_s` builds the trainer, `seconds` is all of `trainer.train()`, `generation_s` what of it passes in TRL's
`_generate_single_turn` (the first step's start-up, graphs and compilation included) and `release_s` in what surrounds
it: tokenizing, decoding, and giving memory back. The first run of a process pays for torch's own start as well, and the
first on a machine for compiling kernels: `fresh` and `kernels` say so. Memory: see trl_arms.py.

Runs share a process until one fails, which is a result too. OUT.json, and OUT.md beside it, are written after each run;
what OUT.json has is not run again (failures are), so that a sitting can be continued.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs import Training
from supervised import Outcome, Supervised, Tell

ARMS = ("none", "generate", "continuous", "continuous-64", "flatbed", "flatbed-plain", "flatbed-held")
ROWS = 64
# DESIGN.md, section 7: all five steps and generation in them, of 64 completions of 128 tokens; and training memory
# beyond that of a run without generation.
TARGETS = {"seconds": 2.5, "generation_s": 1.2, "more_mib": 100}


def prepare() -> str:
    import trl_arms

    return trl_arms.prepare()


def run(job: Training, tell: Tell) -> dict[str, Any]:
    import trl_arms

    return trl_arms.run(job, tell)


def jobs(args: argparse.Namespace) -> list[Training]:
    arms = ARMS if args.rollouts == "all" else args.rollouts.split(",")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise SystemExit(f"unknown rollouts {', '.join(unknown)}; known: {', '.join(ARMS)}")
    found = []
    for case in args.cases.split(","):
        algorithm, new_tokens, generations = case.split(":")
        if algorithm not in ("grpo", "rloo"):
            raise SystemExit(f"unknown algorithm {algorithm!r}; known: grpo, rloo")
        for arm in arms:
            found.append(
                Training(
                    algorithm, int(new_tokens) // 8 if args.tiny else int(new_tokens), int(generations), arm,
                    args.steps, max(16, int(generations)) if args.tiny else ROWS,
                    "float32" if args.tiny else args.dtype, args.attention, args.checkpointing, args.tiny,
                    args.fresh,
                )
            )  # fmt: skip
    return found


def record(job: Training, outcome: Outcome, machine: str | None) -> dict[str, Any]:
    row = {
        **asdict(job),
        "machine": machine,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "fresh": outcome.fresh,
    }
    if outcome.failed is not None:
        return {**row, "failed": outcome.failed, "generations_until_then": outcome.told}
    return {**row, **outcome.result}


def same_run(row: dict[str, Any], job: Training) -> bool:
    return all(row.get(name) == value for name, value in asdict(job).items())


# ---- what it comes to ------------------------------------------------------------------------------------------------


def training_bytes(row: dict[str, Any]) -> int:
    """All that is in use on the device at the peak of training."""
    return row["training_bytes"] + row["graph_bytes"] + row["outside_bytes"]


def more_mib(row: dict[str, Any], results: list[dict[str, Any]]) -> float | None:
    """Training memory beyond that of the same training without generation; None where that was not run alike."""
    names = ["machine", *(name for name in Training.__dataclass_fields__ if name not in ("rollouts", "alone"))]
    bases = [
        other
        for other in results
        if other["rollouts"] == "none" and "failed" not in other and all(other[name] == row[name] for name in names)
    ]
    # One in the same kind of process comes first: in a shared one, what the runs before have loaded counts as well.
    bases.sort(key=lambda other: other["alone"] != row["alone"])
    return (training_bytes(row) - training_bytes(bases[0])) / 2**20 if bases and training_bytes(bases[0]) else None


def verdict(row: dict[str, Any], more: float | None) -> str:
    """Against the targets, for Flatbed's runs of what the targets are about."""
    if "failed" in row or row["tiny"] or not row["rollouts"].startswith("flatbed"):
        return ""
    found = {"more_mib": more}
    if (row["new_tokens"], row["rows"], row["steps"], row["dtype"]) == (128, ROWS, 5, "bfloat16"):
        found |= {name: row[name] for name in ("seconds", "generation_s")}
    names = {"seconds": "steps", "generation_s": "generation", "more_mib": "memory"}
    return ", ".join(
        f"{names[name]} {'met' if value <= TARGETS[name] else 'missed'}"
        for name, value in found.items()
        if value is not None
    )


HEADS = ("", "rollouts", "process", "seconds", "generation", "first", "kernels compiled", "training peak, GB")
HEADS += ("over none, MiB", "")


def line(row: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """A result as a row of the table."""
    masters = "" if row["dtype"] == "bfloat16" or row["tiny"] else f" {row['dtype']}"
    case = f"{row['steps']} {row['algorithm'].upper()} {row['new_tokens']} x {row['generations']}{masters}"
    cells = [case, row["rollouts"], "own" if row["alone"] else "shared, first" if row["fresh"] else "shared"]
    if "failed" in row:
        cells += [f"{row['failed']}, after {len(row['generations_until_then'])} generations"]
    else:
        more = more_mib(row, results)
        cells += [f"{row[name]:.2f}" for name in ("seconds", "generation_s", "first_generation_s")]
        cells += [str(row["kernels"]["compiled"]), f"{training_bytes(row) / 1e9:.2f}"]
        cells += ["" if more is None else f"{more:+.0f}", verdict(row, more)]
    return f"| {' | '.join(cells)} |{' |' * (len(HEADS) - len(cells))}"


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = report["results"]
    places = {(row["machine"], *row["versions"].items()) for row in results}
    lines = [
        "# TRL steps",
        "",
        *(f"{place[0]}: {', '.join(' '.join(one) for one in place[1:])}." for place in sorted(places, key=str)),
        f"{min(row['date'] for row in results)} to {max(row['date'] for row in results)}.",
        "",
        *(f"    {command}" for command in report["commands"]),
        "",
        f"Targets: {TARGETS['seconds']} s, of it generation {TARGETS['generation_s']} s, for 64 completions of 128 "
        f"tokens a step; training memory within {TARGETS['more_mib']} MiB of a run without generation.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{' --- |' * len(HEADS)}",
        *(line(row, results) for row in results),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="grpo:128:8", help="ALGORITHM:NEW_TOKENS:COMPLETIONS of a prompt, by commas")
    parser.add_argument("--rollouts", default="none,generate,continuous-64,flatbed", help="in this order, or `all`")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; float32 ones are trained under autocast")
    parser.add_argument("--attention", default="sdpa", help="of the model, and so of training")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--fresh", action="store_true", help="a process for each run")
    parser.add_argument("--again", action="store_true", help="also what OUT.json has")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a run may take")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "trl_steps", "targets": TARGETS, "commands": [], "results": []}
    if args.out is not None and args.out.is_file():
        report |= json.loads(args.out.read_text())
    shown = [given if given != str(args.out) else args.out.name for given in sys.argv[1:]]
    report["commands"].append(" ".join(["python benchmarks/trl_steps.py", *shown]))
    results = report["results"]
    supervised = Supervised(prepare, run, args.limit)
    for job in jobs(args):
        if not args.again and any(same_run(row, job) and "failed" not in row for row in results):
            continue
        outcome = supervised(job)
        row = record(job, outcome, supervised.prepared)
        results[:] = [old for old in results if not (same_run(old, job) and "failed" in old)] + [row]
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(table(report))
        print(json.dumps(row), flush=True)
        print(line(row, results), file=sys.stderr, flush=True)
        if args.fresh:
            supervised.close()
    supervised.close()


if __name__ == "__main__":
    main()
