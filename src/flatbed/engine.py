"""The engine: prompts in, completions out. `step()` is the whole of it.

::

      submit ─▶ Scheduler.plan() ─▶ ModelRunner.forward() ─▶ Sampler.sample() ─▶ Scheduler.commit() ─▶ Output
                ints                tensors                  tensors             ints
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatbed.attention import choose
from flatbed.config import EngineConfig
from flatbed.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    FlatbedWarning,
    InvalidRequestError,
    ModelForwardError,
    NonFiniteLogitsError,
    RequestError,
)
from flatbed.memory.capacity import Capacity, KVLayout
from flatbed.memory.pool import MemoryReport, Pool
from flatbed.memory.select import free_bytes, make_backing
from flatbed.model.deterministic.attention import choose_invariant
from flatbed.model.deterministic.sampling import RowSampler
from flatbed.model.runner import ModelRunner
from flatbed.model.steps import Flight, Results, make_steps
from flatbed.model.weights import checksum
from flatbed.request import Completion, FinishReason, Output, SamplingParams, StreamEvent, Timings
from flatbed.sampling.processors import eos_token_ids, from_generation_config, merged, try_out
from flatbed.sampling.random import derive_seed
from flatbed.sampling.sampler import Sampler
from flatbed.scheduling.plan import BatchPlan, Landed
from flatbed.scheduling.plan import Sequence as Scheduled
from flatbed.scheduling.scheduler import Scheduler
from flatbed.text import TextStream, check_stop_strings, check_tokenizer, encode

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Once weights have moved before this many calls in a row, they will before the next: graphs would serve one call each.
_MOVES_IN_A_ROW = 2
# Requests that an error's message names; its attributes have all.
_NAMES_TOLD = 8


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since it was built, and what it is doing now.

    Attributes:
        running, waiting: samples, now.
        finished: requests that ended, for whatever reason.
        prompt_tokens: prompt tokens of all samples that were started.
        cached_tokens: of those, how many were not computed because their K/V was there.
        generated_tokens, preemptions, steps: totals.
    """

    running: int
    waiting: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int


@dataclass(slots=True)
class _Sample:
    """One sample of a request while it is under way: the scheduler's sequence, and what the user will see of it.

    Attributes:
        streamed: each token is an event.
        processors: Transformers' own, where the request asks for them. Made when the sample first runs, and kept while
            it is preempted: some have a state of their own (watermarks).
    """

    sequence: Scheduled
    completion: Completion
    stream: TextStream | None
    streamed: bool
    processors: Any = None


@dataclass(slots=True)
class _Request:
    """A request under way."""

    output: Output
    params: SamplingParams
    seed: int
    samples: list[_Sample]
    unfinished: int


class Engine:
    """Continuous batching for a Transformers model that is already loaded. The model itself is never changed.

    Args:
        model: a Transformers decoder with a language-model head, on one device. Training it meanwhile is fine: weights
            that are updated in place are seen by the next step.
        tokenizer: for string prompts, chat messages, `text` and stop strings; token ids work without one.
        capacity: the most K/V the pool may hold: "64 blocks", "20000 tokens", "8 GiB", "50%" (of the memory that is
            free now) or "auto". A ceiling, not a reservation.
        token_budget: the most tokens in one forward pass.
        schedule: "fifo" (decode first) or "prefill_first".
        attention: "auto" or the name of a backend.
        block_size: tokens in a block.
        max_requests: the most samples that run at once.
        prefix_cache: share K/V between equal beginnings of prompts.
        seed: root of the seeds of requests that bring none.
        deterministic: a request's tokens and log-probabilities are the same bits whatever runs beside it, whatever the
            capacity, token budget and schedule, and after preemptions. Slower; models with operators whose order of
            operations cannot be fixed are refused (see docs/deterministic.md).

    Raises ConfigError for settings that make no sense, BackendUnavailableError for an attention backend that cannot run
    here, UnsupportedModelError for a model that cannot be run.

    One thread at a time may drive an engine (a second one gets a ConfigError); `cancel` may be called from any.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None = None,
        *,
        capacity: str = EngineConfig.capacity,
        token_budget: int | None = EngineConfig.token_budget,
        schedule: str = EngineConfig.schedule,
        attention: str = EngineConfig.attention,
        block_size: int = EngineConfig.block_size,
        max_requests: int = EngineConfig.max_requests,
        prefix_cache: bool = EngineConfig.prefix_cache,
        seed: int = EngineConfig.seed,
        deterministic: bool = EngineConfig.deterministic,
        **unknown: Any,
    ) -> None:
        self.config = EngineConfig.from_mapping(
            {
                "capacity": capacity,
                "token_budget": token_budget,
                "schedule": schedule,
                "attention": attention,
                "block_size": block_size,
                "max_requests": max_requests,
                "prefix_cache": prefix_cache,
                "seed": seed,
                "deterministic": deterministic,
                **unknown,
            }
        )
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        rows = min(max_requests, self.config.tokens_per_step)
        self._runner = ModelRunner(model, rows, deterministic=deterministic)
        self._backend = (choose_invariant if deterministic else choose)(attention, self._runner.device)
        self._pool, self._scheduler = self._make_pool()
        self._sampler = (RowSampler if deterministic else Sampler)(rows, self._runner.device)
        self._steps = make_steps(
            self._runner, self._sampler, graphs=self._runner.device.type == "cuda" and self._backend.reads_pool
        )
        self._flights: deque[Flight] = deque()  # launched, their results not read yet
        self._eos = eos_token_ids(self._runner.model, tokenizer)
        self._requests: dict[str, _Request] = {}
        self._weights: tuple[int, ...] | None = None
        self._calls = 0  # whole calls under way
        self._moves = 0  # calls in a row before which the weights had moved
        self._watched = 0  # samples under way whose every token is of interest
        self._cancelled: deque[str] = deque()  # any thread appends; no lock, which Ctrl-C could leave locked
        self._numbers = itertools.count()
        self._counts = {"finished": 0, "prompt": 0, "cached": 0, "generated": 0, "steps": 0}
        self._closed = False
        self._driver = _Driver()
        self.partial_outputs: list[Output] = []

    def _make_pool(self) -> tuple[Pool, Scheduler]:
        """An empty pool for the model's K/V as they are now, bound to the runner, and the scheduler of its blocks."""
        config, runner = self.config, self._runner
        layout = KVLayout(runner.layers, config.block_size, runner.kv_dtype.itemsize)
        num_blocks = Capacity.parse(config.capacity).blocks(layout, free_bytes(runner.device))
        if num_blocks < 1:
            raise ConfigError(f"capacity {config.capacity!r} is less than one block of {layout.block_bytes} bytes")
        try:
            backing = make_backing(num_blocks * layout.block_bytes, runner.device)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"capacity {config.capacity!r} cannot be addressed on this machine: {error}") from error
        pool = Pool(layout, num_blocks, runner.kv_dtype, backing)
        runner.bind(pool, self._backend)
        return pool, Scheduler(
            num_blocks,
            config.block_size,
            token_budget=config.tokens_per_step,
            max_requests=config.max_requests,
            prefill_first=config.schedule == "prefill_first",
            prefix_cache=config.prefix_cache,
            grow=pool.grow,
        )

    # ---- whole calls ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Any | Sequence[Any] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_output: Callable[[Output], None] | None = None,
        on_step: Callable[[], None] | None = None,
        record_token_times: bool = False,
    ) -> list[Output]:
        """Completes every prompt; outputs come in the order of the prompts.

        Args:
            prompts: strings, chats (lists of messages), or lists of token ids.
            sampling: one `SamplingParams` or Transformers `GenerationConfig` for all, or one for each; None is greedy.
            request_ids: names for the requests, unique among those under way; made up when None.
            on_output: called with each output the moment it is complete.
            on_step: called after each step.
            record_token_times: fill `Completion.token_times`.

        A request that is refused or ends badly has its `error` set, and a warning names it; the others are not
        affected. On KeyboardInterrupt (or any exception out of a callback) everything under way is cancelled, its
        blocks are freed, and `partial_outputs` holds what had been made.

        Raises ModelForwardError when the model's forward raised, ConfigError while another thread drives the engine.
        """
        self.partial_outputs = []
        outputs: list[Output] = []
        try:
            with self._driver, self._call():
                for event in self._submit_all(
                    prompts, sampling, request_ids, outputs, record_token_times, streamed=False
                ):
                    _report(event, on_output)
                while self._unfinished(outputs):
                    for event in self.step():
                        _report(event, on_output)
                    if on_step is not None:
                        on_step()
        except BaseException:
            self.partial_outputs = outputs
            raise
        failed = [output for output in outputs if output.error is not None]
        if failed:
            more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
            told = "; ".join(str(output.error) for output in failed[:3])
            warnings.warn(
                f"{len(failed)} of {len(outputs)} requests failed: {told}{more}", FlatbedWarning, stacklevel=2
            )
        return outputs

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Any | Sequence[Any] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[StreamEvent]:
        """Completes every prompt and yields each token as it comes. Leaving the loop cancels what is under way."""
        self.partial_outputs = []
        outputs: list[Output] = []
        try:
            with self._call():
                yield from self._submit_all(prompts, sampling, request_ids, outputs, False, streamed=True)
                while self._unfinished(outputs):
                    yield from self.step()
        except BaseException:
            self.partial_outputs = outputs
            raise

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        sampling: Any,
        request_ids: Sequence[str] | None,
        outputs: list[Output],
        record_token_times: bool,
        *,
        streamed: bool,
    ) -> Iterator[StreamEvent]:
        """Submits everything, filling `outputs`; yields the events of requests that are refused at once."""
        if isinstance(prompts, (str, bytes)):
            raise ConfigError("prompts must be a list of prompts; for one prompt pass a list of one")
        if isinstance(prompts, Mapping):  # also what a tokenizer makes: its keys are no prompts
            raise ConfigError(
                f"prompts must be a list of prompts, got {type(prompts).__name__}; of what a tokenizer made pass "
                '["input_ids"], without padding'
            )
        prompts = list(prompts)
        each = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * len(prompts)
        for what, given in (("sampling", each), ("request_ids", request_ids)):
            if given is not None and len(given) != len(prompts):
                raise ConfigError(f"{len(prompts)} prompts, but {len(given)} {what}")
        for i, prompt in enumerate(prompts):
            name = None if request_ids is None else request_ids[i]
            output = self._submit(prompt, each[i], name, record_token_times, streamed=streamed)
            outputs.append(output)
            if output.error is not None:
                yield StreamEvent(output.request_id, 0, None, None, "error", output)

    def _call(self) -> _Call:
        self._check_open()
        return _Call(self)

    def _unfinished(self, outputs: list[Output]) -> bool:
        # Looked at from the end: the last to be submitted is likely the last to finish.
        return bool(self._requests) and any(output.request_id in self._requests for output in reversed(outputs))

    # ---- step by step -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | Any | None = None,
        *,
        request_id: str | None = None,
        record_token_times: bool = False,
    ) -> Output:
        """Queues one request and returns its `Output`, which fills as steps are made.

        A request that cannot be run comes back at once with `error` set. Raises ConfigError for an id that is in use.
        """
        with self._driver:
            return self._submit(prompt, sampling, request_id, record_token_times, streamed=True)

    def _submit(
        self, prompt: Prompt, sampling: Any, request_id: str | None, record_token_times: bool, *, streamed: bool
    ) -> Output:
        """`submit`; unless `streamed`, `step` tells of the request's end only."""
        self._check_open()
        number = next(self._numbers)
        name = str(number) if request_id is None else str(request_id)
        if name in self._requests:
            raise ConfigError(f"request id {name!r} is in use; ids must be unique among the requests under way")
        while name in self._cancelled:  # meant for a former request of this name
            self._cancelled.remove(name)
        if not self._calls and not self._requests:
            self._follow_model()
        timings = Timings(time.perf_counter())
        output = Output(name, [], [Completion(0)], timings)
        try:
            output.prompt_token_ids = encode(prompt, self.tokenizer, name)
            params = self._params(sampling, name, len(output.prompt_token_ids))
            self._admissible(name, output.prompt_token_ids, params)
        except RequestError as error:
            output.error = error
            output.samples[0].finish_reason = "error"
            timings.finished = time.perf_counter()
            self._counts["finished"] += 1
            return output
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        output.samples = [_new_completion(i, params, record_token_times) for i in range(params.n)]
        request = _Request(output, params, seed, [], params.n)
        eos: tuple[int, ...] = ()
        if not params.ignore_eos:
            eos = self._eos if params.eos_token_ids is None else params.eos_token_ids
        group = self._scheduler.group(output.prompt_token_ids)
        for i, completion in enumerate(output.samples):
            sequence = Scheduled(name, i, output.prompt_token_ids, params.max_new_tokens, frozenset(eos), group)
            sequence.watched = streamed or bool(params.stop) or params.logprobs or record_token_times
            self._watched += sequence.watched
            completion.token_ids = sequence.output
            stream = (
                TextStream(self.tokenizer, params.stop) if self.tokenizer is not None and sequence.watched else None
            )
            request.samples.append(_Sample(sequence, completion, stream, streamed))
            self._scheduler.submit(sequence)
        self._requests[name] = request
        return output

    def step(self) -> list[StreamEvent]:
        """One forward pass for whatever should run next. Returns an event for each new token and each ended sample.

        Raises ModelForwardError when the model's forward raised: all requests have then ended, all blocks are free.
        """
        self._check_open()
        with self._driver:
            try:
                events = self._take_cancelled()
                self._launch_ahead()
                if not self._flights:
                    return events + self._unstick()
                flight = self._flights.popleft()
                try:
                    results = flight.results()
                except Exception as error:
                    self._abandon(flight.plan, error)
                landed = self._scheduler.commit(flight.plan, results.tokens, results.finite)
                self._counts["steps"] += 1
                return events + self._deliver(landed, results)
            except BaseException:
                # Ctrl-C strikes between any two lines: the books, and the K/V that they tell of, may be half made.
                self._start_over()
                raise

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; what it has so far stays in its output. Any thread may call."""
        self._cancelled.append(str(request_id))

    @property
    def has_work(self) -> bool:
        """True while a request is under way."""
        return bool(self._requests)

    # ---- what a step is made of -------------------------------------------------------------------------------------

    def _launch_ahead(self) -> None:
        """Plans and launches steps until as many are under way as may be."""
        while len(self._flights) < self._steps.depth and not (self._flights and self._flights[-1].needs_history):
            if self._scheduler.waiting and self.config.prefix_cache and self._forget_old_weights():
                self._runner.refresh_casts()
            plan = self._scheduler.plan()
            if plan is None:
                return
            for sequence in plan.admitted:
                self._start(sequence)
            try:
                self._flights.append(self._launch(plan))
            except Exception as error:
                self._abandon(plan, error)

    def _launch(self, plan: BatchPlan) -> Flight:
        """Launches a plan; where the device has no memory left for the forward pass, once more after making room."""
        try:
            return self._steps.launch(plan)
        except torch.OutOfMemoryError:
            self._pool.shrink(self._scheduler.trim())
            torch.cuda.empty_cache()
            return self._steps.launch(plan)

    def _start(self, sequence: Scheduled) -> None:
        request = self._requests[sequence.request_id]
        sample, make = request.samples[sequence.sample], request.params.processors
        if make is not None and sample.processors is None:
            sample.processors = make(len(sequence.prompt))
        self._sampler.set_row(sequence, request.params, request.seed, sample.processors)
        if sequence.preemptions:
            return
        timings = request.output.timings
        timings.started = time.perf_counter() if timings.started is None else timings.started
        request.output.cached_tokens += sequence.cached_tokens
        self._counts["prompt"] += len(sequence.prompt)
        self._counts["cached"] += sequence.cached_tokens

    def _deliver(self, landed: Landed, results: Results) -> list[StreamEvent]:
        """Hands a step's results to their requests. The tokens are there already: a completion's `token_ids` are its
        sequence's `output`. So a step costs next to nothing but for samples that are watched, or end."""
        now = time.perf_counter()
        self._counts["generated"] += len(landed.tokens)
        for sequence in landed.sequences[landed.decodes :]:
            timings = self._requests[sequence.request_id].output.timings
            timings.first_token = now if timings.first_token is None else timings.first_token
        events = self._watch(landed, results, now) if self._watched else []
        for sequence in landed.finished:
            if sequence.finish_reason == "error":
                events.append(self._fail(sequence))
            elif not sequence.watched:
                request = self._requests[sequence.request_id]
                events.append(self._event(request, request.samples[sequence.sample], None, None, now))
        return events

    def _watch(self, landed: Landed, results: Results, now: float) -> list[StreamEvent]:
        """Looks at each token of samples whose tokens are of interest, and ends those that met a stop string. Returns
        the events of those that are streamed, and of all that end."""
        logprobs = raw_logprobs = None
        if results.logprobs is not None and results.raw_logprobs is not None:
            logprobs, raw_logprobs = results.logprobs.tolist(), results.raw_logprobs.tolist()
        events = []
        for sequence, token, index in zip(landed.sequences, landed.tokens, landed.indices, strict=True):
            if not sequence.watched:
                continue
            request = self._requests[sequence.request_id]
            sample = request.samples[sequence.sample]
            completion = sample.completion
            if completion.logprobs is not None and logprobs is not None and raw_logprobs is not None:
                completion.logprobs.append(logprobs[index])
                assert completion.raw_logprobs is not None, "both are kept, or neither"
                completion.raw_logprobs.append(raw_logprobs[index])
            if completion.token_times is not None:
                completion.token_times.append(now)
            text = None if sample.stream is None else sample.stream.feed(completion.token_ids)
            if sample.stream is not None and sample.stream.stopped and sequence.finish_reason != "eos":
                self._scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"
            if sample.streamed or sequence.finish_reason is not None:
                events.append(self._event(request, sample, token, text, now))
        return events

    def _event(
        self, request: _Request, sample: _Sample, token: int | None, text: str | None, now: float
    ) -> StreamEvent:
        """The event for a token or an end; closes the sample and the request where this was their last."""
        sequence, completion = sample.sequence, sample.completion
        reason: FinishReason | None = sequence.finish_reason  # type: ignore[assignment]
        output = None
        if reason is not None:
            completion.finish_reason = reason
            self._watched -= sequence.watched
            if sample.stream is None and self.tokenizer is not None:
                sample.stream = TextStream(self.tokenizer)
            if sample.stream is not None:
                text = (text or "") + sample.stream.close(completion.token_ids)
                completion.text = sample.stream.text
            request.unfinished -= 1
            if request.unfinished == 0:
                request.output.timings.finished = now
                del self._requests[request.output.request_id]
                self._counts["finished"] += 1
                output = request.output
        return StreamEvent(request.output.request_id, completion.index, token, text, reason, output)

    def _fail(self, sequence: Scheduled) -> StreamEvent:
        request = self._requests[sequence.request_id]
        at = len(sequence.output)
        raised = self._sampler.failures.pop((sequence.request_id, sequence.sample), None)
        if raised is not None:
            told = (
                f"a logits processor raised {type(raised).__name__} at token {at} of sample {sequence.sample}: {raised}"
            )
            request.output.error = InvalidRequestError(told, request_id=sequence.request_id, field="generation_config")
            return self._event(request, request.samples[sequence.sample], None, None, time.perf_counter())
        request.output.error = NonFiniteLogitsError(
            f"NaN or infinite logits, or no token that is allowed, at token {at} of sample {sequence.sample}; look for "
            "NaN or infinite weights, an overflow of the model's dtype, or processors that suppress every token",
            request_id=sequence.request_id,
        )
        return self._event(request, request.samples[sequence.sample], None, None, time.perf_counter())

    def _take_cancelled(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        while self._cancelled:
            events += self._end(self._cancelled.popleft(), "cancelled")
        return events

    def _end(self, name: str, reason: FinishReason) -> list[StreamEvent]:
        """Ends whatever of a request is still under way."""
        request = self._requests.get(name)
        if request is None:
            return []
        now = time.perf_counter()
        events = []
        for sample in request.samples:
            if sample.completion.finish_reason is None:
                self._scheduler.finish(sample.sequence, reason)
                events.append(self._event(request, sample, None, None, now))
        return events

    def _unstick(self) -> list[StreamEvent]:
        """Nothing runs, and the first request in the queue cannot have the memory that it needs alone."""
        scheduler = self._scheduler
        if scheduler.running or not scheduler.waiting:
            return []
        sequence = scheduler.waiting[0]
        needed = self._pool.layout.blocks_for(sequence.positions)
        self._requests[sequence.request_id].output.error = CapacityError(
            f"it needs {needed} blocks ({needed * self._pool.layout.block_bytes} bytes) and nothing else runs, but the "
            "device has no memory left for them; free memory or shorten the request",
            request_id=sequence.request_id,
            needed=needed,
            available=scheduler.pool.watermark,
        )
        return self._end(sequence.request_id, "error")

    def _abandon(self, plan: BatchPlan, error: Exception) -> None:
        """Ends everything after a failed forward and raises."""
        names = plan.request_ids
        told = f"{type(error).__name__}: {error}"
        for name, request in self._requests.items():
            request.output.error = RequestError(f"ended, because the model's forward raised {told}", request_id=name)
        self._end_all("error")
        raise ModelForwardError(
            f"the model's forward raised {type(error).__name__}: {error} (requests in the batch: {_some(names)})",
            request_ids=names,
        ) from error

    def _start_over(self) -> None:
        """Cancels everything and opens new books, whatever state an interruption has left the old ones in."""
        self._scheduler = self._scheduler.successor()
        self._end_all("cancelled")
        self._requests.clear()
        self._watched = 0
        self._driver.free()

    def _end_all(self, reason: FinishReason) -> None:
        self._flights.clear()
        self._scheduler.abort_all()
        for name in list(self._requests):
            request = self._requests[name]
            for sample in request.samples:
                if sample.completion.finish_reason is None:
                    sample.sequence.finish_reason = reason
                    self._event(request, sample, None, None, time.perf_counter())

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _params(self, sampling: Any, name: str, prompt_length: int) -> SamplingParams:
        """SamplingParams out of whatever was given for one request."""
        if sampling is None:
            return SamplingParams()
        if isinstance(sampling, SamplingParams):
            return sampling
        if not hasattr(sampling, "max_new_tokens"):
            raise ConfigError.unknown(
                "kind of sampling", type(sampling).__name__, ("SamplingParams", "GenerationConfig")
            )
        model = self._runner.model
        try:
            config = merged(sampling, model)
            params = from_generation_config(config, model, prompt_length=prompt_length, longest=self.longest)
            if config.max_new_tokens is None and params.max_new_tokens < 1:
                raise ConfigError(
                    f"max_length={config.max_length} leaves no token after a prompt of {prompt_length}; raise it, or "
                    "set max_new_tokens instead"
                )
            return params
        except ConfigError as error:
            raise InvalidRequestError(str(error), request_id=name, field="generation_config") from error
        except Exception as error:  # Transformers' own checks, and values that are of no use to them
            told = f"Transformers raised {type(error).__name__}: {error}"
            raise InvalidRequestError(told, request_id=name, field="generation_config") from error

    @property
    def longest(self) -> int:
        """The most tokens (prompt and completion) one request can have here."""
        fits = self._pool.num_blocks * self.config.block_size + 1
        limit = self._runner.max_positions
        return fits if limit is None else min(fits, limit)

    @property
    def max_positions(self) -> int | None:
        """The most tokens (prompt and completion) that the model has positions for; None where it sets no limit."""
        return self._runner.max_positions

    def _admissible(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """Raises the RequestError that says why this request cannot be run, if it cannot."""
        problem = params.problem()
        if problem is not None:
            field, why = problem
            raise InvalidRequestError(why, request_id=name, field=field)
        check_stop_strings(params.stop, self.tokenizer, name)
        vocabulary = self._runner.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            at, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < vocabulary)
            raise InvalidRequestError(
                f"token id {token} at position {at} is outside of the vocabulary (0 to {vocabulary - 1})",
                request_id=name,
                field="prompt",
            )
        total = len(prompt) + params.max_new_tokens
        limit = self._runner.max_positions
        if limit is not None and total > limit:
            raise CapacityError(
                f"{len(prompt)} prompt tokens and max_new_tokens={params.max_new_tokens} are {total} tokens, and the "
                f"model has {limit} positions; shorten the prompt or lower max_new_tokens",
                request_id=name,
                needed=total,
                available=limit,
            )
        needed, available = self._pool.layout.blocks_for(total - 1), self._pool.num_blocks
        if needed > available:
            raise CapacityError(
                f"{len(prompt)} prompt tokens and max_new_tokens={params.max_new_tokens} need {needed} blocks of "
                f"{self.config.block_size} tokens, and the pool has {available}; raise capacity "
                f"(now {self.config.capacity!r}) or lower max_new_tokens",
                request_id=name,
                needed=needed,
                available=available,
            )
        if params.processors is not None:
            try:
                try_out(params.processors, prompt, vocabulary, self._runner.device)
            except Exception as error:
                told = f"a logits processor raised {type(error).__name__}: {error}"
                raise InvalidRequestError(told, request_id=name, field="generation_config") from error

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _follow_model(self) -> None:
        """Looks, before a call, whether the user's model changed since the last one.

        Moved or replaced parameters or modules: a new shadow. Changed weights: what the prefix cache holds is of no
        use. Updates that PyTorch counts are seen for next to nothing; for those it does not count (through `.data`) a
        checksum over the weights is compared, which costs about one decode step. While training goes on, the counters
        say enough and no checksum is made.
        """
        self._eos = eos_token_ids(self._runner.model, self.tokenizer)
        identity = self._runner.identity
        moved = identity.moved()
        self._moves = self._moves + 1 if moved else 0
        if moved:
            self._runner.make_shadow()
            self._scheduler.forget_prefixes()
            self._weights = None
            if self._runner.kv_dtype != self._pool.dtype:
                self._pool.close()
                self._pool, self._scheduler = self._make_pool()
        if self._runner.refresh_casts() or moved:
            self._steps.reset(capture=self._moves < _MOVES_IN_A_ROW)
        if not self.config.prefix_cache:
            return
        if self._forget_old_weights():
            return
        before, self._weights = self._weights, checksum(self._runner.model)
        if before != self._weights:
            self._scheduler.forget_prefixes()

    def _forget_old_weights(self) -> bool:
        """Empties the prefix cache when PyTorch saw the weights change since this was last asked."""
        if not self._runner.identity.changed_in_place():
            return False
        self._scheduler.forget_prefixes()
        self._weights = None
        return True

    # ---- memory and life --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        counts = self._counts
        return EngineStats(
            running=self._scheduler.running,
            waiting=len(self._scheduler.waiting),
            finished=counts["finished"],
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            generated_tokens=counts["generated"],
            preemptions=self._scheduler.preemptions,
            steps=counts["steps"],
        )

    def memory(self) -> MemoryReport:
        """Bytes of the K/V pool, and what else the engine holds."""
        pool = self._scheduler.pool
        return self._pool.report(pool.held, pool.peak_held, self._steps.graph_bytes, self._runner.cast_bytes)

    def release(self, *, graphs: bool = False) -> None:
        """Gives back the memory that no running request holds; empties the prefix cache. Addresses stay.

        Args:
            graphs: lets go of captured graphs as well, when nothing runs; the next call captures what it needs again.
        """
        self._check_open()
        self._pool.shrink(self._scheduler.trim())
        if not self._requests and not self._calls:
            self._runner.release_casts()
        if graphs and not self._flights:
            self._steps.reset()

    def close(self) -> None:
        """Ends what is under way and frees everything. The engine cannot be used afterwards; calling twice is fine."""
        if self._closed:
            return
        self._end_all("cancelled")
        self._scheduler.trim()
        self._steps.reset()
        self._runner.let_go()
        self._pool.close()
        self._closed = True

    def __reduce__(self) -> Any:
        raise TypeError("an Engine cannot be copied or pickled; build one where it is needed")

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed; build a new one")


class _Driver:
    """Lets one thread at a time in, as often as it likes, and refuses others instead of making them wait.

    No lock, which Ctrl-C could leave locked: the thread that was interrupted comes in again.
    """

    def __init__(self) -> None:
        self._thread: dict[str, int] = {}
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._thread.setdefault("id", me) != me:  # looks and takes in one
            raise ConfigError(
                "another thread drives this engine; submit everything from one thread, or build an engine for each "
                "(they share the model's weights)"
            )
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        if self._thread.get("id") != threading.get_ident():  # set free meanwhile, and maybe taken by another
            return
        self._depth -= 1
        if self._depth <= 0:
            self.free()

    def free(self) -> None:
        """Lets anybody in again."""
        self._depth = 0
        self._thread.clear()


class _Call:
    """The bracket around a whole call: follows the weights before, and leaves nothing under way after an exception."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: set[str] = set()

    def __enter__(self) -> None:
        self._before = set(self._engine._requests)
        if not self._before:
            self._engine._follow_model()
        self._engine._calls += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._engine._calls -= 1
        if kind is None or self._engine._closed:
            return
        if not issubclass(kind, (Exception, GeneratorExit)):
            self._engine._start_over()
        for name in [n for n in self._engine._requests if n not in self._before]:
            self._engine._end(name, "cancelled")


def _some(names: list[str]) -> str:
    """Names for a message: all of a few, the first of many."""
    told = ", ".join(names[:_NAMES_TOLD])
    return told if len(names) <= _NAMES_TOLD else f"{told} and {len(names) - _NAMES_TOLD} more"


def _new_completion(index: int, params: SamplingParams, record_token_times: bool) -> Completion:
    completion = Completion(index)
    if params.logprobs:
        completion.logprobs, completion.raw_logprobs = [], []
    if record_token_times:
        completion.token_times = []
    return completion


def _report(event: StreamEvent, on_output: Callable[[Output], None] | None) -> None:
    if on_output is not None and event.output is not None:
        on_output(event.output)
