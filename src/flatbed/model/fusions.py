"""Faster modules for the shadow. The registry recognises a module by structure and gives its twin another class.

A replacement shares the parameters of what it replaces (a twin's `_parameters` is the original's own dictionary), so
no weight is copied and updates are seen at once. What is not recognised runs as the model wrote it. Each replacement
is tested against what it replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Fusion:
    """One replacement.

    Attributes:
        name: for `flatbed info` and tests.
        matches: whether it can stand in for a module of the shadow.
        replace: makes the module the replacement, in place.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    replace: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Linear:
    """Weight [out, in] and bias [out] (or None) of a product; a module's own tensors."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def linear(x: torch.Tensor, one: Linear, then: str = "none") -> torch.Tensor:
    """x [..., in] times a weight through oneDNN, and an activation after it ("swish", say) in the same pass."""
    return torch.ops.mkldnn._linear_pointwise(x, one.weight, one.bias, then, [], "")


class OneDnnLinear(nn.Linear):
    """`nn.Linear` in float32 on the CPU, through oneDNN instead of the BLAS that torch was built with.

    Same arithmetic, other kernels: on the machine of benchmarks/cpu-ragged.json it takes 10 to 50 % less time for
    every shape of a small model, and half for a large vocabulary with few rows.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):  # which oneDNN's own operators know nothing of
            return super().forward(input)
        return linear(input, Linear(self.weight, self.bias))


def _is_plain_linear_on_cpu(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.is_contiguous()
        and onednn_works()
    )


@functools.cache
def onednn_works() -> bool:
    """Whether torch was built with oneDNN, and its operators do here what the plain ones do."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight, bias = torch.linspace(-1, 1, 15).view(3, 5), torch.linspace(-2, 1, 20).view(4, 5), torch.ones(4)
    try:
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            plain = linear(x, Linear(weight, bias))
            swish = linear(x, Linear(weight, bias), then="swish")
            product = torch.ops.mkldnn._linear_pointwise.binary(x, swish, weight, bias, "mul")
            expected = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError):  # a private operator: another torch may not have it, or not like this
        return False
    gated = nn.functional.silu(expected) * expected
    return torch.allclose(plain, expected, atol=1e-5) and torch.allclose(product, gated, atol=1e-5)


def _become(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    def replace(module: nn.Module) -> None:
        module.__class__ = kind

    return replace


FUSIONS: tuple[Fusion, ...] = (Fusion("onednn-linear", _is_plain_linear_on_cpu, _become(OneDnnLinear)),)


def fuse(shadow: nn.Module) -> dict[str, int]:
    """Replaces whatever is recognised in the shadow; returns how many modules each fusion replaced."""
    counts: dict[str, int] = {}
    for module in list(shadow.modules()):
        for fusion in FUSIONS:
            if fusion.matches(module):
                fusion.replace(module)
                counts[fusion.name] = counts.get(fusion.name, 0) + 1
                break
    return counts
