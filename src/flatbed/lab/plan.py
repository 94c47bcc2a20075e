"""`flatbed plan`: from a model's config and a workload to what each engine should be set to, with no weights loaded.

::

      config ─▶ layers ─┐
                        ├─▶ blocks needed at once ─▶ blocks that fit ─▶ settings to paste, what they would refuse
      workload ─────────┘            ▲                     ▲
                                one Arithmetic per engine  memory of the device, less weights (and training)
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from flatbed.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from flatbed.errors import ConfigError
from flatbed.lab.engines.base import EngineSpec, Settings
from flatbed.lab.plan_device import Device, Training, itemsize
from flatbed.lab.plan_engines import (
    Arithmetic,
    FlatbedArithmetic,
    Lengths,
    TransformersArithmetic,
    TypeBytes,
    VllmArithmetic,
)
from flatbed.lab.plan_layers import ModelLayers, empty_model, read_layers
from flatbed.lab.plan_settings import Snippet, snippets
from flatbed.lab.plan_simulate import Simulation, simulate
from flatbed.lab.units import told_bytes
from flatbed.lab.workloads import LabRequest, Workload
from flatbed.memory.capacity import blocks_for

ENGINES = ("flatbed", "transformers", "vllm")

# Where a pool must be cut, it gets this much of the free memory: the rest is for activations, CUDA and fragmentation.
USABLE = 0.9


@dataclass(frozen=True)
class EnginePlan:
    """One engine's part of a plan.

    Attributes:
        engine: as it was asked for.
        refusal: why it cannot run the model; all else is then of interest only as arithmetic.
        types: bytes by attention type.
        token_bytes, block_tokens, block_bytes: of the engine's own blocks.
        needed: blocks that hold every sample at once at its end.
        fits: blocks that the memory holds.
        blocks: the setting that was chosen, or asked for.
        tokens: what `blocks` hold, as if every layer kept all of them.
        pool: bytes that the pool takes for this workload.
        buffers: bytes that the engine sets aside besides, as far as they are known.
        left: bytes of the device that are left while it generates; negative when it does not fit.
        says: what the setting would refuse or slow down, a sentence each.
        snippets: settings to paste.
    """

    engine: str
    refusal: str | None
    types: list[TypeBytes]
    token_bytes: int
    block_tokens: int
    block_bytes: int
    needed: int
    fits: int
    blocks: int
    tokens: int
    pool: int
    buffers: int
    left: int
    says: list[str]
    snippets: list[Snippet]


@dataclass(frozen=True)
class Plan:
    """A whole plan.

    Attributes:
        model, dtype: as asked for; `dtype` is that of weights and cache.
        parameters, weights: how many, and their bytes.
        workload: facts of the workload.
        live: what Flatbed's scheduler makes of the workload when no block is short.
        live_block_tokens, live_bytes: tokens of a block there, and bytes of the most blocks that are live.
        token_budget: the most tokens in one forward pass, for all engines.
        training: None when not asked for.
        free: bytes that weights (and training) leave.
        notes: what the figures do not hold.
    """

    model: str
    dtype: str
    device: Device
    parameters: int
    weights: int
    workload: dict[str, Any]
    live: Simulation
    live_block_tokens: int
    live_bytes: int
    token_budget: int
    training: Training | None
    free: int
    engines: list[EnginePlan]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return dataclasses.asdict(self)


def make_plan(
    model: str,
    config: Any,
    workload: Workload,
    device: Device,
    *,
    dtype: str = "bfloat16",
    engines: Sequence[str] = ENGINES,
    capacity: str | None = None,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    training: str | None = None,
    optimizer: str = "adamw",
    trained: float = 1.0,
) -> Plan:
    """Plans a workload on a device.

    Args:
        model: its name, for what is told.
        config: its Transformers config.
        dtype: of weights and cache.
        engines: engine specs (`transformers:sdpa,page_size=128`, `vllm:block_size=32`).
        capacity: a capacity text to judge, instead of choosing one; `N blocks` are N times 256 tokens, as everywhere
            in the lab.
        token_budget: the most tokens in one forward pass.
        training: the dtype to train in, or None.
        optimizer: see `plan_device.OPTIMIZERS`.
        trained: the share of the parameters that is trained, in (0, 1].

    Raises ConfigError for what cannot be planned, and says which part of the input that is.
    """
    if token_budget < 1:
        raise ConfigError(f"the token budget must be at least 1, got {token_budget}")
    layers = read_layers(config)
    empty = empty_model(config)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    weights = parameters * itemsize(training or dtype)
    state = None if training is None else Training.of(parameters, training, optimizer, trained)
    taken = weights + (0 if state is None else state.bytes)
    free = device.memory - taken
    if free <= 0:
        what = "the weights" if state is None else "weights, gradients and optimizer states"
        raise ConfigError(f"{device.name}: {what} alone take {told_bytes(taken)} of {told_bytes(device.memory)}")
    size = itemsize(dtype)
    own = FlatbedArithmetic(layers, size)
    live = _steps(workload, token_budget, own.block_tokens)
    planned = []
    for text in engines:
        arithmetic = arithmetic_of(EngineSpec.parse(text), layers, size, token_budget, workload)
        if isinstance(arithmetic, FlatbedArithmetic):
            arithmetic.refusal = _flatbed_refusal(empty)
        planned.append(_plan_engine(text, arithmetic, model, workload, free, capacity, token_budget, live))
    return Plan(
        model=model,
        dtype=dtype,
        device=device,
        parameters=parameters,
        weights=weights,
        workload=workload.facts(),
        live=live,
        live_block_tokens=own.block_tokens,
        live_bytes=own.allocated(live.live_blocks),
        token_budget=token_budget,
        training=state,
        free=free,
        engines=planned,
        notes=_notes(config, layers, workload),
    )


def _flatbed_refusal(model: Any) -> str | None:
    from flatbed.errors import UnsupportedModelError
    from flatbed.model.runner import check_architecture

    try:
        check_architecture(model)
    except UnsupportedModelError as error:
        return str(error)
    return None


def given_workload(
    prompt_tokens: int, new_tokens: int, concurrency: int, samples: int = 1, *, vocab_size: int
) -> Workload:
    """A workload of equal lengths: prompts and completions of so many tokens, so many requests at once.

    Raises ConfigError for a number below 1.
    """
    given = {
        "prompt-tokens": prompt_tokens,
        "new-tokens": new_tokens,
        "concurrency": concurrency,
        "samples": samples,
    }
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    # Drawn, so that none is taken for its neighbour.
    draw = random.Random(0)
    prompts = ([draw.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(concurrency))
    return Workload("given lengths", tuple(LabRequest(prompt, new_tokens) for prompt in prompts), n=samples)


def arithmetic_of(
    spec: EngineSpec, layers: ModelLayers, size: int, token_budget: int, workload: Workload
) -> Arithmetic:
    """The arithmetic of an engine spec for numbers of `size` bytes. Raises ConfigError for an engine that cannot be
    planned."""
    if spec.name == "flatbed":
        return FlatbedArithmetic(layers, size, block_size=spec.option("block_size", EngineConfig.block_size))
    if spec.name == "transformers":
        return TransformersArithmetic(
            layers,
            size,
            page_size=spec.option("page_size", TransformersArithmetic.PAGE_SIZE),
            token_budget=token_budget,
            flash=not any(word.endswith(("sdpa", "eager")) for word in spec.words),
            asynchronous=spec.option("use_async_batching"),
            max_requests=min(workload.n * len(workload.requests), TransformersArithmetic.MAX_REQUESTS),
            logprobs=workload.logprobs,
            version=spec.version or version("transformers"),
        )
    if spec.name == "vllm":
        return VllmArithmetic(layers, size, block_size=spec.option("block_size"), token_budget=token_budget)
    raise ConfigError.unknown("engine to plan for", spec.name, ENGINES)


def lengths_of(workload: Workload) -> Counter[int]:
    """How many samples there are of each length, prompt and completion together; of the longest, as many as engines
    run at once."""
    ends = sorted((len(r.prompt) + r.new_tokens for r in workload.requests for _ in range(workload.n)), reverse=True)
    return Counter(ends[: EngineConfig.max_requests])


def _plan_engine(
    text: str,
    arithmetic: Arithmetic,
    model: str,
    workload: Workload,
    free: int,
    capacity: str | None,
    token_budget: int,
    live: Simulation,
) -> EnginePlan:
    lengths = lengths_of(workload)
    needed = arithmetic.needed(lengths)
    fits = arithmetic.most_blocks(int(free * USABLE))
    if capacity is None:
        wanted = arithmetic.wanted(needed)
        blocks = max(1, fits if wanted is None else min(fits, wanted))
    else:
        blocks = _blocks_of(capacity, arithmetic, free)
    refusal = arithmetic.refusal
    if refusal is None and not fits:
        refusal = "not even one block fits into the memory that is left"
    pool, buffers = arithmetic.taken(blocks, needed), arithmetic.buffers(blocks)
    return EnginePlan(
        engine=text,
        refusal=refusal,
        types=arithmetic.types(),
        token_bytes=arithmetic.token_bytes,
        block_tokens=arithmetic.block_tokens,
        block_bytes=arithmetic.block_bytes,
        needed=needed,
        fits=fits,
        blocks=blocks,
        tokens=arithmetic.tokens(blocks),
        pool=pool,
        buffers=buffers,
        left=free - pool - buffers,
        says=_says(arithmetic, blocks, fits, lengths, workload, token_budget, live),
        snippets=snippets(arithmetic, model, blocks, workload, token_budget, free),
    )


def _blocks_of(capacity: str, arithmetic: Arithmetic, free: int) -> int:
    """The engine's own blocks for a capacity text. Raises ConfigError when it is less than one."""
    amount = Settings(capacity=capacity).capacity_amount
    assert amount is not None, "a text was given"
    if amount.unit == "tokens":
        return arithmetic.blocks_of(int(amount.amount))
    size = amount.amount if amount.unit == "bytes" else free * amount.amount / 100
    blocks = int(size // arithmetic.block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"capacity {capacity!r} is less than one block of {arithmetic.name}: {arithmetic.block_bytes:,} bytes"
        )
    return blocks


# ---------------------------------------------------------------------------------------------------- in plain words


def _says(
    arithmetic: Arithmetic,
    blocks: int,
    fits: int,
    lengths: Lengths,
    workload: Workload,
    token_budget: int,
    live: Simulation,
) -> list[str]:
    longest, possible = max(lengths), arithmetic.longest(blocks)
    size = told_bytes(arithmetic.allocated(blocks))
    said = [f"{blocks:,} blocks hold {arithmetic.tokens(blocks):,} tokens ({size})"]
    if longest > possible:
        count = sum(samples for length, samples in lengths.items() if length > possible)
        one = f"one request of {longest:,} tokens is refused"
        said.append(one if count == 1 else f"{count:,} requests of up to {longest:,} tokens are refused")
    of_model = ", which is the model's limit" if possible == arithmetic.model.max_positions else ""
    said.append(f"the longest request that fits has {possible:,} tokens{of_model}; {arithmetic.when_longer(possible)}")
    accepted = {length: samples for length, samples in lengths.items() if length <= possible}
    if accepted:
        said += _concurrency(arithmetic, blocks, accepted, workload, token_budget, live)
    if blocks > fits:
        said.append(f"it does not fit: the memory that is left holds {fits:,} blocks at the most")
    prompt = max(len(request.prompt) for request in workload.requests)
    if prompt > token_budget:
        chunks = blocks_for(prompt, token_budget)
        said.append(f"a prompt of {prompt:,} tokens is computed in {chunks} steps of at most {token_budget:,}")
    return said + arithmetic.remarks(blocks, arithmetic.needed(lengths))


def _concurrency(
    arithmetic: Arithmetic, blocks: int, lengths: Lengths, workload: Workload, token_budget: int, live: Simulation
) -> list[str]:
    """How many run at a time, and what that costs in forward passes."""
    samples, least, longest = sum(lengths.values()), min(lengths), max(lengths)
    of = f"{longest:,}" if least == longest else f"{least:,} to {longest:,}"
    who = f"{samples:,} request{'s' if samples > 1 else ''} of {of} tokens"
    if arithmetic.needed(lengths) <= blocks:
        return [f"{who} run at once, each to its end"]
    few, many = (min(samples, arithmetic.at_once(blocks, length)) for length in (longest, least))
    at_a_time = f"{few:,}" if few == many else f"{few:,} (of the longest) to {many:,} (of the shortest)"
    own = isinstance(arithmetic, FlatbedArithmetic)
    block_size = arithmetic.block_tokens if own else EngineConfig.block_size
    scarce = _steps(workload, token_budget, block_size, max(1, arithmetic.tokens(blocks) // block_size))
    again = f", and {scarce.preemptions:,} samples are computed again" if scarce.preemptions else ""
    about = "" if own else "about "
    return [
        f"{who} run {at_a_time} at a time; the others wait",
        f"that takes {about}{scarce.steps:,} forward passes instead of {live.steps:,}{again}",
    ]


def _steps(workload: Workload, token_budget: int, block_size: int, blocks: int | None = None) -> Simulation:
    """What Flatbed's scheduler makes of a workload with so many blocks; None is enough for all."""
    return simulate(
        workload,
        block_size=block_size,
        token_budget=token_budget,
        max_requests=EngineConfig.max_requests,
        blocks=blocks,
    )


def _notes(config: Any, layers: ModelLayers, workload: Workload) -> list[str]:
    notes = []
    if getattr(config, "quantization_config", None):
        notes.append("the model is quantized; its weights are counted as if they were not")
    notes += [f"{count} layers of kind {kind} keep a state that is not counted" for kind, count in layers.other]
    shared = sum(layer.shared for layer in layers.layers)
    if shared:
        notes.append(f"{shared} layers read the K/V of earlier ones: vLLM gives them no room, Transformers does")
    if layers.max_positions is not None and workload.longest > layers.max_positions:
        notes.append(
            f"the longest request has {workload.longest:,} tokens, and the model {layers.max_positions:,} positions"
        )
    if workload.arrives_over_time:
        notes.append("requests arrive over time; they are planned as if all were there at once")
    return notes
