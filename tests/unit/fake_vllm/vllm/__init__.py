"""A stand-in for vLLM 0.24.0: the names, arguments and behaviour that the lab's adapter relies on, as in its sources.

It "generates" one token a step for every request that fits into its blocks; with too few blocks it preempts.
"""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.worker.gpu_worker import Worker

__all__ = ["LLM", "SamplingParams"]

TOTAL_BLOCKS = 4000  # of memory, weights included
WEIGHT_BLOCKS = 1000
TOKEN_BYTES = 512

# Of LLM.__init__ and of EngineArgs, those that a caller of ours may want.
_ARGUMENTS = {
    "skip_tokenizer_init", "dtype", "seed", "gpu_memory_utilization", "enforce_eager", "kv_cache_memory_bytes",
    "attention_backend", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override",
    "block_size", "enable_prefix_caching", "disable_log_stats", "load_format",
}  # fmt: skip


class Dtype:
    itemsize = 2


class LLM:
    def __init__(self, model: str, **arguments: Any) -> None:
        unknown = set(arguments) - _ARGUMENTS
        if unknown:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        if not arguments.get("skip_tokenizer_init"):
            raise OSError("there is no tokenizer in this checkpoint")
        if not os.path.isdir(model):
            raise OSError(f"no checkpoint {model}")
        worker = Worker()
        worker.load_model()
        block_size = arguments.get("block_size") or 16
        blocks = int(arguments.get("gpu_memory_utilization", 0.92) * TOTAL_BLOCKS) - WEIGHT_BLOCKS
        if arguments.get("kv_cache_memory_bytes"):
            blocks = arguments["kv_cache_memory_bytes"] // (block_size * TOKEN_BYTES)
        blocks = arguments.get("num_gpu_blocks_override") or blocks
        if blocks <= 0:
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
        if blocks * block_size < arguments["max_model_len"]:
            raise ValueError(
                f"To serve at least one request with the models's max seq len ({arguments['max_model_len']})"
            )
        worker.compile_or_warm_up_model()
        self.llm_engine = LLMEngine(blocks, block_size)
        self._number = 0

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True) -> list[Any]:
        assert len(prompts) == len(sampling_params)
        for prompt, params in zip(prompts, sampling_params, strict=True):
            params.output_kind = RequestOutputKind.FINAL_ONLY
            self._number += 1
            self.llm_engine.add_request(str(self._number), prompt, params)
        outputs = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))


class Scheduler:
    def __init__(self) -> None:
        self.kv_cache_manager = SimpleNamespace(usage=0.0)

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        request.made = [0] * request.params.n


class LLMEngine:
    def __init__(self, blocks: int, block_size: int) -> None:
        text = {
            "num_key_value_heads": 2,
            "num_attention_heads": 4,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "head_dim": 32,
        }
        config = SimpleNamespace(**text)
        config.get_text_config = lambda: config
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=block_size),
            model_config=SimpleNamespace(hf_config=config, dtype=Dtype),
        )
        self.scheduler = Scheduler()
        in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        core = SimpleNamespace(scheduler=self.scheduler)
        self.engine_core = SimpleNamespace(engine_core=core) if in_process else SimpleNamespace()
        self._requests: list[Any] = []

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, arrival_time: float | None = None
    ) -> str:
        assert isinstance(request_id, str)
        assert prompt["prompt_token_ids"]
        self._requests.append(
            SimpleNamespace(name=request_id, prompt=prompt["prompt_token_ids"], params=params, made=[0] * params.n)
        )
        return f"{request_id}-12ab34cd"

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def _blocks(self, request: Any) -> int:
        size = self.vllm_config.cache_config.block_size
        return sum(math.ceil((len(request.prompt) + made) / size) for made in request.made)

    def step(self) -> list[Any]:
        time.sleep(0.0005)
        usable = self.vllm_config.cache_config.num_gpu_blocks - 1
        running, used = [], 0
        for request in self._requests:
            if used + self._blocks(request) <= usable:
                running.append(request)
                used += self._blocks(request)
            elif any(request.made):
                self.scheduler._preempt_request(request, time.monotonic())
        self.scheduler.kv_cache_manager.usage = used / usable
        outputs = []
        for request in running:
            deltas = request.params.output_kind is RequestOutputKind.DELTA
            request.made = [made + 1 for made in request.made]
            finished = request.made[0] >= request.params.max_tokens
            if finished:
                self._requests.remove(request)
            if deltas or finished:
                samples = [
                    SimpleNamespace(index=i, token_ids=[7] * (1 if deltas else made))
                    for i, made in enumerate(request.made)
                ]
                outputs.append(SimpleNamespace(request_id=request.name, outputs=samples, finished=finished))
        return outputs
