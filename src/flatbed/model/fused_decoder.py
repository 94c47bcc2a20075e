"""A whole decoder of the Llama kind through fused operations: 9 launches a layer on CUDA instead of about 40.

A decoder is recognised by its code, not by its name: each of its classes must have a forward whose body is the same
as that of a class we know (Llama, Qwen2, Qwen3, Mistral, as installed), and so must the functions that it calls; its
parts must be plain, and nobody may have hooked into them. Everything else runs as its model wrote it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from flatbed.attention.base import AttentionSpec
from flatbed.model.casts import inputs_of
from flatbed.model.fusions import Linear
from flatbed.model.interface import LayerCall, Session, slot_of
from flatbed.model.recognise import Known, hooked, known, plain_linear, runs_as

# Role → classes whose forward we know, as module and class name.
_KNOWN: dict[str, Known] = {
    "model": known(
        ("llama", "LlamaModel"), ("qwen2", "Qwen2Model"), ("qwen3", "Qwen3Model"), ("mistral", "MistralModel")
    ),
    "layer": known(("llama", "LlamaDecoderLayer"), ("qwen2", "Qwen2DecoderLayer"), ("mistral", "MistralDecoderLayer")),
    "attention": known(
        ("llama", "LlamaAttention"),
        ("qwen2", "Qwen2Attention"),
        ("mistral", "MistralAttention"),
        ("qwen3", "Qwen3Attention"),
    ),
    "mlp": known(("llama", "LlamaMLP")),
    "norm": known(("llama", "LlamaRMSNorm")),
}


def _knows(role: str, module: nn.Module) -> bool:
    return runs_as(module, _KNOWN[role]) and not hooked(module)


@dataclass(frozen=True)
class _Layer:
    """The modules of one decoder layer, and what its attention is. Tensors are read from the modules at each call, so
    that replaced parameters are seen."""

    before: Any
    attention: Any
    after: Any
    mlp: Any
    slot: int
    spec: AttentionSpec


class FusedDecoder:
    """The forward of a recognised decoder."""

    def __init__(
        self, model: Any, layers: list[_Layer], session: Session, ops: ModuleType, dtype: torch.dtype | None
    ) -> None:
        """`dtype`: of the products in mixed precision; None where all is of one dtype."""
        self._dtype = dtype
        self._model = model
        self._layers = layers
        self._session = session
        self._ops = ops
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        """input_ids, position_ids int64 [1, T] → hidden states [1, T, size]. Other arguments are those of a call
        without cache and mask, and change nothing."""
        model, session, ops = self._model, self._session, self._ops
        x = model.embed_tokens(input_ids)
        angles = self._angles(x, position_ids)
        x = x[0]
        residual: torch.Tensor | None = None
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            x, residual = self._add_norm(x, residual, layer.before, self._dtype)
            query, key, value = ops.products(
                x, (self._linear(attention.q_proj), self._linear(attention.k_proj), self._linear(attention.v_proj))
            )
            gains = None
            if hasattr(attention, "q_norm"):
                gains = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
            mixed = ops.attend(session, layer.slot, layer.spec, query, key, value, angles, gains)
            x = ops.product(mixed, self._linear(attention.o_proj))
            x, residual = self._add_norm(x, residual, layer.after, self._dtype)
            x = ops.gated(x, self._linear(mlp.gate_proj), self._linear(mlp.up_proj))
            x = ops.product(x, self._linear(mlp.down_proj))
        x, _ = self._add_norm(x, residual, model.norm, model.norm.weight.dtype)
        return BaseModelOutputWithPast(last_hidden_state=x[None])

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Any, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operation; `dtype` is of the result, in mixed precision, where residuals and weights stay as they are."""
        given = (x, residual, norm.weight, norm.variance_epsilon)
        if self._dtype is None:
            added: tuple[torch.Tensor, torch.Tensor] = self._ops.add_norm(*given)
        else:
            added = self._ops.add_norm(*given, dtype=dtype, product=self._dtype)
        return added

    def _linear(self, module: nn.Linear) -> Linear:
        """A product's weight and bias as they go into it."""
        linear = inputs_of(module, self._dtype)
        if self._dtype is None or linear.weight.dtype == self._dtype:
            return linear
        return Linear(*(None if tensor is None else tensor.to(self._dtype) for tensor in (module.weight, module.bias)))

    def _angles(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """The rotary embedding's angles as `ops.attend` takes them: of these positions, or, for a graph that will be
        replayed at others, a table of all that may come (the embedding's own launches are as many as a layer's)."""
        positions = self._session.positions
        if positions is None:
            cos, sin = self._model.rotary_emb(x, position_ids)
            return self._ops.rotary(cos[0], sin[0])
        if positions not in self._tables:
            cos, sin = self._model.rotary_emb(x, torch.arange(positions, device=x.device)[None])
            self._tables[positions] = (cos[0], sin[0])
        return self._ops.rotary(*self._tables[positions], position_ids[0])


def fuse_decoder(
    shadow: nn.Module,
    session: Session,
    calls: list[LayerCall],
    ops: ModuleType,
    casts: Mapping[nn.Linear, torch.dtype] | None = None,
) -> int:
    """Gives a recognised decoder inside the shadow the fused forward, with the operations of cuda_ops or cpu_ops.

    `casts` says, in mixed precision, which products run in which dtype: all of the decoder's must run in that of the
    keys, over float32 weights. Returns how many layers it has, or 0 where it is not recognised.
    """
    model: Any = getattr(shadow, "model", None)
    if model is None or not _knows("model", model) or not isinstance(getattr(model, "layers", None), nn.ModuleList):
        return 0
    if type(model.embed_tokens) is not nn.Embedding or not _knows("norm", model.norm):
        return 0
    layers = []
    for module in model.layers:
        layer = _recognise(module, calls)
        if layer is None:
            return 0
        layers.append(layer)
    if len(layers) != len(calls) or getattr(model.config, "num_hidden_layers", len(layers)) != len(layers):
        return 0
    if casts is not None and not _all_cast(model, layers, casts, calls[0].dtype):
        return 0
    decoder = FusedDecoder(model, layers, session, ops, None if casts is None else calls[0].dtype)
    model.__dict__["forward"] = types.MethodType(lambda _, *args, **kwargs: decoder(*args, **kwargs), model)
    return len(layers)


def _all_cast(model: Any, layers: list[_Layer], casts: Mapping[nn.Linear, torch.dtype], dtype: torch.dtype) -> bool:
    """Whether all products of the decoder run in `dtype`, and everything else in float32."""
    products: list[Any] = []
    others = [model.embed_tokens.weight, model.norm.weight]
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        products += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = (layer.before, layer.after, getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        others += [norm.weight for norm in norms if norm is not None]
    return all(casts.get(module) == dtype for module in products) and all(w.dtype == torch.float32 for w in others)


def _recognise(module: Any, calls: list[LayerCall]) -> _Layer | None:
    if not _knows("layer", module):
        return None
    attention, mlp = module.self_attn, module.mlp
    parts = ((attention, "attention"), (mlp, "mlp"), (module.input_layernorm, "norm"))
    if not all(_knows(role, part) for part, role in (*parts, (module.post_attention_layernorm, "norm"))):
        return None
    if any(hasattr(attention, name) and not _knows("norm", getattr(attention, name)) for name in ("q_norm", "k_norm")):
        return None
    bias = attention.q_proj.bias is not None
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    if not all(plain_linear(p, bias=bias) for p in projections) or not plain_linear(attention.o_proj):
        return None
    if not all(plain_linear(p, bias=False) for p in (mlp.gate_proj, mlp.up_proj)) or not plain_linear(mlp.down_proj):
        return None
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    slot = slot_of(attention)
    if slot is None:
        return None
    call = calls[slot]
    dim = call.shape.key_dim
    if call.shape.value_dim != dim or dim % 2 or call.spec.softcap is not None or call.spec.sinks is not None:
        return None
    return _Layer(module.input_layernorm, attention, module.post_attention_layernorm, mlp, slot, call.spec)
