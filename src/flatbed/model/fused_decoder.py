"""A whole decoder of the Llama kind through fused operations: 9 launches a layer on CUDA instead of about 40.

A decoder is recognised by its code, not by its name: each of its classes must have a forward whose body is the same
as that of a class we know (Llama, Qwen2, Qwen3, Mistral, as installed), and so must the functions that it calls; its
parts must be plain, and nobody may have hooked into them. Everything else runs as its model wrote it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from flatbed.attention.base import AttentionSpec
from flatbed.model.fusions import Linear, OneDnnLinear
from flatbed.model.interface import LayerCall, Session, slot_of

# Role → classes whose forward we know, as module and class name.
_KNOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "model": (
        ("llama", "LlamaModel"),
        ("qwen2", "Qwen2Model"),
        ("qwen3", "Qwen3Model"),
        ("mistral", "MistralModel"),
    ),
    "layer": (("llama", "LlamaDecoderLayer"), ("qwen2", "Qwen2DecoderLayer"), ("mistral", "MistralDecoderLayer")),
    "attention": (
        ("llama", "LlamaAttention"),
        ("qwen2", "Qwen2Attention"),
        ("mistral", "MistralAttention"),
        ("qwen3", "Qwen3Attention"),
    ),
    "mlp": (("llama", "LlamaMLP"),),
    "norm": (("llama", "LlamaRMSNorm"),),
}


# Functions that a forward names and that decide nothing here: attention runs through Flatbed's own.
_NOT_RUN = {"eager_attention_forward"}


def _text_of(function: ast.FunctionDef) -> str:
    """A function's body as text: no decorators, annotations, docstrings or comments."""
    statements = function.body
    first = statements[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        statements = statements[1:]
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.AnnAssign):
                node.annotation = ast.Constant(None)
    return "\n".join(map(ast.unparse, statements))


def _parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(parsed, ast.FunctionDef):
        raise TypeError("a lambda")
    return parsed


def _code(function: ast.FunctionDef, find: Callable[[str], ast.FunctionDef | None]) -> str:
    """The text of a function and of those that it calls by name, which `find` gives (None for what is no function of
    its file). Two forwards may read alike and call another `apply_rotary_pos_emb` each, as Llama's and Ernie 4.5's do.
    """
    texts, seen, pending = [_text_of(function)], {function.name, *_NOT_RUN}, [function]
    while pending:
        one = pending.pop()
        for node in ast.walk(one):
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                called = find(node.id)
                if called is not None:
                    pending.append(called)
                    defaults = map(ast.unparse, (*called.args.defaults, *filter(None, called.args.kw_defaults)))
                    texts.append(f"{node.id} {', '.join(defaults)}\n{_text_of(called)}")
    return "\n".join((texts[0], *sorted(texts[1:])))


def _called(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """The functions of the same file that a function calls, and those that they call, as they are now, by name."""
    found: dict[str, types.FunctionType] = {}
    pending = [function]
    while pending:
        one = pending.pop()
        for name in one.__code__.co_names:
            value = one.__globals__.get(name)
            if isinstance(value, types.FunctionType) and value.__module__ == one.__module__ and name not in found:
                found[name] = inspect.unwrap(value)
                pending.append(found[name])
    return found


def _running(kind: type[nn.Module]) -> str:
    """The code of a class's forward as it runs now: somebody may have put another in the place of the class's own, or
    of a function that it calls."""
    function = inspect.unwrap(kind.forward)
    return _read(function, tuple(_called(function).items()))


@functools.cache
def _read(function: types.FunctionType, called: tuple[tuple[str, types.FunctionType], ...]) -> str:
    functions = dict(called)
    return _code(_parsed(function), lambda name: _parsed(functions[name]) if name in functions else None)


@functools.cache
def _known_forwards(role: str) -> frozenset[str]:
    """The forwards we know, out of Transformers' source files: what stands there, not what runs in this process."""
    codes = set()
    for name, kind in _KNOWN[role]:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            source = ast.parse(inspect.getsource(module)).body
        except (ImportError, OSError):  # this Transformers does not have it, or not its source
            continue
        functions = {node.name: node for node in source if isinstance(node, ast.FunctionDef)}
        for node in source:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                codes |= {
                    _code(f, functions.get) for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"
                }
    return frozenset(codes)


def _knows(role: str, module: nn.Module) -> bool:
    if "forward" in module.__dict__ or _hooked(module):
        return False
    try:
        return _running(type(module)) in _known_forwards(role)
    except (OSError, TypeError, AttributeError, SyntaxError):  # no source to look at
        return False


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _plain_linear(module: Any, *, bias: bool | None = None) -> bool:
    return (
        type(module) in (nn.Linear, OneDnnLinear)
        and "forward" not in module.__dict__
        and not _hooked(module)
        and module.weight.is_contiguous()
        and (bias is None or (module.bias is not None) == bias)
    )


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

    def __init__(self, model: Any, layers: list[_Layer], session: Session, ops: ModuleType) -> None:
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
            x, residual = ops.add_norm(x, residual, layer.before.weight, layer.before.variance_epsilon)
            query, key, value = ops.products(
                x, (_linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.v_proj))
            )
            gains = None
            if hasattr(attention, "q_norm"):
                gains = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
            mixed = ops.attend(session, layer.slot, layer.spec, query, key, value, angles, gains)
            x = ops.product(mixed, _linear(attention.o_proj))
            x, residual = ops.add_norm(x, residual, layer.after.weight, layer.after.variance_epsilon)
            x = ops.product(ops.gated(x, _linear(mlp.gate_proj), _linear(mlp.up_proj)), _linear(mlp.down_proj))
        x, _ = ops.add_norm(x, residual, model.norm.weight, model.norm.variance_epsilon)
        return BaseModelOutputWithPast(last_hidden_state=x[None])

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


def _linear(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


def fuse_decoder(shadow: nn.Module, session: Session, calls: list[LayerCall], ops: ModuleType) -> int:
    """Gives a recognised decoder inside the shadow the fused forward, with the operations of cuda_ops or cpu_ops.

    Returns how many layers it has, or 0 where it is not recognised.
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
    decoder = FusedDecoder(model, layers, session, ops)
    model.__dict__["forward"] = types.MethodType(lambda _, *args, **kwargs: decoder(*args, **kwargs), model)
    return len(layers)


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
    if not all(_plain_linear(p, bias=bias) for p in projections) or not _plain_linear(attention.o_proj):
        return None
    if not all(_plain_linear(p, bias=False) for p in (mlp.gate_proj, mlp.up_proj)) or not _plain_linear(mlp.down_proj):
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
