"""Attention over the paged pool. Backends stand behind one small interface (base.py); `choose` picks one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flatbed.attention.base import AttentionBackend, Availability
from flatbed.attention.torch_reference import TorchAttention
from flatbed.attention.triton import TritonAttention
from flatbed.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    import torch

# In the order in which `auto` tries them.
BACKENDS: dict[str, type[AttentionBackend]] = {
    TritonAttention.name: TritonAttention,
    TorchAttention.name: TorchAttention,
}


def backends() -> Iterable[type[AttentionBackend]]:
    """All backends that Flatbed knows, available or not."""
    return BACKENDS.values()


def choose(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; `auto` takes the first that is available.

    Raises ConfigError for a name that is not known, BackendUnavailableError for one that cannot run on `device`.
    """
    if name == "auto":
        return next(kind() for kind in BACKENDS.values() if kind.availability(device).ok)
    if name not in BACKENDS:
        raise ConfigError.unknown("attention", name, ["auto", *BACKENDS])
    availability = BACKENDS[name].availability(device)
    if not availability.ok:
        raise BackendUnavailableError(f"attention {name!r} cannot run on {device}: {availability.reason}")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "AttentionBackend", "Availability", "backends", "choose"]
