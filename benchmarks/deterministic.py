"""What `deterministic=True` costs, and that it does what it says.

    python benchmarks/deterministic.py --device cuda --out benchmarks/deterministic-cuda.json
    python benchmarks/deterministic.py --device cpu --out benchmarks/deterministic-cpu.json

CUDA: the article workload of DESIGN.md (64 prompts of 16-64 tokens, 128 new tokens each) on the 0.5B shape with random
weights in bfloat16. CPU: 16 prompts of 8-128 tokens, 64 new tokens each, SmolLM2-135M in float32. Greedy, with
log-probabilities, prefix cache off. Runs with and without are interleaved; medians are compared. Then a few requests
run alone, and their tokens and log-probabilities are compared with those in the batch, bit for bit, for both engines.
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
from pathlib import Path
from typing import Any

import torch
import transformers

import flatbed

ALONE = 8  # requests that also run alone


def cuda_case() -> tuple[Any, list[list[int]], int]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    draw = random.Random(0)
    return model, [[draw.randrange(1000, 150000) for _ in range(draw.randrange(16, 65))] for _ in range(64)], 128


def cpu_case() -> tuple[Any, list[list[int]], int]:
    from flatbed.models import load_model

    model, _ = load_model("demo", device="cpu", dtype="float32")
    draw = random.Random(0)
    return model, [[draw.randrange(1000, 40000) for _ in range(draw.randrange(8, 129))] for _ in range(16)], 64


def bits(output: flatbed.Output) -> object:
    return [(sample.token_ids, sample.logprobs) for sample in output.samples]


def profile(engine: flatbed.Engine, prompts: list[list[int]], params: flatbed.SamplingParams) -> list[list[Any]]:
    """Kernels of one call: name, launches, microseconds in all."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        engine.generate(prompts, params)
    kernels: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(((sum(t), len(t), name) for name, t in kernels.items()), reverse=True)[:12]
    for total, count, name in rows:
        print(f"{total / 1e3:9.2f} ms  {count:6d} x {total / count:7.1f} us  {name[:80]}", file=sys.stderr)
    return [[name[:100], count, round(total, 1)] for total, count, name in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="of the deterministic engine, on CUDA")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, prompts, new_tokens = cuda_case() if arguments.device == "cuda" else cpu_case()
    params = flatbed.SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=True)
    engines, rows = {}, {}
    for name in ("default", "deterministic"):
        start = time.perf_counter()
        engines[name] = flatbed.Engine(model, prefix_cache=False, deterministic=name == "deterministic")
        rows[name] = {"build_s": round(time.perf_counter() - start, 3), "seconds": []}
    together = {}
    for round_ in range(arguments.repeats + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            together[name] = engine.generate(prompts, params)
            took = time.perf_counter() - start
            print(f"{'first' if not round_ else f'round {round_}':8} {name:14} {took:8.3f} s", file=sys.stderr)
            rows[name]["seconds"].append(round(took, 4))
    for name, engine in engines.items():
        row = rows[name]
        row["first_s"] = row["seconds"].pop(0)
        row["median_s"] = statistics.median(row["seconds"])
        row["tokens_per_s"] = round(len(prompts) * new_tokens / row["median_s"], 1)
        alone = [engine.generate([prompt], params)[0] for prompt in prompts[:ALONE]]
        row["alone_as_in_the_batch"] = sum(bits(a) == bits(b) for a, b in zip(alone, together[name], strict=False))
        row["same_tokens_alone"] = sum(a.token_ids == b.token_ids for a, b in zip(alone, together[name], strict=False))
    if arguments.profile:
        rows["deterministic"]["kernels"] = profile(engines["deterministic"], prompts, params)
    cuda = arguments.device == "cuda"
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *(a.rpartition("/")[2] if a.endswith(".json") else a for a in sys.argv)]),
        "machine": torch.cuda.get_device_name()
        if cuda
        else {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "flatbed": flatbed.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "requests": len(prompts),
        "alone": ALONE,
        "engines": rows,
        "deterministic_over_default": round(rows["deterministic"]["median_s"] / rows["default"]["median_s"], 2),
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
