"""Compiles kernels for compute capability 9.0, which needs no GPU: python compile_kernels.py sampling|fused

The interpreter lets pass what the compiler refuses, or would compute in float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

Job = tuple[Any, dict[str, Any], dict[str, str], int]  # kernel, constants, types of pointers and floats, warps


def sampling() -> Iterator[Job]:
    from flatbed.kernels import sampling as kernels

    floats, ints = "*fp32", "*i32"
    types = {
        "partials": floats, "maxima": floats, "temperature": floats, "uniform": floats, "listed": ints, "rows": ints,
        "processing": ints, "seen": ints, "out": ints, "last_tokens": "*i64",
    }  # fmt: skip
    # A vocabulary of 151,936.
    constants = {"CHUNK": 2048, "CHUNK_GROUPS": 64, "CHUNKS": 128, "GROUPS": 8192, "TILE": 128, "PDL": True}
    for dtype, shift in (("*bf16", 16), ("*fp32", 0)):
        for kernel in (kernels.partials_kernel, kernels.draw_kernel, kernels.maxima_kernel, kernels.choose_kernel):
            warps = 16 if kernel is kernels.choose_kernel else 8
            yield kernel, {**constants, "SHIFT": shift}, {**types, "logits": dtype}, warps


def fused() -> Iterator[Job]:
    from flatbed.kernels import fused as kernels

    types = dict.fromkeys(("x", "residual", "weight", "out", "residual_out", "gate", "up"), "*bf16")
    types |= dict.fromkeys(("gate_weight", "up_weight", "query", "key", "value", "cos", "sin"), "*bf16")
    types |= dict.fromkeys(("query_gain", "key_gain", "query_out", "key_pool", "value_pool"), "*bf16")
    types |= {"positions": "*i64", "slot_blocks": "*i32", "slot_offsets": "*i32", "eps": "fp32"}
    mixed = dict.fromkeys(("residual", "residual_out", "weight"), "*fp32")
    for kind, parts, more in product(range(3), (0, 2), ({}, mixed)):
        constants = {"PARTS": parts, "HAS_RESIDUAL": True, "KIND": kind, "BLOCK": 1024, "PDL": True}
        kinds = {**types, "x": "*fp32" if parts else "*bf16", **more}
        yield kernels.add_norm_kernel, {**constants, "PRODUCT": kernels.TYPES[torch.bfloat16]}, kinds, 4
    for kind in range(3):
        yield kernels.activated_product_kernel, {"ACTIVATION": kind, "BLOCK": 1024, "PDL": True}, types, 4
        sizes = {"ROWS": 16, "TILE": 32, "DEPTH": 128, "PDL": True}
        yield kernels.gated_kernel, {"ACTIVATION": kind, **sizes}, types, 4
    for tokens, norm in ((1, False), (4, True), (32, False)):
        sizes = {"HEADS": 14, "KV_HEADS": 2, "DIM": 64, "HALF_PAD": 32, "BLOCK_SIZE": 32, "TOKENS": tokens, "PDL": True}
        angles = dict.fromkeys(("cos", "sin", "query_gain", "key_gain"), "*fp32" if tokens == 4 else "*bf16")
        constants = {**sizes, "TABLE": norm, "NORM": norm}
        yield kernels.rotate_write_kernel, constants, {**types, **angles}, 4 if tokens > 4 else 1


def compile_kernels(jobs: Iterator[Job]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, constants, types, warps in jobs:
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        given = {name: value for name, value in constants.items() if name in signature}
        source = ASTSource(kernel, signature, given)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert "f64" not in compiled.asm["ptx"], f"{kernel} computes in float64"
        print("compiled", kernel.fn.__name__, given)


def compiled(which: str, cache: Path) -> int:
    """How many kernels were compiled, in a process of its own: this one may have chosen the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, which], env={**env, "TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.count("compiled")


if __name__ == "__main__":
    compile_kernels({"sampling": sampling, "fused": fused}[sys.argv[1]]())
