"""What a call takes at least: the time to read weights and K/V once a step, and to do the prefill's operations.

Both at rates that were measured on the machine at hand (`ceilings`), not at those of a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from flatbed.lab.workloads import Workload

# Sizes that are far beyond the caches of the device, and take well below a second there.
_COPY_NUMBERS = {"cuda": 2**29, "cpu": 2**25}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


def ceilings(device: str = "cuda") -> dict[str, float]:
    """TB/s of a large copy (bytes read and written), TFLOP/s of a large product, on random data.

    The product is of bfloat16 on CUDA and of float32 on the CPU, where the lab's models are in these.
    """
    kind = torch.device(device).type

    def best(run: Callable[[], Any], repeats: int = 5) -> float:
        run()
        times = []
        for _ in range(repeats):
            if kind == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    x = torch.randn(_COPY_NUMBERS[kind], device=device)
    y = torch.empty_like(x)
    copy_s = best(lambda: y.copy_(x))
    size = _PRODUCT_SIZE[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = best(lambda: a @ b)
    return {"copy_tb_per_s": 2 * x.nbytes / copy_s / 1e12, "product_tflop_per_s": 2 * size**3 / product_s / 1e12}


def parameters(config: Any) -> int:
    """Parameters of the model of a config, without making their memory."""
    from flatbed.lab.plan_layers import empty_model

    return sum(parameter.numel() for parameter in empty_model(config).parameters())


def bound(config: Any, weights: int, work: Workload, ceiling: dict[str, float], itemsize: int = 2) -> float:
    """Seconds that a whole call takes at least.

    Args:
        config: of a model of the Llama kind.
        weights: its number of parameters, a tied embedding counted once.
        ceiling: see `ceilings`.
        itemsize: bytes of a weight, and of a number of the K/V.
    """
    embedding = config.vocab_size * config.hidden_size
    read = itemsize * (weights if config.tie_word_embeddings else weights - embedding)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = itemsize * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    lengths = [(len(request.prompt), request.new_tokens) for request in work.requests]
    kv = sum(work.n * token * (prompt * new + new * (new - 1) / 2) for prompt, new in lengths)
    bandwidth, rate = ceiling["copy_tb_per_s"] * 1e12, ceiling["product_tflop_per_s"] * 1e12
    dense = 2 * (weights - (0 if config.tie_word_embeddings else 2) * embedding)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head
    prefill = sum(dense * prompt + attention * prompt**2 for prompt, _ in lengths)
    return (max(new for _, new in lengths) * read + kv) / bandwidth + prefill / rate
