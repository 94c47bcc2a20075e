"""Chat with a real model on the CPU, and see what K/V-cache capacity costs.

    python examples/demo.py

Answers a handful of questions with continuous batching, then runs the same work at two capacities: the smallest that
holds all of it at once, and 90 % of the machine's memory. The model (SmolLM2-135M-Instruct) is small and
often wrong; what counts is that its answers are its own, and the same at every capacity.
"""

from __future__ import annotations

import statistics
import time

from flatbed import Engine, SamplingParams
from flatbed.config import EngineConfig
from flatbed.memory.capacity import blocks_for
from flatbed.models import load_model

QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about the sea.",
    "Name three fruits that are red.",
    "What does a compiler do?",
    "Translate 'good morning' into Spanish.",
    "Give me one tip for a better night's sleep.",
    "Who wrote Romeo and Juliet?",
)
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
SAMPLING = SamplingParams(max_new_tokens=48)
ROUNDS = 3


def main() -> None:
    model, tokenizer = load_model("demo", device="cpu", dtype="float32")

    with Engine(model, tokenizer) as engine:
        start = time.perf_counter()
        outputs = engine.generate(CHATS, SAMPLING)
        seconds = time.perf_counter() - start
    for question, output in zip(QUESTIONS, outputs, strict=True):
        cut = " ..." if output.finish_reason == "length" else ""
        print(f"\n> {question}\n{(output.text or '').strip()}{cut}")
    tokens = sum(len(output.token_ids) for output in outputs)
    print(f"\n{len(outputs)} answers, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s on the CPU")

    block_size = EngineConfig().block_size
    lengths = [len(output.prompt_token_ids) + SAMPLING.max_new_tokens for output in outputs]
    needed = sum(blocks_for(length, block_size) for length in lengths)
    compare(model, tokenizer, (f"{needed} blocks", "90%"), [output.token_ids for output in outputs])


def compare(model: object, tokenizer: object, capacities: tuple[str, str], expected: list[list[int]]) -> None:
    """Runs the same work at each capacity, in turn, and prints what it costs.

    The prefix cache is off, so that every run computes its prompts.
    """
    print(
        "\nThe same work at two capacities: the smallest that holds all of it at once, and 90 % of memory "
        f"({ROUNDS} runs each, in turn; the median counts)\n"
    )
    engines = [Engine(model, tokenizer, capacity=capacity, prefix_cache=False) for capacity in capacities]
    seconds: list[list[float]] = [[] for _ in engines]
    for _ in range(ROUNDS):
        for engine, times in zip(engines, seconds, strict=True):
            start = time.perf_counter()
            outputs = engine.generate(CHATS, SAMPLING)
            times.append(time.perf_counter() - start)
            assert [output.token_ids for output in outputs] == expected, "an answer depends on the capacity"
    medians = [statistics.median(times) for times in seconds]

    print(f"{'capacity':<12}{'limit':>12}{'committed':>12}{'most live':>12}{'seconds':>10}")
    for engine, capacity, median in zip(engines, capacities, medians, strict=True):
        memory = engine.memory()
        sizes = "".join(f"{mib(size):>12}" for size in (memory.capacity, memory.committed, memory.peak))
        print(f"{capacity:<12}{sizes}{median:>10.2f}")
        engine.close()
    print(f"\nAnswers are the same. Time at 90 % of memory over time at the smallest: {medians[1] / medians[0]:.3f}")


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    main()
