"""Transformers' continuous batching: `transformers[@VERSION][:ATTENTION][,persistent][,OPTION=VALUE,...]`.

ATTENTION is any attention implementation; an option is any field of `ContinuousBatchingConfig`, or `warmup`, which is
an argument of `generate_batch`.

A call of `generate_batch` builds the pool, warms up, generates and takes all down again, unless `persistent`. To time
these apart, methods of Transformers' manager are wrapped while a call is measured; they do what they did before::

    generate_batch ├─ _create_batch_processor ─┼─ rest of warmup ─┼─ ... tokens ... ─┼─ stop ... return ─┤
                       construction                warm_up            generation           teardown

The names are those of Transformers 5.17 to 5.24. Where one is missing, the call is not split, and a note says so.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import (
    BLOCK_TOKENS,
    EngineSpec,
    Holding,
    MemoryResult,
    MissingEngine,
    ModelAdapter,
    RunResult,
    Settings,
    import_if_there,
    latencies,
    require,
)
from flatbed.lab.workloads import Workload

PERSISTENT = "persistent"
_CHILD = "__child#"  # in the request id of a further sample
_POLL_S = 1.0  # how long to wait for a result before asking whether the generation thread is still alive


class TransformersAdapter(ModelAdapter):
    """`model.generate_batch`, or the manager behind it where requests differ in length or arrive over time."""

    package = "transformers"

    def __init__(self, spec: EngineSpec, settings: Settings, setup: Any) -> None:
        super().__init__(spec, settings, setup)
        self._memory = MemoryResult()
        self._facts: dict[str, Any] = {}

    @classmethod
    def check(cls, spec: EngineSpec, settings: Settings) -> None:
        _attention(spec)

    @classmethod
    def holding(cls, spec: EngineSpec) -> Holding:
        return "always" if _persistent(spec) else "in calls"

    @property
    def attention(self) -> str | None:
        return _attention(self.spec)

    @classmethod
    def import_packages(cls) -> None:
        _manager_class()  # a version without continuous batching is told before weights are loaded
        super().import_packages()

    def construct(self, workload: Workload) -> dict[str, float]:
        self.close()
        self._batching_config(workload)  # a wrong setting is told here
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        config, generation = self._batching_config(workload), self._sampling(workload)
        by_hand = workload.arrives_over_time or len({r.new_tokens for r in workload.requests}) > 1
        with _Probe(self.synchronize, watch_memory=latency) as probe:
            start = time.perf_counter()
            if by_hand:
                arrivals, outputs = self._by_manager(workload, config, generation, latency, start)
            else:
                arrivals, outputs = {}, self._by_generate_batch(workload, config, generation, latency)
            self.synchronize()
            end = time.perf_counter()
        self._remember(probe)
        expected = workload.n * len(workload.requests)
        result = RunResult(
            end - start,
            tokens=sum(len(output.generated_tokens) for output in outputs.values()),
            parts=probe.parts(start, end),
            preemptions=probe.preemptions,
            error=_problem(outputs, expected),
            notes=list(probe.notes),
        )
        if latency:
            stamps = {name: output.timestamps or [] for name, output in outputs.items()}
            # A further sample's stamps begin with its second token: the first came out of the shared prefill.
            firsts = {name: times for name, times in stamps.items() if _CHILD not in name}
            result.first_token_s = latencies({name: arrivals.get(name, start) for name in firsts}, firsts)[0]
            result.between_tokens_s = latencies(dict.fromkeys(stamps, start), stamps)[1]
        return result

    def _by_generate_batch(self, workload: Workload, config: Any, generation: Any, latency: bool) -> dict[str, Any]:
        return self.model.generate_batch(
            [list(request.prompt) for request in workload.requests],
            generation_config=generation,
            continuous_batching_config=config,
            record_timestamps=latency,
            persistent_manager=_persistent(self.spec),
            warmup=self.spec.option("warmup", True),
        )

    def _by_manager(
        self, workload: Workload, config: Any, generation: Any, latency: bool, start: float
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """What `generate_batch` does, with a length and a time of arrival for each request."""
        from transformers.generation.continuous_batching.utils import WorkloadHints

        expected = workload.n * len(workload.requests)
        hints = WorkloadHints(
            max_prompt_length=max(len(request.prompt) for request in workload.requests),
            max_generated_length=max(request.new_tokens for request in workload.requests),
            num_requests=expected,
        )
        arrivals: dict[str, float] = {}
        outputs: dict[str, Any] = {}
        waiting = sorted(workload.requests, key=lambda request: request.arrival_s, reverse=True)
        with self.model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=config,
            persistent_manager=_persistent(self.spec),
            warmup=self.spec.option("warmup", True),
            workload_hints=hints,
        ) as manager:
            # Requests that are there at the beginning wait for pool and warm-up; others arrive once those are done.
            ready = time.perf_counter()
            while len(outputs) < expected:
                while waiting and ready + waiting[-1].arrival_s <= time.perf_counter():
                    request = waiting.pop()
                    name = manager.add_request(
                        list(request.prompt),
                        max_new_tokens=request.new_tokens,
                        record_timestamps=latency,
                        eos_token_id=generation.eos_token_id,
                    )
                    arrivals[name] = ready + request.arrival_s if request.arrival_s > 0 else start
                pause = max(0.0, ready + waiting[-1].arrival_s - time.perf_counter()) if waiting else _POLL_S
                output = manager.get_result(timeout=pause)
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output
                elif output is None and not manager.is_running():
                    break
        return arrivals, outputs

    def _sampling(self, workload: Workload) -> Any:
        return generation_config(self.model, workload, num_return_sequences=workload.n)

    def _batching_config(self, workload: Workload) -> Any:
        """A new one for every call: Transformers writes into it."""
        from transformers import ContinuousBatchingConfig

        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        fields = {name: value for name, value in self.spec.options if name != "warmup"}
        for name in fields:
            if name not in known:
                raise ConfigError.unknown("ContinuousBatchingConfig field", name, sorted(known))
        page = fields.get("page_size") or fields.get("block_size") or BLOCK_TOKENS
        chosen: dict[str, Any] = {
            **capacity_fields(self.settings, page, self.token_bytes),
            "max_batch_tokens": self.settings.token_budget,
            "scheduler_type": self.settings.schedule,
            "return_logprobs": workload.logprobs or None,
            "seed": self.setup.seed if "seed" in known else None,
        }
        if self.attention is not None and "auto_switch_to_flash" in known:
            chosen["auto_switch_to_flash"] = False  # what was asked for by name is what is measured
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return ContinuousBatchingConfig(**{**chosen, **fields})

    def _remember(self, probe: _Probe) -> None:
        """Keeps what a call showed of the pool, which is gone when the call comes back."""
        if probe.memory is not None:
            self._memory = dataclasses.replace(probe.memory, live=self._memory.live)
            self._facts = probe.facts
        if probe.most_live is not None:
            self._memory.live = max(self._memory.live or 0, probe.most_live)

    def memory(self) -> MemoryResult:
        return dataclasses.replace(self._memory)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "persistent_manager": _persistent(self.spec), **self._facts}

    def close(self) -> None:
        if self.model is not None and hasattr(self.model, "destroy_cached_continuous_batching_manager"):
            self.model.destroy_cached_continuous_batching_manager()
        self._memory = MemoryResult()


def generation_config(model: Any, workload: Workload, **more: Any) -> Any:
    """Transformers' `GenerationConfig` for a workload: no truncation, and no EOS when lengths are fixed."""
    from transformers import GenerationConfig

    sampled = workload.temperature > 0
    eos = -1 if workload.fixed_lengths else model.generation_config.eos_token_id  # -1 is Transformers' "none"
    return GenerationConfig(
        max_new_tokens=max(request.new_tokens for request in workload.requests),
        do_sample=sampled,
        temperature=workload.temperature if sampled else 1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=eos,
        pad_token_id=0,
        **more,
    )


def capacity_fields(settings: Settings, page_tokens: int, token_bytes: int) -> dict[str, Any]:
    """A capacity as fields of `ContinuousBatchingConfig`."""
    amount = settings.capacity_amount
    if amount is None:
        return {}
    if amount.unit == "percent":
        return {"max_memory_percent": amount.amount / 100}
    tokens = amount.amount if amount.unit == "tokens" else amount.amount // token_bytes
    return {"num_blocks": max(1, int(-(-tokens // page_tokens)))}


def cache_memory(cache: Any, config: Any) -> MemoryResult:
    """What a `PagedAttentionCache` has taken: one flat tensor since 5.18, tensors for each layer before."""
    if hasattr(cache, "cache_tensor"):
        nbytes = cache.cache_tensor.nbytes
    else:
        tensors = [*getattr(cache, "key_cache", ()), *getattr(cache, "value_cache", ())]
        nbytes = sum(tensor.nbytes for tensor in tensors) or None
    page = getattr(cache, "block_size", None) or getattr(config, "page_size", None)
    blocks = getattr(cache, "num_blocks", None)
    tokens = blocks * page if blocks and page else None
    return MemoryResult(capacity_tokens=tokens, reserved=nbytes, committed=nbytes)


def live_bytes(cache: Any) -> int | None:
    """Bytes of blocks that are not free now, those kept for prefix sharing included."""
    if hasattr(cache, "pool") and hasattr(cache, "bytes_per_sector"):
        return (cache.pool.num_sectors - cache.pool.num_free_sectors) * cache.bytes_per_sector
    if hasattr(cache, "get_num_free_blocks") and cache_memory(cache, None).committed:
        used = cache.num_blocks - cache.get_num_free_blocks()
        rows = cache.num_blocks + 2  # two blocks are never handed out
        return int(used * cache_memory(cache, None).committed // rows)
    return None


class _Probe:
    """Wraps methods of Transformers' manager for as long as the `with` block lasts, and times them.

    Attributes:
        memory, facts: of the pool that was built, and the settings it was built with; None and empty if none was.
        preemptions: requests that were put back because blocks ran out; None when that cannot be seen.
        most_live: the most bytes of the cache in use after a batch was prepared; None unless watched.
        notes: why something could not be told.
    """

    def __init__(self, synchronize: Callable[[], None], *, watch_memory: bool) -> None:
        self.memory: MemoryResult | None = None
        self.facts: dict[str, Any] = {}
        self.preemptions: int | None = None
        self.most_live: int | None = None
        self.notes: list[str] = []
        self._synchronize = synchronize
        self._watch_memory = watch_memory
        self._seconds = {"construction": 0.0, "warm_up": 0.0}
        self._stopped: float | None = None
        self._split = True
        self._stack = ExitStack()

    def __enter__(self) -> _Probe:
        manager = _manager_class()
        for name, wrapper in (
            ("_create_batch_processor", self._on_create),
            ("warmup", self._on_warmup),
            ("stop", self._on_stop),
        ):
            if not self._wrap(manager, name, wrapper):
                self._split = False
                self.notes.append(f"not split by phase: this Transformers has no {manager.__name__}.{name}")
        if self._wrap(_named("offloading_manager", "OffloadingManager"), "offload_requests", self._on_offload):
            self.preemptions = 0
        if self._watch_memory:
            self._wrap(_named("continuous_api", "ContinuousBatchProcessor"), "prepare_next_batch", self._on_batch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def parts(self, start: float, end: float) -> dict[str, float] | None:
        """Seconds of a call from `start` to `end`, by phase; None when it could not be split."""
        if not self._split:
            return None
        teardown = 0.0 if self._stopped is None else end - self._stopped
        rest = end - start - teardown - sum(self._seconds.values())
        return {**self._seconds, "generation": rest, "teardown": teardown}

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        original = getattr(owner, name, None)
        if original is None:
            return False

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(functools.partial(original, this, *args, **kwargs), this)

        setattr(owner, name, wrapped)
        self._stack.callback(setattr, owner, name, original)
        return True

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[part] += time.perf_counter() - start

    def _on_create(self, call: Callable[[], Any], manager: Any) -> Any:
        if getattr(manager, "batch_processor", None) is not None:
            return call()  # it is only reset, which is a part of every call
        with self._timed("construction"):
            processor = call()
        config = getattr(manager, "continuous_batching_config", None)
        if hasattr(processor, "cache"):
            self.memory = cache_memory(processor.cache, config)
        self.facts = _plain(vars(config)) if config is not None else {}
        return processor

    def _on_warmup(self, call: Callable[[], Any], manager: Any) -> Any:
        before = self._seconds["construction"]
        with self._timed("warm_up"):
            result = call()
        self._seconds["warm_up"] -= self._seconds["construction"] - before
        return result

    def _on_stop(self, call: Callable[[], Any], manager: Any) -> Any:
        self._stopped = time.perf_counter()
        return call()

    def _on_offload(self, call: Callable[[], Any], offloading: Any) -> Any:
        before = len(offloading.scheduler.active_requests)
        result = call()
        self.preemptions = (self.preemptions or 0) + before - len(offloading.scheduler.active_requests)
        return result

    def _on_batch(self, call: Callable[[], Any], processor: Any) -> Any:
        result = call()
        live = live_bytes(processor.cache)
        if live is not None:
            self.most_live = max(self.most_live or 0, live)
        return result


def _manager_class() -> Any:
    require("transformers")
    found = _named("continuous_api", "ContinuousBatchingManager")
    if found is None:
        raise MissingEngine("this version of Transformers has no continuous batching")
    return found


def _named(module: str, name: str) -> Any:
    """A class of Transformers' continuous batching, or None where this version has none of that name.

    Raises ImportError when something that Transformers' continuous batching needs cannot be imported.
    """
    return getattr(import_if_there(f"transformers.generation.continuous_batching.{module}"), name, None)


def _attention(spec: EngineSpec) -> str | None:
    words = [word for word in spec.words if word != PERSISTENT]
    if len(words) > 1:
        raise ConfigError(f"engine {spec.text!r}: one attention implementation at a time, got {' and '.join(words)}")
    return words[0] if words else None


def _persistent(spec: EngineSpec) -> bool:
    return PERSISTENT in spec.words


def _problem(outputs: Mapping[str, Any], expected: int) -> str | None:
    failed = [output for output in outputs.values() if output.error is not None]
    if failed:
        return f"{len(failed)} of {expected} requests failed: {failed[0].error}"
    if len(outputs) < expected:
        return f"{expected - len(outputs)} of {expected} requests came back with nothing (the log of this run says why)"
    return None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of it can be written as JSON."""
    kinds = (str, int, float, bool, type(None), list, tuple)
    return {name: value for name, value in values.items() if isinstance(value, kinds) and not name.startswith("_")}
