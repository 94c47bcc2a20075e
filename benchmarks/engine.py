"""Flatbed alone: the workloads of the lab, on random weights of a real shape, each beside its bound.

    python benchmarks/engine.py --shape qwen2.5-0.5b --out engine-0.5b.json     # every workload
    python benchmarks/engine.py --flatness --out flatness-0.5b.json             # from the smallest capacity to 90 %
    python benchmarks/engine.py --profile --workload article,mixed              # where the GPU's time goes, idleness

Lengths are fixed (no EOS), and every call has other prompts, so that the prefix cache answers none of them. "first" is
the first call of an engine, its construction included; the very first row is the first of the process. The bound is
the time in which weights and live K/V can be read once a step, at the bandwidth that a large copy reaches here, and in
which the prefill's operations can be done at the rate that a large matrix product reaches (`bounds.py`).

Other engines beside Flatbed: `flatbed bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from bounds import bound, ceilings

import flatbed
from flatbed.lab.models import SHAPE_PREFIX, SHAPES, load
from flatbed.lab.workloads import WORKLOADS, Workload, make


@dataclass
class Runs:
    """An engine under measurement.

    Attributes:
        first_s: of the first call, construction included.
        warm_s: of the calls after it.
    """

    engine: flatbed.Engine
    work: Workload
    built_s: float
    first_s: float = 0.0
    warm_s: list[float] = field(default_factory=list)
    calls: int = 0

    def call(self) -> float:
        """Seconds of one call with prompts of its own."""
        work = self.work.varied(self.calls)
        self.calls += 1
        params = [
            flatbed.SamplingParams(
                max_new_tokens=request.new_tokens,
                ignore_eos=True,
                temperature=work.temperature,
                n=work.n,
                logprobs=work.logprobs,
                seed=number,
            )
            for number, request in enumerate(work.requests)
        ]
        synchronize()
        start = time.perf_counter()
        outputs = self.engine.generate([request.prompt for request in work.requests], params)
        took = time.perf_counter() - start
        made = sum(len(sample.token_ids) for output in outputs for sample in output.samples)
        if made != work.tokens:
            raise SystemExit(f"{made} tokens instead of {work.tokens}: {outputs[0].error}")
        return took


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def begin(model: Any, work: Workload, capacity: str, attention: str) -> Runs:
    """An engine that has made its first call."""
    synchronize()
    start = time.perf_counter()
    engine = flatbed.Engine(model, capacity=capacity, attention=attention)
    runs = Runs(engine, work, time.perf_counter() - start)
    runs.first_s = runs.built_s + runs.call()
    return runs


def row(runs: Runs, capacity: str) -> dict[str, Any]:
    """What was measured; releases the engine's memory."""
    engine, work = runs.engine, runs.work
    memory, stats = engine.memory(), engine.stats()
    engine.release()
    median = statistics.median(runs.warm_s)
    measured = {
        "workload": work.name, "capacity": capacity, "build_s": runs.built_s, "first_s": runs.first_s,
        "warm_s": runs.warm_s, "median_s": median, "tokens": work.tokens, "tokens_per_s": work.tokens / median,
        "steps": stats.steps, "preemptions": stats.preemptions, "cached_tokens": stats.cached_tokens,
        "live_peak_mib": memory.peak / 2**20, "committed_mib": memory.committed / 2**20,
        "graph_mib": memory.graphs / 2**20, "committed_after_release_mib": engine.memory().committed / 2**20,
    }  # fmt: skip
    print(
        f"{work.name:10} {capacity:>12}: first {runs.first_s:.3f}  warm {' '.join(f'{t:.3f}' for t in runs.warm_s)}  "
        f"{work.tokens / median:,.0f} tokens/s  peak {measured['live_peak_mib']:.0f} MiB, "
        f"committed {measured['committed_mib']:.0f}, after release {measured['committed_after_release_mib']:.0f}",
        flush=True,
    )
    return measured


def each_workload(model: Any, works: list[Workload], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for work in works:
        runs = begin(model, work, options.capacity, options.attention)
        runs.warm_s = [runs.call() for _ in range(options.repeats)]
        rows.append(row(runs, options.capacity))
        runs.engine.close()
    return rows


def flatness(model: Any, work: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One workload from the smallest capacity that holds it to 90 %: all engines alive at once, calls in turn.

    A throw-away engine comes first, so that no capacity pays for what the process does once (compiling kernels).
    """
    block_size = flatbed.EngineConfig.block_size
    capacities = [f"{work.smallest_blocks(block_size)} blocks", "10%", "50%", "90%"]
    begin(model, work, capacities[0], options.attention).engine.close()
    firsts: dict[str, list[float]] = {capacity: [] for capacity in capacities}
    for _ in range(options.repeats - 1):
        for capacity in capacities:
            runs = begin(model, work, capacity, options.attention)
            firsts[capacity].append(runs.first_s)
            runs.engine.close()
    alive = {capacity: begin(model, work, capacity, options.attention) for capacity in capacities}
    for _ in range(3 * options.repeats):
        for runs in alive.values():
            runs.warm_s.append(runs.call())
    rows = []
    for capacity, runs in alive.items():
        firsts[capacity].append(runs.first_s)
        measured = row(runs, capacity)
        measured["firsts_s"] = firsts[capacity]
        measured["median_first_s"] = statistics.median(firsts[capacity])
        rows.append(measured)
        runs.engine.close()
    for kind in ("median_first_s", "median_s"):
        print(f"{kind}: " + ", ".join(f"{r['capacity']} {r[kind] / rows[0][kind]:.3f}" for r in rows))
    return rows


def profile(model: Any, work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    runs = begin(model, work, options.capacity, options.attention)
    runs.call()
    # Kernels alone: to record what the CPU does slows it down so much that the GPU waits for it.
    with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        took = runs.call()
    runs.engine.close()
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    begun, ended = spans[0][0], max(end for _, end in spans)
    # Steady decode: from the middle of the call to 95 %, before the last requests run out.
    idle = _idle(spans, begun + (ended - begun) * 0.5, begun + (ended - begun) * 0.95)
    whole = _idle(spans, begun, ended)
    print(f"{work.name}: {took:.3f} s under the profiler; GPU idle {whole:.1%}, in steady decode {idle:.1%}")
    rows = sorted(((sum(t), len(t), n) for n, t in kernels.items()), reverse=True)[:25]
    for total, count, kernel in rows:
        print(f"{total / 1e3:9.2f} ms  {count:6d} x {total / count:7.1f} us  {kernel[:90]}")
    return {
        "workload": work.name,
        "idle": whole,
        "idle_in_steady_decode": idle,
        "kernels": [[n[:120], c, t] for t, c, n in rows],
    }


def _idle(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """The share of begin .. end in which no kernel runs; `spans` in order of their beginnings."""
    busy, until = 0.0, begin
    for first, last in spans:
        busy += max(0.0, min(last, end) - max(first, until))
        until = min(max(until, last), end)
    return 1 - busy / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--capacity", default="90%")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--flatness", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks requests and lengths to this share")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile and options.device == "cpu":
        parser.error("--profile records what the GPU does: it needs --device cuda")
    model, _ = load(SHAPE_PREFIX + options.shape, options.device, "auto")
    config = model.config
    works = [
        make(name, config.vocab_size, config.max_position_embeddings, scale=options.scale)
        for name in options.workload.split(",")
    ]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *(a.rpartition("/")[2] if a.endswith(".json") else a for a in sys.argv)]),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "versions": {
            "flatbed": flatbed.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        "shape": options.shape,
    }
    if options.profile:
        result["profiles"] = [profile(model, work, options) for work in works]
    else:
        if options.flatness:
            result["rows"] = flatness(model, next(w for w in works if w.name == "article"), options)
        else:
            result["rows"] = each_workload(model, works, options)
        # After the rows: the first of them is to be the first call of the process.
        result["ceilings"] = ceiling = ceilings(options.device)
        by_name = {work.name: work for work in works}
        weights = sum(parameter.numel() for parameter in model.parameters())
        for measured in result["rows"]:
            measured["bound_s"] = bound(config, weights, by_name[measured["workload"]], ceiling, model.dtype.itemsize)
            measured["over_bound"] = measured["median_s"] / measured["bound_s"]
        print({name: round(value, 2) for name, value in ceiling.items()})
        print(
            ", ".join(
                f"{r['workload']} {r['over_bound']:.1f}x its bound of {r['bound_s']:.3f} s" for r in result["rows"]
            )
        )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
