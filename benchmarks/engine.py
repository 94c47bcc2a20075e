"""Flatbed on one GPU: the workloads of DESIGN.md, section 7, on random weights of a real shape.

    python benchmarks/engine.py --shape 0.5b --workload article,w2,w3,one,concurrent,long --out OUT.json
    python benchmarks/engine.py --shape 0.5b --flatness            # capacities from the smallest that fits to 90 %
    python benchmarks/engine.py --shape 0.5b --profile             # where a decode step's GPU time goes, and how long
    it idles

Lengths are fixed (no EOS). "first" is the first call of the process once the model is loaded, engine construction
included; the others are whole calls on the same engine. Each workload has a bound beside it: the time in which
weights and live K/V can be read once a step, at the bandwidth that a large copy reaches here; prefill counts its
operations at the rate that a large matrix product reaches here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import flatbed

ROPE = {"rope_theta": 1e6, "rope_type": "default"}


@dataclass
class Workload:
    """Prompts, new tokens of each, and how they are sampled."""

    prompts: list[list[int]]
    new_tokens: list[int]
    temperature: float = 0.0
    n: int = 1
    logprobs: bool = False

    def params(self) -> list[flatbed.SamplingParams]:
        return [
            flatbed.SamplingParams(
                max_new_tokens=t,
                ignore_eos=True,
                temperature=self.temperature,
                n=self.n,
                logprobs=self.logprobs,
                seed=i,
            )
            for i, t in enumerate(self.new_tokens)
        ]

    @property
    def tokens(self) -> int:
        return self.n * sum(self.new_tokens)

    def smallest(self, block_size: int) -> int:
        """Blocks that hold every request at once at its longest."""
        each = zip(self.prompts, self.new_tokens, strict=True)
        return self.n * sum(-(-(len(p) + t - 1) // block_size) for p, t in each)


def workload(name: str) -> Workload:
    if name == "article":
        draw = random.Random(0)
        prompts = [[draw.randrange(1000, 150000) for _ in range(draw.randrange(16, 65))] for _ in range(64)]
        return Workload(prompts, [128] * 64)
    if name == "w2":
        draw = random.Random(0)
        prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
        return Workload(prompts, [draw.randint(100, 1024) for _ in prompts], temperature=0.6)
    if name == "w3":
        draw = random.Random(1)
        prompts = [[draw.randrange(1000, 150000) for _ in range(200)] for _ in range(8)]
        return Workload(prompts, [512] * 8, temperature=1.0, n=16, logprobs=True)
    draw = random.Random(2)
    if name == "one":
        return Workload([[draw.randrange(1000, 150000) for _ in range(40)]], [128])
    if name == "concurrent":
        return Workload([[draw.randrange(1000, 150000) for _ in range(32)] for _ in range(1024)], [64] * 1024)
    if name == "long":
        return Workload([[draw.randrange(1000, 150000) for _ in range(32000)] for _ in range(8)], [16] * 8)
    raise SystemExit(f"unknown workload {name!r}; known: article, w2, w3, one, concurrent, long")


def build(shape: str) -> Any:
    common = {"vocab_size": 151936, "rope_parameters": ROPE, "eos_token_id": None, "bos_token_id": None}
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        if shape == "0.5b":
            model: Any = Qwen2ForCausalLM(
                Qwen2Config(
                    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, **common,
                )
            )  # fmt: skip
        else:
            model = Qwen3ForCausalLM(
                Qwen3Config(
                    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
                    **common,
                )
            )  # fmt: skip
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def _copy(count: int) -> Any:
    x = torch.randn(count, device="cuda")
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def ceilings() -> dict[str, float]:
    """TB/s of a large copy (bytes read and written), TFLOP/s of a large bfloat16 product, on random data."""

    def best(run: Any, repeats: int) -> float:
        run()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return min(times)

    copy_s = best(_copy(2**29), 5)
    nbytes = 2 * 2**29 * 4
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = best(lambda: a @ b, 5)
    return {"copy_tb_per_s": nbytes / copy_s / 1e12, "product_tflop_per_s": 2 * 8192**3 / product_s / 1e12}


def bound(model: Any, work: Workload, ceiling: dict[str, float]) -> float:
    """Seconds that reading weights and K/V once a step, and the operations of the prefill, take at least."""
    config = model.config
    embedding = config.vocab_size * config.hidden_size
    weights = sum(p.numel() for p in model.parameters())
    read = 2 * (weights if config.tie_word_embeddings else weights - embedding)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    steps = max(work.new_tokens)
    kv = sum(
        work.n * token * (len(p) * t + t * (t - 1) / 2) for p, t in zip(work.prompts, work.new_tokens, strict=True)
    )
    bandwidth, rate = ceiling["copy_tb_per_s"] * 1e12, ceiling["product_tflop_per_s"] * 1e12
    dense = 2 * (weights - (0 if config.tie_word_embeddings else 2) * embedding)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head
    prefill = sum(dense * len(p) + attention * len(p) ** 2 for p in work.prompts)
    return (steps * read + kv) / bandwidth + prefill / rate


def timed(engine: flatbed.Engine, work: Workload) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = engine.generate(work.prompts, work.params())
    took = time.perf_counter() - start
    made = sum(len(s.token_ids) for o in outputs for s in o.samples)
    assert made == work.tokens, f"{made} tokens, not {work.tokens}: {outputs[0].error}"
    return took


def run(model: Any, name: str, ceiling: dict[str, float], repeats: int, capacity: str) -> dict[str, Any]:
    work = workload(name)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with flatbed.Engine(model, capacity=capacity) as engine:
        built = time.perf_counter() - start
        first = timed(engine, work)
        warm = [timed(engine, work) for _ in range(repeats)]
        memory = engine.memory()
        stats = engine.stats()
        graphs = getattr(getattr(engine._steps, "_graphs", ()), "__len__", lambda: 0)()
        engine.release()
        released = engine.memory().committed
    least = bound(model, work, ceiling)
    median = statistics.median(warm)
    row = {
        "workload": name, "capacity": capacity, "build_s": built, "first_s": built + first, "warm_s": warm,
        "median_s": median, "tokens": work.tokens, "tokens_per_s": work.tokens / median, "bound_s": least,
        "over_bound": median / least, "steps": stats.steps, "graphs": graphs,
        "preemptions": stats.preemptions,
        "live_peak_mib": memory.peak / 2**20, "committed_mib": memory.committed / 2**20,
        "graph_mib": memory.graphs / 2**20, "committed_after_release_mib": released / 2**20,
    }  # fmt: skip
    print(
        f"{name:10} {capacity:>12}: first {row['first_s']:.3f}  warm {' '.join(f'{t:.3f}' for t in warm)}  "
        f"bound {least:.3f} ({median / least:.1f}x)  {work.tokens / median:,.0f} tokens/s  {graphs} graphs  "
        f"peak {row['live_peak_mib']:.0f} MiB, committed {row['committed_mib']:.0f} MiB",
        flush=True,
    )
    return row


def profile(model: Any, name: str) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    work = workload(name)
    with flatbed.Engine(model) as engine:
        timed(engine, work)
        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            took = timed(engine, work)
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    whole = until - spans[0][0]
    # Steady decode: the second half of the call.
    middle = spans[0][0] + whole / 2
    half, until = 0.0, middle
    for begin, end in spans:
        half += max(0.0, end - max(begin, until))
        until = max(until, end)
    idle = 1 - half / (until - middle)
    print(
        f"{name}: {took:.3f} s under the profiler; GPU busy {busy / 1e6:.3f} of {whole / 1e6:.3f} s; "
        f"idle in the second half {idle:.1%}"
    )
    rows = sorted(((sum(t), len(t), n) for n, t in kernels.items()), reverse=True)[:25]
    for total, count, kernel in rows:
        print(f"{total / 1e3:9.2f} ms  {count:6d} x {total / count:7.1f} us  {kernel[:90]}")
    return {"workload": name, "idle_second_half": idle, "kernels": [[n[:120], c, t] for t, c, n in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("0.5b", "8b"), default="0.5b")
    parser.add_argument("--workload", default="article,w2,w3,one,concurrent,long")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--capacity", default="90%")
    parser.add_argument("--flatness", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = build(arguments.shape)
    names = arguments.workload.split(",")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *(a.rpartition("/")[2] if a.endswith(".json") else a for a in sys.argv)]),
        "machine": torch.cuda.get_device_name(),
        "versions": {
            "flatbed": flatbed.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        "shape": arguments.shape,
        "rows": [],
    }
    if arguments.profile:
        result["profiles"] = [profile(model, name) for name in names]
    else:
        # The first row is the first call of the process; the ceilings are measured after it.
        ceiling = {"copy_tb_per_s": 4.3, "product_tflop_per_s": 790.0}
        capacities = [arguments.capacity]
        if arguments.flatness:
            names = ["article"]
            capacities = [
                f"{workload('article').smallest(flatbed.EngineConfig.block_size)} blocks",
                "10%",
                "50%",
                "90%",
            ]
        for name in names:
            for capacity in capacities:
                result["rows"].append(run(model, name, ceiling, arguments.repeats, capacity))
        result["ceilings"] = ceilings()
        print({k: round(v, 2) for k, v in result["ceilings"].items()})
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
