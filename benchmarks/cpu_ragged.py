"""A ragged batch on the CPU: Flatbed beside padded `generate` and Transformers' own `generate_batch`, in one run.

16 prompts of 8 to 128 tokens, 64 new tokens each, greedy, no EOS; the demonstration model (SmolLM2-135M) in float32.
Runs are interleaved, so that a machine that slows down slows all three; the medians are compared. Then Flatbed alone at
the smallest capacity that holds the batch and at 90 % of memory, whole calls with a new engine each, interleaved too.

    python benchmarks/cpu_ragged.py --repeats 5 --out benchmarks/cpu-ragged.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import flatbed
from flatbed.models import load_model

NEW_TOKENS = 64


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1000, 40000) for _ in range(draw.randrange(8, 129))] for _ in range(16)]


def padded_generate(model: Any, batch: list[list[int]]) -> list[list[int]]:
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[:, width:].tolist()


def generate_batch(model: Any, batch: list[list[int]]) -> list[list[int]]:
    tokens = sum(map(len, batch)) + len(batch) * NEW_TOKENS
    out = model.generate_batch(
        batch,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=tokens // 32 + 2 * len(batch), page_size=32),
    )
    return [o.generated_tokens for o in out.values()]


def whole_call(model: Any, batch: list[list[int]], capacity: str) -> list[list[int]]:
    """What a caller pays who builds an engine, uses it once and closes it."""
    with flatbed.Engine(model, capacity=capacity, prefix_cache=False) as engine:
        return on_engine(engine, batch)


def on_engine(engine: flatbed.Engine, batch: list[list[int]]) -> list[list[int]]:
    outputs = engine.generate(batch, flatbed.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    return [o.token_ids for o in outputs]


def interleaved(runs: dict[str, Callable[[], list[list[int]]]], repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of each, in turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, list[list[int]]] = {}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens[name] = run()
            took = time.perf_counter() - start
            print(f"{'warm-up' if not round_ else f'round {round_}':8} {name:34} {took:7.2f} s", file=sys.stderr)
            if round_:
                seconds[name].append(took)
    made = {name: sum(map(len, rows)) for name, rows in tokens.items()}
    first = next(iter(tokens))
    return {
        name: {
            "seconds": [round(s, 3) for s in times],
            "median_s": round(statistics.median(times), 3),
            "tokens": made[name],
            "tokens_per_s": round(made[name] / statistics.median(times), 1),
            "same_tokens_as_" + first.replace(" ", "_"): tokens[name] == tokens[first],
        }
        for name, times in seconds.items()
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, _ = load_model("demo", device="cpu", dtype="float32")
    model.generation_config.eos_token_id = None
    batch = prompts()
    engine = flatbed.Engine(model, prefix_cache=False)  # every run computes its prompts, as the others do
    engines = interleaved(
        {
            "flatbed": lambda: on_engine(engine, batch),
            "padded generate": lambda: padded_generate(model, batch),
            "transformers generate_batch": lambda: generate_batch(model, batch),
        },
        arguments.repeats,
    )
    blocks = sum(-(-(len(p) + NEW_TOKENS - 1) // engine.config.block_size) for p in batch)
    engine.close()
    capacities = interleaved(
        {
            f"capacity {blocks} blocks": lambda: whole_call(model, batch, f"{blocks} blocks"),
            "capacity 90%": lambda: whole_call(model, batch, "90%"),
        },
        arguments.repeats,
    )
    smallest, largest = (r["median_s"] for r in capacities.values())
    pace = engines["flatbed"]["tokens_per_s"]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *(a.rpartition("/")[2] if a.endswith(".json") else a for a in sys.argv)]),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "flatbed": flatbed.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "workload": "16 prompts of 8-128 tokens, 64 new tokens each, greedy, SmolLM2-135M, float32",
        "engines": engines,
        "over_padded_generate": round(pace / engines["padded generate"]["tokens_per_s"], 2),
        "over_generate_batch": round(pace / engines["transformers generate_batch"]["tokens_per_s"], 2),
        "capacities": capacities,
        "flatness_90_percent_over_smallest": round(largest / smallest, 3),
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
