"""Recognising a module by its code, not by its name.

A module runs as one that we know when the methods that make up its forward have the same bodies as those of that class
in Transformers' source, as installed, and so have the functions that they call: whoever subclasses, patches or wraps
any of that is left alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from flatbed.model.casts import CastLinear
from flatbed.model.fusions import OneDnnLinear

# The methods that a forward may be made up of.
_METHODS = ("forward", "_norm")
# Functions that a forward names and that decide nothing here: attention runs through Flatbed's own.
_NOT_RUN = {"eager_attention_forward"}

# Classes of Transformers, as module and class name.
Known = tuple[tuple[str, str], ...]
# A class's methods, each as text.
_Code = tuple[str, ...]


def known(*classes: tuple[str, str]) -> Known:
    """Classes whose forward we know: ("llama", "LlamaMLP") is transformers.models.llama.modeling_llama.LlamaMLP."""
    return classes


def runs_as(module: nn.Module, classes: Known) -> bool:
    """Whether the module's forward is that of one of the classes."""
    if "forward" in module.__dict__ or _kernelized(module):
        return False
    try:
        return _running(type(module)) in _written(classes)
    except (OSError, TypeError, AttributeError, SyntaxError):  # no source to look at
        return False


def _kernelized(module: nn.Module) -> bool:
    """Whether a kernel out of a hub stands for a function that the module calls (`use_kernels=True`). The package
    `kernels` keeps what may be exchanged in an attribute of each module."""
    functions = module.__dict__.get("_kernel_funcs", {})
    return any("forward" in vars(function) for function in functions.values())


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what goes into the module or comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def plain_linear(module: Any, *, bias: bool | None = None) -> bool:
    """Whether the module is a matrix product and nothing else; with a bias, without one, or (None) either."""
    return (
        type(module) in (nn.Linear, OneDnnLinear, CastLinear)
        and "forward" not in module.__dict__
        and not hooked(module)
        and module.weight.is_contiguous()
        and (bias is None or (module.bias is not None) == bias)
    )


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


def _function(value: Any) -> Any:
    """The function that a module stands for, or the value itself. The package `kernels` makes a module of a function
    that may be exchanged, as Transformers' rotary functions may from 5.25 on; its forward closes over the function."""
    if isinstance(value, nn.Module) and "forward" not in vars(value) and not hooked(value):
        return inspect.getclosurevars(type(value).forward).nonlocals.get("func", value)
    return value


def _called(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """The functions of the same file that a function calls, and those that they call, as they are now, by name."""
    found: dict[str, types.FunctionType] = {}
    pending = [function]
    while pending:
        one = pending.pop()
        for name in one.__code__.co_names:
            value = _function(one.__globals__.get(name))
            if isinstance(value, types.FunctionType) and value.__module__ == one.__module__ and name not in found:
                found[name] = inspect.unwrap(value)
                pending.append(found[name])
    return found


def _running(kind: type[nn.Module]) -> _Code:
    """The code of a class as it runs now: somebody may have put another in the place of a method, or of a function that
    it calls."""
    functions = [inspect.unwrap(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)]
    return tuple(_read(function, tuple(_called(function).items())) for function in functions)


@functools.cache
def _read(function: types.FunctionType, called: tuple[tuple[str, types.FunctionType], ...]) -> str:
    functions = dict(called)
    return _code(_parsed(function), lambda name: _parsed(functions[name]) if name in functions else None)


@functools.cache
def _written(classes: Known) -> frozenset[_Code]:
    """The code we know, out of Transformers' source files: what stands there, not what runs in this process."""
    found = set()
    for name, kind in classes:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            source = ast.parse(inspect.getsource(module)).body
        except (ImportError, OSError):  # this Transformers does not have it, or not its source
            continue
        functions = {node.name: node for node in source if isinstance(node, ast.FunctionDef)}
        for node in source:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
                found.add(tuple(_code(methods[n], functions.get) for n in _METHODS if n in methods))
    return frozenset(found)
