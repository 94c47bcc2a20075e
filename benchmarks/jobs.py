"""What the benchmarks ask their worker processes for. Imports nothing heavy: the process that asks needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """What is compared (fidelity.py).

    Attributes:
        model, device, attention: what the model is and where it runs.
        engine, precision: one of ENGINES, one of PRECISIONS.
        prompts, samples, new_tokens: prompts, completions of each, tokens of a completion.
        batch: rows of the trainer's forward.
        blocks: of Transformers' cache.
        float64: compare with a forward in float64 as well.
    """

    model: str
    device: str
    attention: str
    engine: str
    precision: str
    prompts: int
    samples: int
    new_tokens: int
    batch: int
    blocks: int
    float64: bool


@dataclass(frozen=True)
class Training:
    """What is trained, and by which way to generate (trl_steps.py).

    Attributes:
        algorithm: grpo or rloo.
        new_tokens, generations: tokens of a completion, completions of a prompt.
        rollouts: one of ARMS.
        steps, rows: training steps, completions of each.
        dtype, attention: of the model.
        checkpointing: gradient checkpointing.
        tiny: a model of two layers, on the CPU.
        alone: in a process of its own.
    """

    algorithm: str
    new_tokens: int
    generations: int
    rollouts: str
    steps: int
    rows: int
    dtype: str
    attention: str
    checkpointing: bool
    tiny: bool
    alone: bool
