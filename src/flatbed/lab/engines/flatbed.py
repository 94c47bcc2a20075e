"""Flatbed as the lab drives it: `flatbed[:ATTENTION][,SETTING=VALUE,...]`, settings being those of `EngineConfig`."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from flatbed.config import EngineConfig
from flatbed.errors import ConfigError
from flatbed.lab.engines.base import (
    EngineSpec,
    Holding,
    MemoryResult,
    ModelAdapter,
    RunResult,
    Settings,
    latencies,
    one_word,
)
from flatbed.lab.workloads import LabRequest, Workload


class FlatbedAdapter(ModelAdapter):
    """One `flatbed.Engine`, kept from call to call, as a user would keep it."""

    package = "flatbed"
    _engine: Any = None

    @classmethod
    def check(cls, spec: EngineSpec, settings: Settings) -> None:
        EngineConfig.from_mapping(_engine_settings(spec, settings))

    @classmethod
    def holding(cls, spec: EngineSpec) -> Holding:
        return "live"

    @classmethod
    def import_packages(cls) -> None:
        super().import_packages()
        import flatbed.engine  # noqa: F401

    def construct(self, workload: Workload) -> dict[str, float]:
        from flatbed.engine import Engine

        self.close()
        settings = {"seed": self.setup.seed, **_engine_settings(self.spec, self.settings)}
        self._engine = Engine(self.model, self.tokenizer, **settings)
        self.synchronize()
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        params = [_params(workload, request, number) for number, request in enumerate(workload.requests)]
        before = self._engine.stats().preemptions
        start = time.perf_counter()
        if workload.arrives_over_time:
            arrivals, outputs = self._over_time(workload.requests, params, start, latency)
        else:
            prompts = [list(request.prompt) for request in workload.requests]
            outputs = self._engine.generate(prompts, params, record_token_times=latency)
            arrivals = [start] * len(outputs)
        self.synchronize()
        seconds = time.perf_counter() - start
        errors = [str(output.error) for output in outputs if output.error is not None]
        result = RunResult(
            seconds,
            tokens=sum(len(sample.token_ids) for output in outputs for sample in output.samples),
            parts={"generation": seconds},
            preemptions=self._engine.stats().preemptions - before,
            error=f"{len(errors)} of {len(outputs)} requests failed: {errors[0]}" if errors else None,
        )
        if latency:
            names = [(i, s.index) for i, output in enumerate(outputs) for s in output.samples]
            stamps = [s.token_times or [] for output in outputs for s in output.samples]
            result.first_token_s, result.between_tokens_s = latencies(
                {name: arrivals[name[0]] for name in names}, dict(zip(names, stamps, strict=True))
            )
        return result

    def _over_time(
        self, requests: Sequence[LabRequest], params: list[Any], start: float, latency: bool
    ) -> tuple[list[float], list[Any]]:
        """Submits each request when it arrives. Gives moments of arrival, and outputs, in the workload's order."""
        waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival_s))
        arrivals = [start + request.arrival_s for request in requests]
        outputs: dict[int, Any] = {}
        while waiting or self._engine.has_work:
            while waiting and arrivals[waiting[0]] <= time.perf_counter():
                i = waiting.popleft()
                outputs[i] = self._engine.submit(list(requests[i].prompt), params[i], record_token_times=latency)
            if self._engine.has_work:
                self._engine.step()
            elif waiting:
                time.sleep(max(0.0, arrivals[waiting[0]] - time.perf_counter()))
        return arrivals, [outputs[i] for i in range(len(requests))]

    def memory(self) -> MemoryResult:
        report = self._engine.memory()
        tokens = self._engine.config.block_size * self._engine._pool.num_blocks
        return MemoryResult(
            capacity_tokens=tokens,
            reserved=report.reserved,
            committed=report.committed,
            live=report.peak,
            outside_torch=report.committed if self._elastic else 0,
        )

    @property
    def _elastic(self) -> bool:
        """Whether the pool's memory comes from the driver and not from torch's allocator."""
        from flatbed.memory.elastic import availability

        return self.on_cuda and availability(self.model.device)[0]

    def facts(self) -> dict[str, Any]:
        config = {} if self._engine is None else dataclasses.asdict(self._engine.config)
        return {**super().facts(), **config}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _engine_settings(spec: EngineSpec, settings: Settings) -> dict[str, Any]:
    attention = one_word(spec, "the name of an attention backend")
    amount = settings.capacity_amount
    wanted: dict[str, Any] = {
        "attention": attention,
        "capacity": f"{int(amount.amount)} tokens"
        if amount is not None and amount.unit == "tokens"
        else settings.capacity,
        "token_budget": settings.token_budget,
        "schedule": settings.schedule,
    }
    chosen = {name: value for name, value in wanted.items() if value is not None}
    for name, value in spec.options:
        if name in chosen:
            raise ConfigError(f"engine {spec.text!r} sets {name!r}, which is set already")
        chosen[name] = value
    return chosen


def _params(workload: Workload, request: LabRequest, number: int) -> Any:
    from flatbed.request import SamplingParams

    return SamplingParams(
        max_new_tokens=request.new_tokens,
        temperature=workload.temperature,
        n=workload.n,
        logprobs=workload.logprobs,
        ignore_eos=workload.fixed_lengths,
        seed=number,
    )
