"""Attention over the paged pool. Backends stand behind one small interface (base.py); `choose` picks one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flatbed.attention.base import AttentionBackend, Availability
from flatbed.attention.flash import FlashAttention3
from flatbed.attention.torch_reference import TorchAttention
from flatbed.attention.triton import TritonAttention
from flatbed.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    import torch

# In the order in which `auto` tries them: by speed, as measured (benchmarks/NOTES.md).
BACKENDS: dict[str, type[AttentionBackend]] = {
    TritonAttention.name: TritonAttention,
    FlashAttention3.name: FlashAttention3,
    TorchAttention.name: TorchAttention,
}


def backends() -> Iterable[type[AttentionBackend]]:
    """All backends that Flatbed knows, available or not."""
    return BACKENDS.values()


def automatic(device: torch.device) -> tuple[type[AttentionBackend], str]:
    """What `auto` takes on `device`, and why."""
    found = {kind: kind.availability(device) for kind in BACKENDS.values()}
    chosen = next(kind for kind, availability in found.items() if availability.ok)
    order = list(found)
    before = [f"{k.name} ({found[k].reason})" for k in order[: order.index(chosen)]]
    after = [k.name for k in order[order.index(chosen) + 1 :] if found[k].ok]
    why = [found[chosen].reason]
    if before:
        why.append(f"cannot run: {', '.join(before)}")
    if after:
        why.append(f"measured slower: {', '.join(after)}")
    return chosen, "; ".join(why)


def choose(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; `auto` takes the first that is available.

    Raises ConfigError for a name that is not known, BackendUnavailableError for one that cannot run on `device`.
    """
    if name == "auto":
        return automatic(device)[0]()
    if name not in BACKENDS:
        raise ConfigError.unknown("attention", name, ["auto", *BACKENDS])
    availability = BACKENDS[name].availability(device)
    if not availability.ok:
        raise BackendUnavailableError(f"attention {name!r} cannot run on {device}: {availability.reason}")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "AttentionBackend", "Availability", "automatic", "backends", "choose"]
