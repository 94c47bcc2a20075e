"""The shadow: a second module tree over the user's own parameters.

::

      user's model                         shadow
      ┌──────────────────────────┐         ┌──────────────────────────┐
      │ LlamaForCausalLM         │         │ LlamaForCausalLM         │   own objects, own _modules,
      │   config ────────────────┼─ copy ─▶│   config (attention:     │   own attributes, eval mode,
      │   training, hooks, ...   │         │           flatbed)       │   own config
      │   ├─ q_proj              │         │   ├─ q_proj              │
      │   │   _parameters ◀──────┼─────────┼───┼── the same dict      │   weights updated in place or
      │   │   _buffers    ◀──────┼─────────┼───┼── the same dict      │   replaced are seen at once
      └──────────────────────────┘         └──────────────────────────┘

Nothing is ever written to the user's side: not its attention, mode, config, hooks, dtype or generation config. That
holds also when the forward raises, and while another thread trains the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from flatbed.errors import UnsupportedModelError

# Rotary embeddings of these kinds write to their own buffers in the forward pass.
_SELF_CHANGING_ROPE = ("dynamic", "longrope")
# What a module calls around its forward.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, if there is one."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def make_shadow(model: nn.Module, attention: str) -> nn.Module:
    """A tree of new modules of the same classes that shares every parameter and buffer dictionary of `model`.

    Args:
        model: the user's model; only read.
        attention: the name under which our attention function is registered with Transformers.

    Raises UnsupportedModelError when the tree is bound to the original in a way that cannot be followed.
    """
    configs: dict[int, Any] = {}
    twins: dict[int, nn.Module] = {}
    for original in model.modules():
        twins[id(original)] = original.__class__.__new__(original.__class__)
    for original in model.modules():
        twin = twins[id(original)]
        state = {name: _follow(value, twins, configs, original) for name, value in vars(original).items()}
        state["_parameters"] = original._parameters
        state["_buffers"] = original._buffers
        state["_modules"] = {
            name: None if child is None else twins[id(child)] for name, child in original._modules.items()
        }
        state["training"] = False
        twin.__dict__.update(state)
        if _changes_its_buffers(original):
            twin.__dict__["_buffers"] = {
                name: None if buffer is None else buffer.clone() for name, buffer in original._buffers.items()
            }
    for config in configs.values():
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation_internal = attention
            config.use_cache = False
    return twins[id(model)]


@contextlib.contextmanager
def without_hooks(shadow: nn.Module) -> Iterator[None]:
    """Runs the shadow without the hooks that it shares with the user's model, which are for real runs."""
    kept = [(module, name, module.__dict__[name]) for module in shadow.modules() for name in _HOOKS]
    try:
        for module, name, _ in kept:
            module.__dict__[name] = OrderedDict()
        yield
    finally:
        for module, name, hooks in kept:
            module.__dict__[name] = hooks


def _follow(value: Any, twins: dict[int, nn.Module], configs: dict[int, Any], owner: nn.Module) -> Any:
    """`value` with references to the original's modules and configs replaced by those of the shadow."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial) and any(id(a) in twins for a in value.args):
        if getattr(owner, "_hf_hook", None) is not None:
            raise UnsupportedModelError(
                f"{type(owner).__name__} is dispatched by accelerate (offloading, or several devices), which moves "
                "weights during the forward pass; load the model onto one device without device_map='auto'"
            )
        args = [twins.get(id(a), a) for a in value.args]
        return functools.partial(value.func, *args, **value.keywords)
    if isinstance(value, list) and any(isinstance(item, nn.Module) for item in value):
        return [_follow(item, twins, configs, owner) for item in value]
    return value


def _changes_its_buffers(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return any(kind in _SELF_CHANGING_ROPE for kind in kinds.values())
    return kinds in _SELF_CHANGING_ROPE
