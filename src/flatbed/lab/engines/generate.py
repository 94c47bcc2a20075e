"""Left-padded `model.generate`, the reference without continuous batching: `generate[:ATTENTION]`.

All prompts are one batch, padded to the longest; every row runs until the longest completion is done. It has no
capacity, token budget or schedule, so it is measured once and drawn as a flat line.
"""

from __future__ import annotations

import time
from typing import Any

from flatbed.lab.engines.base import (
    EngineSpec,
    Holding,
    MemoryResult,
    ModelAdapter,
    NotSupported,
    RunResult,
    Settings,
    latencies,
    one_word,
)
from flatbed.lab.engines.transformers import generation_config
from flatbed.lab.workloads import Workload


class GenerateAdapter(ModelAdapter):
    """`model.generate` on one padded batch."""

    package = "transformers"
    controls = frozenset()
    _memory = MemoryResult()

    @classmethod
    def check(cls, spec: EngineSpec, settings: Settings) -> None:
        one_word(spec, "the name of an attention implementation")
        if spec.options:
            raise NotSupported(f"engine {spec.text!r}: generate has no option {spec.options[0][0]!r}")

    @classmethod
    def holding(cls, spec: EngineSpec) -> Holding:
        return "live"

    @property
    def attention(self) -> str | None:
        return one_word(self.spec, "the name of an attention implementation")

    def construct(self, workload: Workload) -> dict[str, float]:
        self._memory = MemoryResult()
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        import torch

        notes = ["arrivals are ignored: padded generate takes all requests at once"] * workload.arrives_over_time
        if len({request.new_tokens for request in workload.requests}) > 1:
            notes.append("every row runs to the longest completion; only the tokens asked for are counted")
        clock = _Clock() if latency else None
        start = time.perf_counter()
        ids, mask = self._batch(workload)
        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=generation_config(self.model, workload, num_return_sequences=workload.n),
                return_dict_in_generate=True,
                output_logits=workload.logprobs,
                streamer=clock,
            )
            if workload.logprobs:
                for step, logits in enumerate(out.logits):
                    made = out.sequences[:, ids.shape[1] + step, None]
                    torch.log_softmax(logits.float(), dim=-1).gather(1, made)
        rows = out.sequences[:, ids.shape[1] :].tolist()
        self.synchronize()
        seconds = time.perf_counter() - start
        eos = None if workload.fixed_lengths else self.model.generation_config.eos_token_id
        result = RunResult(
            seconds,
            tokens=_count(workload, rows, eos),
            parts={"generation": seconds},
            preemptions=0,
            notes=notes,
        )
        if clock is not None:
            # All rows make their tokens together.
            steps = clock.times[-len(rows[0]) :]
            result.first_token_s, result.between_tokens_s = latencies({"all": start}, {"all": steps})
        self._remember(workload, out.past_key_values)
        return result

    def _batch(self, workload: Workload) -> tuple[Any, Any]:
        """Token ids and attention mask, both [prompts, longest prompt], padded on the left."""
        import torch

        longest = max(len(request.prompt) for request in workload.requests)
        pads = [longest - len(request.prompt) for request in workload.requests]
        ids = [[0] * pad + list(request.prompt) for pad, request in zip(pads, workload.requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _remember(self, workload: Workload, cache: Any) -> None:
        layers = getattr(cache, "layers", None) or ()
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        taken = sum(tensor.nbytes for tensor in tensors if tensor is not None) or None
        live = workload.live_tokens * self.token_bytes
        self._memory = MemoryResult(reserved=taken, committed=taken, live=live)

    def memory(self) -> MemoryResult:
        return MemoryResult(**vars(self._memory))

    def close(self) -> None:
        pass


class _Clock:
    """A streamer that only looks at the clock, at every step; older versions show it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _count(workload: Workload, rows: list[list[int]], eos: Any) -> int:
    """Tokens that were asked for: of each row no more than its request wanted, and none after EOS."""
    ends = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    wanted = [request.new_tokens for request in workload.requests for _ in range(workload.n)]
    total = 0
    for row, most in zip(rows, wanted, strict=True):
        kept = row[:most]
        total += next((at + 1 for at, token in enumerate(kept) if token in ends), len(kept))
    return total
