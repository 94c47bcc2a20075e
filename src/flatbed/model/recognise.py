"""Recognising a module by its code, not by its name.

A module runs as one that we know when the methods that make up its forward have the same bodies as those of that class
in Transformers' source, as installed: whoever subclasses, patches or wraps it is left alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from typing import Any

from torch import nn

from flatbed.model.fusions import OneDnnLinear

# What a forward may be made up of, besides itself.
_HELPERS = ("_norm",)

# Classes of Transformers, as module and class name.
Known = tuple[tuple[str, str], ...]
# A class's methods by name, each as text.
_Bodies = tuple[tuple[str, str], ...]


def known(*classes: tuple[str, str]) -> Known:
    """Classes whose forward we know: ("llama", "LlamaMLP") is transformers.models.llama.modeling_llama.LlamaMLP."""
    return classes


def runs_as(module: nn.Module, classes: Known) -> bool:
    """Whether the module's forward is that of one of the classes."""
    if "forward" in module.__dict__:
        return False
    try:
        return _bodies(type(module)) in _known_bodies(classes)
    except (OSError, TypeError, SyntaxError):  # no source to look at
        return False


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what goes into the module or comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def plain_linear(module: Any, *, bias: bool | None = None) -> bool:
    """Whether the module is a matrix product and nothing else; with a bias, without one, or (None) either."""
    return (
        type(module) in (nn.Linear, OneDnnLinear)
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


def _bodies(kind: type[nn.Module]) -> _Bodies:
    """The bodies of a class's forward and its helpers as they run now: somebody may have put others in their place."""
    functions = [(name, getattr(kind, name)) for name in ("forward", *_HELPERS) if hasattr(kind, name)]
    return tuple((name, _body(inspect.unwrap(function))) for name, function in functions)


@functools.cache
def _body(function: Any) -> str:
    parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(parsed, ast.FunctionDef):
        raise TypeError("a lambda")
    return _text_of(parsed)


@functools.cache
def _known_bodies(classes: Known) -> frozenset[_Bodies]:
    """The bodies we know, out of Transformers' source files: what stands there, not what runs in this process."""
    found = set()
    for name, kind in classes:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            source = ast.parse(inspect.getsource(module))
        except (ImportError, OSError):  # this Transformers does not have it, or not its source
            continue
        for node in ast.walk(source):
            if isinstance(node, ast.ClassDef) and node.name == kind:
                methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
                found.add(tuple((n, _text_of(methods[n])) for n in ("forward", *_HELPERS) if n in methods))
    return frozenset(found)
