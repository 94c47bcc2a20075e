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
from flatbed.model.forwards import taken_over

# Rotary embeddings of these kinds write to their own buffers in the forward pass.
_SELF_CHANGING_ROPE = ("dynamic", "longrope")
# What a module calls around its forward.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Hooks out of these packages gather sharded weights (ZeRO-3, FSDP). An engine runs while they are gathered already, and
# not in step with other processes, so that its forward must not ask them for anything.
_GATHERING = ("deepspeed.", "torch.distributed.fsdp.")
# Names under which wrappers hold what they wrap: torch.compile, FSDP, activation checkpointing.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside wrappers that run it in a way of their own: compiled, sharded, or checkpointing activations."""
    while True:
        inner = next((inner for name in _WRAPPED if (inner := module._modules.get(name)) is not None), None)
        if inner is None:
            return module
        module = inner


def make_shadow(model: nn.Module, attention: str) -> nn.Module:
    """A tree of new modules of the same classes that shares every parameter and buffer dictionary of `model`.

    Args:
        model: the user's model; only read.
        attention: the name under which our attention function is registered with Transformers.

    Raises UnsupportedModelError when the tree is bound to the original in a way that cannot be followed.
    """
    configs: dict[int, Any] = {}
    twins: dict[int, nn.Module] = {}
    originals = [module for module in model.modules() if unwrap(module) is module]
    for original in originals:
        twins[id(original)] = object.__new__(original.__class__)  # FSDP's classes have a __new__ that makes another
    for original in originals:
        twin = twins[id(original)]
        state = {name: _follow(value, twins, configs, original) for name, value in vars(original).items()}
        state["_parameters"] = original._parameters
        state["_buffers"] = original._buffers
        state["_modules"] = {
            name: None if child is None else twins[id(unwrap(child))] for name, child in original._modules.items()
        }
        for name in _HOOKS:
            if any(map(_gathers, state[name].values())):
                state[name] = OrderedDict((key, hook) for key, hook in state[name].items() if not _gathers(hook))
        state["training"] = False
        state["_compiled_call_impl"] = None  # of `module.compile()`; as with torch.compile, what is inside is run
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


def _gathers(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_GATHERING)


def _follow(value: Any, twins: dict[int, nn.Module], configs: dict[int, Any], owner: nn.Module) -> Any:
    """`value` with references to the original's modules and configs replaced by those of the shadow."""
    if isinstance(value, nn.Module):
        return twins.get(id(unwrap(value)), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return taken_over(value, lambda module: twins.get(id(unwrap(module)), module))
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
