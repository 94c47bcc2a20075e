"""What a kernel or an operator is for, told by its name.

CUDA graphs hide on whose behalf a kernel runs, so the name is all there is. What no pattern here knows is reported by
name as `not classified`, never hidden.
"""

from __future__ import annotations

import re

PREFILL_ATTENTION, DECODE_ATTENTION = "prefill attention", "decode attention"
PRODUCTS = "matrix products"
READS, WRITES, ZEROING = "cache reads", "cache writes", "zeroing"
SAMPLING = "sampling"
COPIES = "copies host-device"
REST = "all other operations"
UNKNOWN = "not classified"
IDLE = "idle"

CATEGORIES = (
    PREFILL_ATTENTION,
    DECODE_ATTENTION,
    PRODUCTS,
    READS,
    WRITES,
    ZEROING,
    SAMPLING,
    COPIES,
    REST,
    UNKNOWN,
    IDLE,
)

# Attention whose name does not say what it is for: the kind of forward pass that launched it does.
ATTENTION = "attention"

# Regions of host code that an engine's watch marks; what is launched inside belongs to them whatever its name.
CACHE = "cache"

# (category, pattern), the first that is found counts. Flatbed's own kernels (src/flatbed/kernels) come first, by their
# full names; then the libraries', from the most particular to the plainest word.
_TABLE: tuple[tuple[str, str], ...] = (
    (PREFILL_ATTENTION, r"^prefill(_hopper)?_kernel"),
    (DECODE_ATTENTION, r"^(decode|plan)_kernel"),
    (ATTENTION, r"^(attention|join)_kernel"),
    (WRITES, r"^(rotate_)?write_kernel|reshape_and_cache"),
    (PRODUCTS, r"^(products?|gated|partial_product)_kernel"),
    (SAMPLING, r"^(partials|draw|maxima|choose)_kernel"),
    (REST, r"^(add_norm|activated_product|row_sum|checksum)_kernel"),
    (DECODE_ATTENTION, r"splitkv|batchdecode|flash_?decod|paged_attention_v[12]|mha_decode"),
    (PREFILL_ATTENTION, r"batchprefill"),
    (ATTENTION, r"flash|fmha|sdpa|scaled_dot_product|attention|attnfwd|_attn_|prepare_varlen"),
    (WRITES, r"index_copy|index_put|indexfunc|scatter"),
    (READS, r"index_?select|gather(?!topk)|aten::index$|aten::take|index_kernel"),
    (ZEROING, r"^memset|fillfunctor|fill_kernel|aten::(fill|zero|zeros)_?(like)?$"),
    (SAMPLING, r"arg_?max|soft_?max|multinomial|exponential|top_?k|sort|cumsum|scan|distribution|sampl"),
    (PRODUCTS, r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|splitkreduce|einsum|mkldnn::|onednn"),
    (PRODUCTS, r"aten::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|dot|mv|addmv|_grouped_mm|_scaled_mm)$|mkldnn_linear"),
    (REST, r"at::native|at_cuda_detail|^aten::|^triton_|elementwise|norm|rotary|silu|gelu|reduce_kernel|^memcpy dtod"),
    (REST, r"^prim::|^profiler|catarraybatched|^detach_?$"),
)
_PATTERNS = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _TABLE)
_COPY = re.compile(r"^memcpy (htod|dtoh)", re.IGNORECASE)


def category_of(name: str, region: str | None = None, *, marked: bool = False) -> str:
    """The category of a kernel or an operator; ATTENTION where its name does not say of what.

    Args:
        region: the innermost region of host code that it was launched in: ATTENTION, CACHE, ZEROING, SAMPLING, None.
        marked: it was launched where every region is marked, so that a gather or a scatter outside of them is none of
            the cache's (an embedding, say).
    """
    if _COPY.match(name):
        return COPIES
    by_name = next((category for category, pattern in _PATTERNS if pattern.search(name)), UNKNOWN)
    if region == CACHE:
        return by_name if by_name in (READS, WRITES, ZEROING) else WRITES
    if region == ATTENTION:
        # It may be put together from plain operators; only what gathers K/V for it stays apart.
        return by_name if by_name in (READS, PREFILL_ATTENTION, DECODE_ATTENTION) else ATTENTION
    if region is not None:
        return region
    return REST if marked and by_name in (READS, WRITES) else by_name
