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
token; `sequence_ratio` that of a whole completion. The target in float32 is a difference within 1e-5. With `--float64`
both are also compared with a forward of the same weights in float64, which says how much of a difference is whose.

Each comparison has a time limit, and one that fails is a result too. OUT.json, and OUT.md beside it, are written after
each.
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

from jobs import Comparison
from supervised import Outcome, Supervised, Tell

ENGINES = ("flatbed", "deterministic", "transformers")
PRECISIONS = ("float32", "bfloat16", "mixed")
FLOAT32_TARGET = 1e-5


def prepare() -> str:
    import fidelity_runs

    return fidelity_runs.prepare()


def run(job: Comparison, tell: Tell) -> dict[str, Any]:
    import fidelity_runs

    return fidelity_runs.run(job)


def record(job: Comparison, outcome: Outcome, machine: str | None) -> dict[str, Any]:
    row = {
        **asdict(job),
        "model": Path(job.model).name,
        "machine": machine,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return {**row, "failed": outcome.failed} if outcome.failed is not None else {**row, **outcome.result}


HEADS = ("model", "precision", "engine", "tokens", "mean difference", "99 %", "largest", "token ratio", "deviation")
HEADS += ("completion ratio", "engine, trainer from float64: largest", "")


def line(row: dict[str, Any]) -> str:
    """A result as a row of the table."""
    cells = [row["model"], row["precision"], row["engine"]]
    if "failed" in row:
        cells += [row["failed"]]
    else:
        difference, ratio, whole = row["difference"], row["ratio"], row["sequence_ratio"]
        cells += [str(row["tokens"]), *(f"{difference[name]:.1e}" for name in ("mean", "p99", "max"))]
        cells += [f"{ratio['min']:.4f} to {ratio['max']:.4f}", f"{ratio['deviation']:.1e}"]
        cells += [f"{whole['min']:.3f} to {whole['max']:.3f}", from_float64(row), verdict(row)]
    return f"| {' | '.join(cells)} |{' |' * (len(HEADS) - len(cells))}"


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = report["results"]
    places = {(row["machine"], *row["versions"].items()) for row in results}
    lines = [
        "# Log-probabilities: the trainer's less the engine's",
        "",
        *(f"{place[0]}: {', '.join(' '.join(one) for one in place[1:])}." for place in sorted(places, key=str)),
        f"{results[0]['date']}; `{report['command']}`.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{' --- |' * len(HEADS)}",
        *map(line, results),
    ]
    return "\n".join(lines) + "\n"


def from_float64(row: dict[str, Any]) -> str:
    names = ("engine_from_float64", "trainer_from_float64")
    return ", ".join(f"{row[name]['max']:.1e}" for name in names if name in row)


def verdict(row: dict[str, Any]) -> str:
    if row["precision"] != "float32":
        return ""
    return f"{'within' if row['difference']['max'] <= FLOAT32_TARGET else 'NOT within'} {FLOAT32_TARGET:.0e}"


def chosen(text: str, known: tuple[str, ...]) -> list[str]:
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return text.split(",")


def main() -> None:
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
    parser.add_argument("--float64", action="store_true", help="compare with a forward in float64 as well")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a comparison may take")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines, precisions = chosen(args.engines, ENGINES), chosen(args.precisions, PRECISIONS)
    shown = [Path(given).name if given in (args.model, str(args.out)) else given for given in sys.argv[1:]]
    report: dict[str, Any] = {
        "benchmark": "fidelity",
        "command": " ".join(["python benchmarks/fidelity.py", *shown]),
        "float32_target": FLOAT32_TARGET,
        "results": [],
    }
    supervised = Supervised(prepare, run, args.limit)
    for precision in precisions:
        for engine in engines:
            job = Comparison(
                args.model, args.device, args.attention, engine, precision,
                args.prompts, args.samples, args.new_tokens, args.batch, args.blocks, args.float64,
            )  # fmt: skip
            outcome = supervised(job)
            report["results"].append(record(job, outcome, supervised.prepared))
            if args.out is not None:
                args.out.write_text(json.dumps(report, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(table(report))
            print(json.dumps(report["results"][-1]), flush=True)
            print(line(report["results"][-1]), file=sys.stderr, flush=True)
    supervised.close()


if __name__ == "__main__":
    main()
