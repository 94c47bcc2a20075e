"""Forwards that somebody put into a module, taken over into a shadow.

Such a forward often calls the one it stands for, which it remembers as a bound method of the original: TRL's fused head
does, and accelerate's wrappers for mixed precision do, around each other::

      model.forward ─▶ accelerate: to float32 ─▶ under autocast ─▶ TRL: fused head ─▶ the class's forward, bound
                              │                      │                  │             to `model`: this is what
                              └── closes over ───────┘                  └─ closes over ┘   the shadow must not run

A function is taken over by copying it with a closure over copies; what leads to none of the original's modules stays as
it is.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The twin of a module of the original; any other module itself.
Twin = Callable[[nn.Module], nn.Module]


def taken_over(value: Any, twin: Twin) -> Any:
    """`value` (a function, or what stands for one) with the modules that it closes over replaced by their twins."""
    return _copied(value, twin, {})


def _parts(value: Any) -> dict[Any, Any]:
    """What a callable leads to: the function and owner of a method, a function's closure, attributes of a wrapper."""
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "owner": value.__self__}
    if isinstance(value, types.FunctionType):
        return {at: cell.cell_contents for at, cell in enumerate(value.__closure__ or ()) if _filled(cell)}
    if callable(value) and not isinstance(value, type) and "__wrapped__" in getattr(value, "__dict__", ()):
        return dict(vars(value))  # an object that functools.update_wrapper made stand for a function
    return {}


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable has no value yet)
    except ValueError:
        return False
    return True


def _uncompiled(value: Any) -> Any:
    """What `torch.compile` made a callable of, or the value itself: the shadow runs it as it was written."""
    while (inside := getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable")) is not None:
        value = inside
    return value


def _concerned(value: Any, twin: Twin, seen: set[int]) -> bool:
    """Whether `value` leads to something that has to be another in the shadow."""
    value = _uncompiled(value)
    if isinstance(value, torch.autocast):
        return True
    if isinstance(value, nn.Module):
        return twin(value) is not value
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_concerned(part, twin, seen) for part in _parts(value).values())


def _copied(value: Any, twin: Twin, made: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return twin(value)
    if id(value) in made:
        return made[id(value)]
    if not _concerned(value, twin, set()):
        return value
    value = _uncompiled(value)
    if isinstance(value, torch.autocast):
        # One of its own, because it keeps state while it is entered; and without the cache of cast weights, which would
        # be old in the replay of a CUDA graph.
        own = made[id(value)] = copy.copy(value)
        own._cache_enabled = False
        return own
    parts = _parts(value)
    if isinstance(value, types.MethodType):
        function, owner = (_copied(parts[name], twin, made) for name in ("function", "owner"))
        return types.MethodType(function, owner)
    if isinstance(value, types.FunctionType):
        return _copied_function(value, parts, twin, made)
    own = made[id(value)] = value.__class__.__new__(value.__class__)
    own.__dict__.update({name: _copied(part, twin, made) for name, part in parts.items()})
    return own


def _copied_function(
    function: types.FunctionType, parts: dict[int, Any], twin: Twin, made: dict[int, Any]
) -> types.FunctionType:
    """The cells are filled last, for a function may close over itself."""
    cells = tuple(types.CellType() if at in parts else cell for at, cell in enumerate(function.__closure__ or ()))
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made[id(function)] = own
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    for at, part in parts.items():
        cells[at].cell_contents = _copied(part, twin, made)
    return own
