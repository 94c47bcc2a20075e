"""Running plans: `EagerSteps` on any device, `DeviceSteps` ahead of the CPU on CUDA.

::

      CPU    plan 1 ▸ launch │ plan 2 ▸ launch │ read 1 ▸ commit ▸ plan 3 ▸ launch │ read 2 ▸ commit ▸ plan 4 ▸ ...
      GPU             step 1 ████████████████│ step 2 ████████████████│ step 3 ████████████████│ step 4 ...
                                             └ tokens stay here: step 2 reads what step 1 sampled

A launched plan is a `Flight`; its results are read later, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.model.runner import ModelRunner
from flatbed.sampling.sampler import Sampled, Sampler
from flatbed.scheduling.plan import BatchPlan


@dataclass
class Results:
    """A step's results on the CPU, in the order of its logits.

    Attributes:
        tokens: int64 [samples].
        finite: bool [samples], or None when all are.
        logprobs, raw_logprobs: float32 [samples], or None when no row asks.
    """

    tokens: NDArray[np.int64]
    finite: NDArray[np.bool_] | None
    logprobs: NDArray[np.float32] | None
    raw_logprobs: NDArray[np.float32] | None


class Flight(ABC):
    """A plan that was launched.

    Attributes:
        plan: what was launched.
        needs_history: the next step needs this one's tokens on the CPU first (penalties, Transformers' processors).
    """

    plan: BatchPlan
    needs_history: bool

    @abstractmethod
    def results(self) -> Results:
        """Waits for the step and returns its results."""


class Steps(ABC):
    """Launches plans.

    Attributes:
        depth: how many plans may be under way.
    """

    depth: int

    @abstractmethod
    def launch(self, plan: BatchPlan) -> Flight:
        """Starts a step. May raise whatever the model's forward raises."""

    def reset(self) -> None:  # noqa: B027  (most have nothing to drop)
        """The shadow is another: drops what was made for the former."""

    @property
    def graph_bytes(self) -> int:
        """Memory of captured graphs."""
        return 0


class _Landed(Flight):
    """A flight whose results are tensors that are done, or will be in stream order."""

    def __init__(self, plan: BatchPlan, sampled: Sampled, needs_history: bool) -> None:
        self.plan = plan
        self.needs_history = needs_history
        self._sampled = sampled

    def results(self) -> Results:
        sampled = self._sampled
        finite = sampled.finite.cpu().numpy()
        return Results(
            sampled.tokens.cpu().numpy(),
            None if finite.all() else finite,
            None if sampled.logprobs is None else sampled.logprobs.float().cpu().numpy(),
            None if sampled.raw_logprobs is None else sampled.raw_logprobs.float().cpu().numpy(),
        )


class EagerSteps(Steps):
    """Forward and torch sampler, one plan at a time."""

    depth = 1

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def launch(self, plan: BatchPlan) -> Flight:
        with torch.inference_mode():
            sampled = self._sampler.sample(plan, self._runner.forward(plan).float())
            self._runner.feed(plan, sampled.tokens)
        return _Landed(plan, sampled, True)


class _InTheAir(Flight):
    """A flight whose results are on their way into pinned memory."""

    def __init__(self, plan: BatchPlan, out: torch.Tensor, wanted: bool) -> None:
        self.plan = plan
        self.needs_history = False
        self._wanted = wanted
        self._host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        self._host.copy_(out, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def results(self) -> Results:
        self._done.synchronize()
        packed = self._host.numpy()
        finite = packed[:, 1] != 0
        floats = packed[:, 2:].copy().view(np.float32)
        return Results(
            packed[:, 0].astype(np.int64),
            None if finite.all() else finite,
            floats[:, 0] if self._wanted else None,
            floats[:, 1] if self._wanted else None,
        )


class DeviceSteps(Steps):
    """Decode steps as CUDA graphs, prefill steps launch by launch; the CPU runs ahead and reads results behind."""

    depth = 2

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._graphs = runner.decode_graphs()

    def reset(self) -> None:
        self._graphs = self._runner.decode_graphs()

    @property
    def graph_bytes(self) -> int:
        return self._graphs.memory_bytes

    def launch(self, plan: BatchPlan) -> Flight:
        from flatbed.model.graphs import StepRows
        from flatbed.sampling.device import draw

        rows, positions = plan.sampled_rows()
        parameters = self._sampler.device_parameters(rows, positions)
        with torch.inference_mode():
            graph = None
            if not plan.chunks:
                width = -(-int(positions.max() + 1) // self._runner.block_size)
                graph = self._graphs.get(len(rows), width, self._runner.pool_layers)
            if graph is not None:
                graph.replay(
                    StepRows(rows, positions, plan.tables[rows, :width], parameters.temperature, parameters.uniform)
                )
                logits, out = graph.logits[: len(rows)], graph.out[: len(rows)]
            else:
                logits = self._runner.forward(plan)
                if len(rows) == 0:  # the middle of prompts: nothing is sampled
                    return _Landed(plan, self._sampler.sample(plan, logits), False)
                floats = np.stack([parameters.temperature, parameters.uniform]).view(np.int32)
                sent = self._runner.upload(np.concatenate([floats, rows[None].astype(np.int32)]))
                temperature, uniform = sent[:2].view(torch.float32)
                out = draw(logits, temperature, uniform, sent[2], self._runner.last_tokens)
            if parameters.simple.all():
                return _InTheAir(plan, out, parameters.wanted)
            sampled = self._sampler.sample(plan, logits.float())
            sampled = merge(sampled, out, self._runner.upload(parameters.simple))
            self._runner.feed(plan, sampled.tokens)
            return _Landed(plan, sampled, parameters.needs_history)


def merge(sampled: Sampled, out: torch.Tensor, simple: torch.Tensor) -> Sampled:
    """What `draw` made (int32 [n, 4]) of the rows that are `simple` [n], and the torch sampler's results of the others.

    So how a row is sampled depends on that row alone: the two round differently, and a neighbour that needs the torch
    sampler must not change a token.
    """
    sampled.tokens = torch.where(simple, out[:, 0].long(), sampled.tokens)
    if sampled.logprobs is not None and sampled.raw_logprobs is not None:
        floats = out[:, 2:].contiguous().view(torch.float32)
        sampled.logprobs = torch.where(simple, floats[:, 0], sampled.logprobs)
        sampled.raw_logprobs = torch.where(simple, floats[:, 1], sampled.raw_logprobs)
    return sampled


def make_steps(runner: ModelRunner, sampler: Sampler, *, graphs: bool) -> Steps:
    """The way to run steps on the runner's device."""
    return DeviceSteps(runner, sampler) if graphs else EagerSteps(runner, sampler)
