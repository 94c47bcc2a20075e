"""Norms and gated MLPs of any model by our kernels, where the whole decoder is not one that we know.

::

      a Gemma 3 layer, launches         as its model wrote it     here
      each of its six RMSNorms                    7                 1
      gate, up, GELU, product, down               5              2 (few rows) or 4

Both are recognised by their code, and run as their model wrote them wherever their input is not what the kernels are
for (another dtype than the weight's).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flatbed.model import cuda_ops
from flatbed.model.casts import inputs_of
from flatbed.model.cuda_ops import Activation, Norm
from flatbed.model.recognise import Known, hooked, known, plain_linear, runs_as

_NORMS: dict[Norm, Known] = {
    Norm.ROUNDED_FIRST: known(("llama", "LlamaRMSNorm")),
    Norm.ROUNDED_LAST: known(("olmo2", "Olmo2RMSNorm")),
    Norm.ADDED_TO_ONE: known(("gemma2", "Gemma2RMSNorm")),
}
_MLP = known(("llama", "LlamaMLP"))
# Classes of torch and Transformers that are an activation and nothing else.
_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "GELUActivation": Activation.GELU,
}


def fuse_modules(shadow: nn.Module) -> dict[str, int]:
    """Gives the shadow's norms and MLPs that are recognised our forward; returns how many there were of each."""
    counts = {"rms-norm": 0, "gated-mlp": 0}
    for module in shadow.modules():
        for name, recognise in (("rms-norm", _norm), ("gated-mlp", _mlp)):
            forward = recognise(module)
            if forward is not None:
                module.__dict__["forward"] = types.MethodType(forward, module)
                counts[name] += 1
    return counts


def _norm(module: Any) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """A forward for an RMSNorm that we know, or None."""
    kind = next((kind for kind, classes in _NORMS.items() if runs_as(module, classes)), None)
    if kind is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    written = type(module).forward
    eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if x.dtype != weight.dtype or x.shape[-1] != weight.numel():
            return written(self, x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return cuda_ops.add_norm(rows, None, weight, getattr(self, eps), kind)[0].view(x.shape)

    return forward


def _mlp(module: Any) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """A forward for an MLP that we know, or None."""
    if not runs_as(module, _MLP) or not all(
        plain_linear(getattr(module, name, None), bias=False) for name in ("gate_proj", "up_proj")
    ):
        return None
    activation = _ACTIVATIONS.get(type(module.act_fn).__name__)
    if activation is None or hooked(module.act_fn) or module.gate_proj.weight.shape != module.up_proj.weight.shape:
        return None
    written = type(module).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        gate, up = inputs_of(self.gate_proj, autocast), inputs_of(self.up_proj, autocast)
        dtype = x.dtype if autocast is None else autocast
        if gate.weight.dtype != dtype or up.weight.dtype != dtype:
            return written(self, x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
        mixed = cuda_ops.gated(rows, gate, up, activation)
        return self.down_proj(mixed.view(*x.shape[:-1], mixed.shape[-1]))

    return forward
