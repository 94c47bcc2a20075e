"""Compiles the sampling kernels for compute capability 9.0, which needs no GPU. Run by test_sampling_kernels.py."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flatbed.kernels import sampling as kernels

FLOATS, INTS = "*fp32", "*i32"
TYPES = {
    "partials": FLOATS, "maxima": FLOATS, "temperature": FLOATS, "uniform": FLOATS, "listed": INTS, "rows": INTS,
    "processing": INTS, "seen": INTS, "out": INTS, "last_tokens": "*i64",
}  # fmt: skip
# A vocabulary of 151,936.
CONSTANTS = {"CHUNK": 2048, "CHUNK_GROUPS": 64, "CHUNKS": 128, "GROUPS": 8192, "TILE": 128, "PDL": True}


def compile_kernel(kernel: Any, dtype: str, shift: int) -> Any:
    constants = {**CONSTANTS, "SHIFT": shift}
    types = {**TYPES, "logits": dtype}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    given = {name: value for name, value in constants.items() if name in signature}
    options = {"num_warps": 16 if kernel is kernels.choose_kernel else 8}
    return triton.compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for dtype, shift in (("*bf16", 16), ("*fp32", 0)):
        for kernel in (kernels.partials_kernel, kernels.draw_kernel, kernels.maxima_kernel, kernels.choose_kernel):
            assert "f64" not in compile_kernel(kernel, dtype, shift).asm["ptx"], f"{kernel} computes in float64"
            print("compiled", kernel.fn.__name__, dtype)
