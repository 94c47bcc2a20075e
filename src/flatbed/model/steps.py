"""Running plans: `EagerSteps` on any device, `DeviceSteps` ahead of the CPU on CUDA.

::

      CPU    plan 1 ▸ launch │ plan 2 ▸ launch │ read 1 ▸ commit ▸ plan 3 ▸ launch │ read 2 ▸ commit ▸ plan 4 ▸ ...
      GPU             step 1 ████████████████│ step 2 ████████████████│ step 3 ████████████████│ step 4 ...
                                             └ tokens stay here: step 2 reads what step 1 sampled

A launched plan is a `Flight`; its results are read later, in order.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.errors import FlatbedWarning
from flatbed.memory.transfer import staging, upload_together
from flatbed.model.runner import ModelRunner
from flatbed.sampling.sampler import DeviceParameters, Part, Sampled, Sampler
from flatbed.scheduling.plan import BatchPlan

if TYPE_CHECKING:
    from flatbed.model.graphs import DecodeGraph


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
        needs_history: the next step needs this one's tokens on the CPU first (Transformers' processors).
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

    def reset(self, *, capture: bool = True) -> None:  # noqa: B027  (most have nothing to drop)
        """The shadow is another: drops what was made for the former. Unless `capture`, no graphs are made any more."""

    @property
    def graph_bytes(self) -> int:
        """Memory of captured graphs."""
        return 0


class _Landed(Flight):
    """A flight whose results are tensors that are done, or will be in stream order."""

    needs_history = True

    def __init__(self, plan: BatchPlan, sampled: Sampled) -> None:
        self.plan = plan
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
            self._runner.feed(plan.sampled_rows()[0], sampled.tokens)
        return _Landed(plan, sampled)


class _InTheAir(Flight):
    """A flight whose results are on their way into pinned memory. `out`: see `sampling.device.draw`."""

    def __init__(self, plan: BatchPlan, out: torch.Tensor, wanted: bool, needs_history: bool) -> None:
        self.plan = plan
        self.needs_history = needs_history
        self._wanted = wanted
        self._host = staging(out.shape, out.dtype, out.device)
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


_MOVING = (
    "the model's weights are at other addresses in every call (gathered anew for each, as ZeRO-3 and FSDP do): decode "
    "steps run without CUDA graphs from now on"
)


class DeviceSteps(Steps):
    """Decode steps as CUDA graphs, prefill steps launch by launch; the CPU runs ahead and reads results behind.

    Attributes:
        processes: whether rows with a penalty, top-k, top-p or min-p are drawn by our kernels, in a graph, and not by
            the torch sampler behind it. Off: six of the 26 tests in tests/gpu/test_sampling_gpu.py failed in the one
            whole run that an early version of this had on a GPU, and what they said was lost. Four of them would have
            failed in any case (a request without a seed of its own draws anew in each call); all pass in emulation.
    """

    depth = 2
    processes = False

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._graphs = runner.decode_graphs()
        self._told = False

    def reset(self, *, capture: bool = True) -> None:
        self._graphs = self._runner.decode_graphs()
        if capture:
            return
        self._graphs.refused = _MOVING
        if not self._told:
            self._told = True
            warnings.warn(_MOVING, FlatbedWarning, stacklevel=2)

    @property
    def graph_bytes(self) -> int:
        return self._graphs.memory_bytes

    def launch(self, plan: BatchPlan) -> Flight:
        rows, positions = plan.sampled_rows()
        parameters = self._sampler.device_parameters(rows, positions)
        if not self.processes:
            parameters = parameters.by_the_torch_sampler()
        with torch.inference_mode(), self._undoing(parameters):
            graph = None
            if not plan.chunks:
                width = -(-int(positions.max() + 1) // self._runner.block_size)
                graph = self._graphs.get(len(rows), width, self._runner.pool_layers)
            if graph is not None:
                out = self._replay(plan, graph, plan.tables[rows, :width], parameters)
            else:
                out = self._run(plan, parameters)
            return _InTheAir(plan, out, parameters.wanted, len(parameters.special) > 0)

    @contextlib.contextmanager
    def _undoing(self, parameters: DeviceParameters) -> Iterator[None]:
        """A step that fails for lack of memory is launched again. The torch sampler, which needs some, comes when the
        step's tokens have been written where it took its inputs from."""
        last = self._runner.last_tokens
        before = last.clone() if len(parameters.special) else None
        try:
            yield
        except Exception:
            if before is not None:
                last.copy_(before)
            raise

    def _replay(
        self, plan: BatchPlan, graph: DecodeGraph, tables: NDArray[np.int32], parameters: DeviceParameters
    ) -> torch.Tensor:
        """A step as a graph; returns what `sampling.device.draw` does."""
        from flatbed.model.graphs import StepRows

        rows, positions = plan.sampled_rows()
        processing = None
        if parameters.processing is not None:  # what needs memory comes before anything is drawn
            processing = self._graphs.processing(graph, self._seen(plan, parameters, graph.logits))
        graph.replay(StepRows(rows, positions, tables, parameters.temperature, parameters.uniform))
        logits, out = graph.logits[: len(rows)], graph.out[: len(rows)]
        self._draw_special(plan, parameters, logits, out)
        if processing is not None and parameters.processing is not None:
            processing.replay(parameters.processing)
        return out

    def _run(self, plan: BatchPlan, parameters: DeviceParameters) -> torch.Tensor:
        """A step launch by launch; returns what `sampling.device.draw` does."""
        from flatbed.sampling.device import FIELDS, Redraw, draw

        rows, _ = plan.sampled_rows()
        logits = self._runner.forward(plan)
        if not len(rows):  # the middle of prompts: nothing is sampled
            return torch.empty(0, FIELDS, dtype=torch.int32, device=logits.device)
        parts: list[NDArray[Any]] = [parameters.temperature.view(np.int32), parameters.uniform.view(np.int32), rows]
        if parameters.processing is not None:
            parts.append(parameters.processing)
        temperature, uniform, slots, *processing = upload_together(parts, logits.device)
        inputs = (logits, temperature.view(torch.float32), uniform.view(torch.float32), slots, self._runner.last_tokens)
        # What needs memory comes before anything is drawn.
        redraws = [Redraw(*inputs, wishes, self._seen(plan, parameters, logits)) for wishes in processing]
        out = draw(*inputs)
        self._draw_special(plan, parameters, logits, out)
        for redraw in redraws:
            redraw(out)
        return out

    def _seen(self, plan: BatchPlan, parameters: DeviceParameters, logits: torch.Tensor) -> torch.Tensor | None:
        """The tokens that rows with a penalty have seen, or None before there was such a row."""
        seen, at = self._sampler.seen, parameters.penalised
        if not len(at):
            return seen.bits
        part = Part(plan, at)
        return seen.hold(part.sampled_rows()[0], part.sampled, logits.shape[1])

    def _draw_special(
        self, plan: BatchPlan, parameters: DeviceParameters, logits: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Draws the rows that have Transformers' own processors; what they get takes the place of what `draw` gave."""
        if not len(parameters.special):
            return
        part = Part(plan, parameters.special)
        at = self._runner.upload(parameters.special)
        sampled = self._sampler.sample(part, logits[at].float())
        self._runner.feed(part.sampled_rows()[0], sampled.tokens)
        out[at, 0] = sampled.tokens.int()
        out[at, 1] = sampled.finite.int()
        if sampled.logprobs is not None and sampled.raw_logprobs is not None:
            out[at, 2] = sampled.logprobs.view(torch.int32)
            out[at, 3] = sampled.raw_logprobs.view(torch.int32)


def make_steps(runner: ModelRunner, sampler: Sampler, *, graphs: bool) -> Steps:
    """The way to run steps on the runner's device."""
    return DeviceSteps(runner, sampler) if graphs else EagerSteps(runner, sampler)
