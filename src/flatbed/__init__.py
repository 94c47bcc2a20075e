"""Flatbed: continuous batching for Transformers models whose cost follows live tokens, never reserved capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatbed.config import EngineConfig
    from flatbed.engine import Engine, EngineStats
    from flatbed.errors import FlatbedError, FlatbedWarning
    from flatbed.integrations.transformers import install, uninstall
    from flatbed.memory.pool import MemoryReport
    from flatbed.request import Completion, Output, SamplingParams, StreamEvent, Timings

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `import flatbed` does not import torch.
_HOMES = {
    "Completion": "flatbed.request",
    "Engine": "flatbed.engine",
    "EngineConfig": "flatbed.config",
    "EngineStats": "flatbed.engine",
    "FlatbedError": "flatbed.errors",
    "FlatbedWarning": "flatbed.errors",
    "MemoryReport": "flatbed.memory.pool",
    "Output": "flatbed.request",
    "SamplingParams": "flatbed.request",
    "StreamEvent": "flatbed.request",
    "Timings": "flatbed.request",
    "install": "flatbed.integrations.transformers",
    "uninstall": "flatbed.integrations.transformers",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FlatbedError",
    "FlatbedWarning",
    "MemoryReport",
    "Output",
    "SamplingParams",
    "StreamEvent",
    "Timings",
    "__version__",
    "errors",
    "install",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("flatbed.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
