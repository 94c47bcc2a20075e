"""The attention function that Transformers' models call: finds the layer, writes its K/V, attends over the pool.

It is registered under the name `flatbed`; each attention module of a shadow carries a `Slot` that says which layer it
is and which session it belongs to. Nothing travels through the model's keyword arguments, which some models drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from flatbed.attention.base import AttentionBackend, AttentionSpec
from flatbed.errors import UnsupportedModelError
from flatbed.memory.capacity import LayerShape
from flatbed.memory.pool import LayerCache

NAME = "flatbed"
_SLOT = "_flatbed_slot"

# Keyword arguments of Transformers' attention functions that change the result, and that we do not implement.
_UNSUPPORTED = ("position_bias", "head_mask", "block_mask", "score_mod", "indexer_mask")


@dataclass
class Slot:
    """What one attention module of a shadow needs to know.

    Attributes:
        layer: its index in the pool, in the order in which a forward pass reaches the modules.
        session: shared by all modules of a shadow.
    """

    layer: int
    session: Session


@dataclass
class LayerCall:
    """What was seen of one attention module while probing."""

    module: nn.Module
    shape: LayerShape
    heads: int
    dtype: torch.dtype
    spec: AttentionSpec


class Session:
    """What the attention modules of one shadow share: backend and pool while running, a list while probing."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.layers: tuple[LayerCache, ...] = ()
        self.slot_blocks = self.slot_offsets = torch.empty(0)
        self.positions: int | None = None
        self.probed: list[LayerCall] | None = None

    def begin(
        self,
        backend: AttentionBackend,
        layers: tuple[LayerCache, ...],
        slot_blocks: torch.Tensor,
        slot_offsets: torch.Tensor,
        positions: int | None = None,
    ) -> None:
        """Sets what the layers of one forward pass use.

        With `positions` the same pass will be run many times, at positions below that: what depends on a position alone
        is worth a table.
        """
        self.backend, self.layers = backend, layers
        self.slot_blocks, self.slot_offsets, self.positions = slot_blocks, slot_offsets, positions

    def attend(
        self, layer: int, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [T, heads, key_dim], key and value [T, kv_heads, their dim] → [T, heads, value_dim]."""
        backend, cache = self.running_backend, self.layers[layer]
        backend.write(cache, key, value)
        return backend.attend(cache, spec, query, key, value)

    @property
    def running_backend(self) -> AttentionBackend:
        """The backend of the forward pass that is under way."""
        if self.backend is None:
            raise RuntimeError("the shadow model was called outside of the engine")
        return self.backend


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention signature: query [1, heads, T, key_dim], key and value [1, kv_heads, T, dim]; returns
    [1, T, heads, value_dim]."""
    slot: Slot | None = getattr(module, _SLOT, None)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention does; rotary embeddings may have left float32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    spec = AttentionSpec(
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    if slot is None or slot.session.probed is not None:
        return _probe(module, spec, query, key, value, attention_mask, is_causal, kwargs), None
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return slot.session.attend(slot.layer, spec, queries, keys, values)[None], None


def _probe(
    module: nn.Module,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    name = type(module).__name__
    session = _probing.get()
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} brings an attention mask of its own; Flatbed attends causally")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise UnsupportedModelError(f"{name} does not attend causally")
    for argument in _UNSUPPORTED:
        if kwargs.get(argument) is not None:
            raise UnsupportedModelError(f"{name} uses {argument}, which Flatbed's attention does not have")
    assert session.probed is not None
    shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    session.probed.append(LayerCall(module, shape, query.shape[1], key.dtype, spec))
    mixed = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return mixed.transpose(1, 2)


# The session that is probing in this thread.
_probing: ContextVar[Session] = ContextVar("flatbed_probing")


def probe(shadow: nn.Module, forward: Callable[[], object]) -> tuple[Session, list[LayerCall]]:
    """Runs `forward` once with attention that only looks, and gives each attention module its slot.

    Returns the session, and what was seen of each layer in the order of the forward pass. Raises UnsupportedModelError
    for a module that is called more than once, or when no attention was seen at all.
    """
    session = Session()
    calls: list[LayerCall] = []
    session.probed = calls
    _probing.set(session)
    forward()
    if not calls:
        raise UnsupportedModelError(f"{type(shadow).__name__} does not use Transformers' attention interface")
    for layer, call in enumerate(calls):
        if getattr(call.module, _SLOT, None) is not None:
            raise UnsupportedModelError(f"{type(call.module).__name__} attends more than once in a forward pass")
        call.module.__dict__[_SLOT] = Slot(layer, session)
    session.probed = None
    return session, calls


@contextmanager
def without_attention() -> Iterator[None]:
    """Attention of a shadow that has not been probed yet only looks, and gives each token its own value."""
    session = Session()
    session.probed = []
    token = _probing.set(session)
    try:
        yield
    finally:
        _probing.reset(token)


def slot_of(module: nn.Module) -> int | None:
    """The layer that an attention module of a shadow was given, or None."""
    slot: Slot | None = getattr(module, _SLOT, None)
    return None if slot is None else slot.layer


AttentionInterface.register(NAME, attention)
