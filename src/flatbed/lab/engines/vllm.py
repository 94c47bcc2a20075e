"""vLLM: `vllm[@VERSION][:ATTENTION_BACKEND][,OPTION=VALUE,...]`, an option being any keyword of `vllm.LLM`.

A capacity becomes `gpu_memory_utilization` (a percentage: of all memory, weights included, as vLLM counts it),
`num_gpu_blocks_override` (tokens or blocks) or `kv_cache_memory_bytes` (bytes). vLLM loads its weights by itself, from
a checkpoint; built-in shapes are written to one first (with `load_format=dummy`, where vLLM makes up weights, only
their config is). When its engine runs in this process
(`VLLM_ENABLE_V1_MULTIPROCESSING=0`) loading and warm-up are timed apart from construction, and live blocks and
preemptions are seen; otherwise the record says that they are not.

Written against the sources of vLLM 0.24.0.
"""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flatbed.errors import ConfigError
from flatbed.lab import models
from flatbed.lab.engines.base import (
    Adapter,
    EngineSpec,
    MemoryResult,
    RunResult,
    Settings,
    Setup,
    import_if_there,
    latencies,
    one_word,
    require,
)
from flatbed.lab.workloads import LabRequest, Workload
from flatbed.models import AUTO, cache_folder

BLOCK_SIZE = 16  # tokens; vLLM's own default on CUDA

# Methods of vLLM's worker that are not construction, by the phase that they are.
_OTHER_PHASES = {"load_model": "load", "compile_or_warm_up_model": "warm_up"}


class VllmAdapter(Adapter):
    """One `vllm.LLM`, kept from call to call and from workload to workload."""

    package = "vllm"
    controls = frozenset({"capacity", "token_budget"})

    def __init__(self, spec: EngineSpec, settings: Settings, setup: Setup) -> None:
        super().__init__(spec, settings, setup)
        self._llm: Any = None
        self._arguments: dict[str, Any] = {}
        self._most_used: float | None = None
        self._numbers = 0

    @classmethod
    def check(cls, spec: EngineSpec, settings: Settings) -> None:
        one_word(spec, "the name of an attention backend")

    @classmethod
    def import_packages(cls) -> None:
        require("vllm")

    def load(self) -> None:
        """Puts a checkpoint in place; the weights are loaded by `construct`."""
        if self.setup.checkpoint is not None:
            self._checkpoint = Path(self.setup.checkpoint)
            return
        folder = cache_folder() / "lab" / self.setup.model.replace(":", "-").replace("/", "-")
        if models.is_shape(self.setup.model) and self.spec.option("load_format") == "dummy":
            self._checkpoint = models.save_config(self.setup.model, folder.with_name(f"{folder.name}-config"))
            return
        # In a process of its own: nothing of that model may stay on the device, nor may CUDA be initialised here.
        code = "import sys; from flatbed.lab.models import save; print(save(sys.argv[1], sys.argv[2]))"
        made = subprocess.run(
            [sys.executable, "-c", code, self.setup.model, str(folder)], stdout=subprocess.PIPE, text=True, check=False
        )
        if made.returncode != 0:
            raise ConfigError(f"no checkpoint of model {self.setup.model!r} could be written (the log says why)")
        self._checkpoint = Path(made.stdout.splitlines()[-1])

    def construct(self, workload: Workload) -> dict[str, float]:
        if self._llm is not None:  # it takes a minute to build, and nothing in it depends on the workload
            return {}
        from vllm import LLM

        self._arguments = self._llm_arguments()
        phases: dict[str, float] = {}
        with ExitStack() as stack:
            _time_phases(phases, stack)
            self._llm = LLM(str(self._checkpoint), **self._arguments)
        return phases

    def _llm_arguments(self) -> dict[str, Any]:
        backend = one_word(self.spec, "the name of an attention backend")
        chosen: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": self.setup.dtype if self.setup.dtype != AUTO else "bfloat16",
            "seed": self.setup.seed,
            "max_model_len": self.setup.longest,
            "attention_backend": backend,
            "max_num_batched_tokens": self.settings.token_budget,
            **_capacity_arguments(self.settings, self.spec.option("block_size", BLOCK_SIZE)),
        }
        return {**{name: value for name, value in chosen.items() if value is not None}, **dict(self.spec.options)}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        by_hand = latency or workload.arrives_over_time
        before = self._preemptions()
        start = time.perf_counter()
        if by_hand:
            arrivals, stamps = self._step_by_step(workload, start, latency)
            tokens = sum(map(len, stamps.values()))
        else:
            outputs = self._llm.generate(
                [_prompt(request) for request in workload.requests],
                [_params(workload, request) for request in workload.requests],
                use_tqdm=False,
            )
            tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        seconds = time.perf_counter() - start
        after = self._preemptions()
        preempted = None if before is None or after is None else after - before
        result = RunResult(seconds, tokens, parts={"generation": seconds}, preemptions=preempted)
        if after is None:
            result.notes.append(
                "live blocks and preemptions are not seen: vLLM's engine runs in another process "
                "(set VLLM_ENABLE_V1_MULTIPROCESSING=0 to see them)"
            )
        if latency:
            result.first_token_s, result.between_tokens_s = latencies(arrivals, stamps)
        return result

    def _step_by_step(
        self, workload: Workload, start: float, latency: bool
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Adds requests as they arrive and steps the engine. Gives arrivals and the moments of tokens, by sample."""
        engine = self._llm.llm_engine
        waiting = sorted(workload.requests, key=lambda request: request.arrival_s, reverse=True)
        arrived: dict[str, float] = {}
        arrivals: dict[str, float] = {}
        stamps: dict[str, list[float]] = {}
        while waiting or engine.has_unfinished_requests():
            while waiting and start + waiting[-1].arrival_s <= time.perf_counter():
                request = waiting.pop()
                self._numbers += 1
                name = f"lab-{self._numbers}"
                arrived[name] = start + request.arrival_s
                engine.add_request(name, _prompt(request), _params(workload, request, deltas=True))
            if not engine.has_unfinished_requests():
                if waiting:
                    time.sleep(max(0.0, start + waiting[-1].arrival_s - time.perf_counter()))
                continue
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                for sample in output.outputs:
                    key = f"{output.request_id}/{sample.index}"
                    arrivals[key] = arrived[output.request_id]
                    stamps.setdefault(key, []).extend([now] * len(sample.token_ids))
            if latency:
                self._look_at_usage()
        return arrivals, stamps

    def memory(self) -> MemoryResult:
        cache = self._llm.llm_engine.vllm_config.cache_config
        if not cache.num_gpu_blocks:
            return MemoryResult()
        tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # one block is never handed out
        nbytes = cache.num_gpu_blocks * cache.block_size * self._token_bytes()
        live = None if self._most_used is None else int(self._most_used * nbytes)
        return MemoryResult(capacity_tokens=tokens, reserved=nbytes, committed=nbytes, live=live)

    def _token_bytes(self) -> int:
        model = self._llm.llm_engine.vllm_config.model_config
        return models.kv_token_bytes(model.hf_config, model.dtype.itemsize)

    def facts(self) -> dict[str, Any]:
        return dict(self._arguments)

    def close(self) -> None:
        """Keeps the engine: it cannot be built twice in one process, and goes with it."""
        gc.collect()

    # ---- what can be seen when the engine is in this process --------------------------------------------------------

    def _scheduler(self) -> Any:
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        return getattr(core, "scheduler", None)

    def _look_at_usage(self) -> None:
        usage = getattr(getattr(self._scheduler(), "kv_cache_manager", None), "usage", None)
        if usage is not None:
            self._most_used = max(self._most_used or 0.0, float(usage))

    def _preemptions(self) -> int | None:
        """Preemptions so far, counted by a wrapper around the scheduler's own method; None when it is out of sight."""
        scheduler = self._scheduler()
        if scheduler is None or not hasattr(scheduler, "_preempt_request"):
            return None
        if not hasattr(scheduler, "_lab_preemptions"):
            scheduler._lab_preemptions = 0
            original = scheduler._preempt_request

            @functools.wraps(original)
            def counted(*args: Any, **kwargs: Any) -> Any:
                scheduler._lab_preemptions += 1
                return original(*args, **kwargs)

            scheduler._preempt_request = counted
        return int(scheduler._lab_preemptions)


def _capacity_arguments(settings: Settings, block_size: int) -> dict[str, Any]:
    amount = settings.capacity_amount
    if amount is None:
        return {}
    if amount.unit == "percent":
        return {"gpu_memory_utilization": amount.amount / 100}
    if amount.unit == "bytes":
        return {"kv_cache_memory_bytes": int(amount.amount)}
    blocks = -(-int(amount.amount) // block_size) + 1  # one block is never handed out
    return {"num_gpu_blocks_override": blocks, "block_size": block_size}


def _prompt(request: LabRequest) -> Any:
    from vllm.inputs import TokensPrompt

    return TokensPrompt(prompt_token_ids=list(request.prompt))


def _params(workload: Workload, request: LabRequest, *, deltas: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=workload.n,
        temperature=workload.temperature,
        max_tokens=request.new_tokens,
        ignore_eos=workload.fixed_lengths,
        logprobs=0 if workload.logprobs else None,  # 0: that of the sampled token, and no others
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY,
    )


def _time_phases(phases: dict[str, float], stack: ExitStack) -> None:
    """Times methods of vLLM's worker while `stack` is open, into `phases`; does nothing where they are not."""
    worker = getattr(import_if_there("vllm.v1.worker.gpu_worker"), "Worker", None)
    for name, phase in _OTHER_PHASES.items():
        original = getattr(worker, name, None)
        if original is not None:
            setattr(worker, name, _timed(original, phase, phases))
            stack.callback(setattr, worker, name, original)


def _timed(original: Callable[..., Any], phase: str, phases: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - start

    return wrapped
