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

import copy
import functools
import types
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from flatbed.errors import UnsupportedModelError

# Rotary embeddings of these kinds write to their own buffers in the forward pass.
_SELF_CHANGING_ROPE = ("dynamic", "longrope")


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


class Identity:
    """What the model's parameters and modules were when the shadow was made, to notice when it no longer fits.

    In-place updates change nothing here (`changed_in_place` tells them); replaced modules, parameters, dtypes or
    devices do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = self._read_structure()
        self._versions = self._read_versions()

    def _read_structure(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = [tuple(map(id, module._modules.values())) for module in self._model.modules()]
        for tensor in _tensors(self._model):
            found.append((id(tensor), tensor.data_ptr(), hash(tensor.dtype)))
        return found

    def _read_versions(self) -> list[int]:
        # Tensors made under inference_mode keep no version: they count as never changed here, and the checksum of
        # the weights finds what was written to them.
        return [0 if tensor.is_inference() else tensor._version for tensor in _tensors(self._model)]

    def moved(self) -> bool:
        """True when a module or parameter was replaced, moved or converted since this was last asked."""
        before, self._structure = self._structure, self._read_structure()
        return before != self._structure

    def changed_in_place(self) -> bool:
        """True when PyTorch saw an in-place update since this was last asked. Writes through `.data` are not seen."""
        before, self._versions = self._versions, self._read_versions()
        return before != self._versions


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer once, in a fixed order. A walk over the dictionaries: `parameters()` costs more."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
    return list(found.values())


# A tensor is read as rows of this many 8-byte words: a prime number, so that rows of a weight matrix are no multiple of it.
_COLUMNS = 4093
# How many of them at a time: few enough that a cache still holds them when they are read for the second time.
_CPU_ROWS, _DEVICE_ROWS = 32, 512


def checksum(model: nn.Module) -> tuple[int, ...]:
    """A number per parameter and buffer that any change of a few elements changes, also one made through `.data`.

    Each tensor's bits are read as a table of integers, of which every row and every column is summed modulo 2**64, in one
    pass over the memory. Nothing is lost to rounding. A changed word always shows, and so do two words that changed
    places: they differ in their row or in their column. More changes go unseen only if they cancel in both.
    """
    return tuple(_checksum(tensor) for tensor in _tensors(model))


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    nbytes = flat.numel() * flat.element_size()
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % 8:  # a slice of something larger, which cannot be read by words
        raw = raw.clone()
    words = raw[: nbytes // 8 * 8].view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    rows = words[:whole].view(-1, _COLUMNS)
    rest = words[whole:]
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=rows.device)
    columns[: len(rest)] = rest
    sums = [columns]
    for part in rows.split(_CPU_ROWS if rows.device.type == "cpu" else _DEVICE_ROWS):
        columns += part.sum(0)
        sums.append(part.sum(1))
    values = torch.cat(sums).cpu().numpy().tobytes() + raw[nbytes // 8 * 8 :].cpu().numpy().tobytes()
    return hash((tuple(tensor.shape), values))
