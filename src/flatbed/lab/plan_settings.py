"""Settings to paste, in each engine's own words."""

from __future__ import annotations

from dataclasses import dataclass

from flatbed.config import EngineConfig
from flatbed.lab.plan_engines import Arithmetic, FlatbedArithmetic, TransformersArithmetic, VllmArithmetic
from flatbed.lab.workloads import Workload

# What TRL gives the cache when the user names no share (GRPOTrainer and RLOOTrainer of 1.16).
TRL_MEMORY_PERCENT = 0.5


@dataclass(frozen=True)
class Snippet:
    """A piece of code or of a command line.

    Attributes:
        title: where it belongs.
        language: `python` or `console`.
        text: to paste as it is.
    """

    title: str
    language: str
    text: str


def snippets(
    arithmetic: Arithmetic, model: str, blocks: int, workload: Workload, token_budget: int, free: int
) -> list[Snippet]:
    """The settings of one engine for a pool of `blocks` of its own blocks.

    Args:
        free: bytes of the device that weights (and training) leave.
    """
    if isinstance(arithmetic, FlatbedArithmetic):
        return _flatbed(arithmetic, blocks, token_budget)
    if isinstance(arithmetic, TransformersArithmetic):
        return _transformers(arithmetic, blocks, workload, token_budget, free)
    assert isinstance(arithmetic, VllmArithmetic), "there are three engines"
    return _vllm(arithmetic, model, blocks, workload, token_budget)


def _flatbed(arithmetic: FlatbedArithmetic, blocks: int, token_budget: int) -> list[Snippet]:
    size = "" if arithmetic.block_tokens == EngineConfig.block_size else f", block_size={arithmetic.block_tokens}"
    text = f'flatbed.Engine(model, tokenizer, capacity="{blocks} blocks", token_budget={token_budget}{size})'
    return [Snippet("Flatbed", "python", text)]


def _transformers(
    arithmetic: TransformersArithmetic, blocks: int, workload: Workload, token_budget: int, free: int
) -> list[Snippet]:
    fields: dict[str, object] = {"num_blocks": blocks, "max_batch_tokens": token_budget}
    if arithmetic.block_tokens != arithmetic.PAGE_SIZE:
        fields["page_size"] = arithmetic.block_tokens
    tables = -(-workload.longest // arithmetic.block_tokens) + 1
    tables += tables % 2
    if arithmetic.max_blocks_per_request and tables > arithmetic.MAX_BLOCKS_PER_REQUEST:
        # generate_batch finds this out by itself; a manager that is made without hints stays at 32 blocks, and
        # requests beyond lose the fast decode path for the whole batch.
        fields["max_blocks_per_request"] = tables
    if workload.logprobs:
        fields["return_logprobs"] = True
    made = [Snippet("Transformers", "python", f"ContinuousBatchingConfig({_keywords(fields)})")]
    footprint = arithmetic.allocated(blocks) + arithmetic.buffers(blocks)
    trl = {name: value for name, value in fields.items() if name != "return_logprobs"}
    if footprint > TRL_MEMORY_PERCENT * free:
        # TRL sets 0.5, and pool and buffers above that share raise a MemoryError.
        trl["max_memory_percent"] = TransformersArithmetic.MEMORY_PERCENT
    for trainer in ("GRPO", "RLOO"):
        text = (
            f"{trainer}Config(\n"
            "    use_transformers_continuous_batching=True,\n"
            f"    transformers_continuous_batching_config={_literal(trl)},\n"
            ")"
        )
        made.append(Snippet(f"TRL, {trainer}", "python", text))
    return made


def _vllm(arithmetic: VllmArithmetic, model: str, blocks: int, workload: Workload, token_budget: int) -> list[Snippet]:
    longest = min(workload.longest, arithmetic.longest(blocks))
    fields = {
        "kv_cache_memory_bytes": arithmetic.allocated(blocks),
        "block_size": arithmetic.block_tokens,
        "max_model_len": longest,
        "max_num_seqs": min(workload.n * len(workload.requests), EngineConfig.max_requests),
        "max_num_batched_tokens": token_budget,
    }
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
    return [
        Snippet("vLLM, server", "console", f"vllm serve {model} {flags}"),
        Snippet("vLLM, Python", "python", f"LLM({model!r}, {_keywords(fields)})"),
    ]


def _keywords(fields: dict[str, object] | dict[str, int]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _literal(fields: dict[str, object]) -> str:
    return "{" + ", ".join(f'"{name}": {value!r}' for name, value in fields.items()) + "}"
