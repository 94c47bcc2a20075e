"""FlashAttention 3 for prefill, where its package is installed; decode stays with the Triton kernels.

FlashAttention 3 (Shah et al., 2024, https://arxiv.org/abs/2407.08608) reads the pool in place as the Triton kernels
do. A row of its page table is a sequence, a page a block, and strides tell it the order of a block's numbers::

      ours    block: [kv_heads, block_size, dim]      theirs    page: [block_size, kv_heads, dim]     (the same memory)

Decode is left to Triton: measured at 101 % of a copy's bandwidth (benchmarks/NOTES.md) there is nothing to gain, and a
CUDA graph can hold its launches for any lengths.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch

from flatbed.attention.base import AttentionSpec, Availability, Batch, LayerCache
from flatbed.attention.triton import TritonAttention
from flatbed.memory.transfer import upload_together

_PACKAGE = "flash_attn_interface"


class FlashAttention3(TritonAttention):
    """Prefill by the package `flash_attn_interface` on Hopper, decode by Triton.

    What FlashAttention 3 cannot do (sinks, float32, heads above 256, keys and values of different sizes) is left to
    Triton, layer by layer.
    """

    name: ClassVar[str] = "flash_attention_3"

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        triton = super().availability(device)
        if not triton.ok:
            return triton
        if importlib.util.find_spec(_PACKAGE) is None:
            return Availability(False, f"the package {_PACKAGE} (FlashAttention 3) is not installed")
        if torch.cuda.get_device_capability(device)[0] != 9:
            return Availability(False, "FlashAttention 3 needs compute capability 9 (Hopper)")
        return Availability(True, f"the package {_PACKAGE} and a Hopper GPU are there")

    def __init__(self) -> None:
        super().__init__()
        self._starts = torch.empty(0)
        self._most_queries = 0

    def begin(self, batch: Batch, block_size: int) -> None:
        super().begin(batch, block_size)
        starts = batch.query_starts[batch.decodes :] - batch.decodes
        if len(starts) > 1:
            (self._starts,) = upload_together([starts], batch.device)
            self._most_queries = int((starts[1:] - starts[:-1]).max())

    def _prefill(self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, out: torch.Tensor) -> None:
        if not _can(cache, spec):
            super()._prefill(cache, spec, query, out)
            return
        decodes = self._current.decodes
        options: dict[str, Any] = {}
        if spec.window is not None:
            options["window_size"] = (spec.window - 1, 0)
        if spec.softcap is not None:
            options["softcap"] = spec.softcap
        out[decodes:] = _attend()(
            q=query[decodes:],
            k_cache=cache.key.transpose(1, 2),
            v_cache=cache.value.transpose(1, 2),
            cache_seqlens=self._lengths[decodes:],
            page_table=self._tables[decodes:],
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._most_queries,
            softmax_scale=spec.scale,
            causal=True,
            **options,
        )


def _attend() -> Any:
    import flash_attn_interface

    return flash_attn_interface.flash_attn_with_kvcache


def _can(cache: LayerCache, spec: AttentionSpec) -> bool:
    dim = cache.key.shape[-1]
    return spec.sinks is None and cache.key.dtype.itemsize == 2 and dim == cache.value.shape[-1] and dim <= 256
