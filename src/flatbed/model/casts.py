"""Mixed precision: weights that autocast would cast in every product are cast once, before the steps of a call.

::

      a step under autocast      weight float32 ─▶ cast ─▶ product     reads each weight in 4 bytes, writes it in 2,
                                                                       reads it again: in every step
      here                       weight float32 ─▶ cast ──┐            once, when a call begins
                                 step 1 ◀── the cast ─────┤            and each step reads 2 bytes
                                 step 2 ◀─────────────────┘

The products are the same to the bit. The casts lie in memory of their own, whose addresses stay when it is given back
between calls, so that CUDA graphs over them stay valid. Autocast's own cache does the same for a whole forward pass,
but its tensors come and go, and in the replay of a graph they would be those of its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flatbed.memory.capacity import round_up
from flatbed.memory.pool import Backing
from flatbed.model.fusions import Linear, OneDnnLinear

_ALIGNMENT = 256
_PLAIN = (nn.Linear, OneDnnLinear)
_CAST, _SEEN = "_flatbed_cast", "_flatbed_autocast"

MakeBacking = Callable[[int, torch.device], Backing]


class CastLinear(nn.Linear):
    """`nn.Linear` that reads the cast of its weight where autocast is on and there is one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cast = self.__dict__.get(_CAST)
        if cast is None or not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return F.linear(input, *cast)


def inputs_of(module: nn.Linear, autocast: torch.dtype | None) -> Linear:
    """Weight and bias of a product as it would read them now: as they are without autocast, what was cast for this call
    with it (or, where nothing was, as they are)."""
    cast = None if autocast is None else module.__dict__.get(_CAST)
    return Linear(module.weight, module.bias) if cast is None else Linear(*cast)


class _Watched(nn.Linear):
    """Remembers what autocast would cast its weight to, if it is on where the model calls it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        self.__dict__[_SEEN] = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return super().forward(input)


@contextmanager
def watching(shadow: nn.Module) -> Iterator[dict[nn.Linear, torch.dtype]]:
    """While it is open, a forward pass tells which products run under autocast, and in which dtype.

    Yields module → dtype, filled at the end, of plain products whose weights are of another dtype.
    """
    found: dict[nn.Linear, torch.dtype] = {}
    kinds: dict[nn.Linear, type[nn.Linear]] = {}
    for module in shadow.modules():
        if isinstance(module, nn.Linear) and type(module) in _PLAIN and "forward" not in module.__dict__:
            kinds[module] = type(module)
    try:
        for module in kinds:
            module.__class__ = _Watched
        yield found
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
            dtype = module.__dict__.pop(_SEEN, None)
            if dtype is not None and module.weight.is_floating_point() and module.weight.dtype != dtype:
                found[module] = dtype


@dataclass(frozen=True)
class _Place:
    """Where the cast of a module's parameter lies in the memory of all."""

    module: nn.Linear
    name: str
    dtype: torch.dtype
    offset: int

    @property
    def source(self) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self.module, self.name)
        return parameter

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        nbytes = self.source.numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.source.shape)


class Casts:
    """The casts of a shadow's weights.

    Args:
        products: see `watching`. They become `CastLinear`.
        device: of their weights.
        make_backing: the memory for so many bytes.

    Attributes:
        committed: bytes of memory that they take now.
    """

    def __init__(self, products: dict[nn.Linear, torch.dtype], device: torch.device, make_backing: MakeBacking) -> None:
        self._places: list[_Place] = []
        self._used: dict[nn.Linear, list[int | None]] = {}  # which of the places weight and bias have
        self._size = 0
        known: dict[tuple[int, torch.dtype], int] = {}
        for module, dtype in products.items():
            module.__class__ = CastLinear
            self._used[module] = []
            for name in ("weight", "bias"):
                parameter = getattr(module, name)
                if parameter is None:
                    self._used[module].append(None)
                    continue
                key = (id(parameter), dtype)
                if key not in known:  # tied ones share theirs
                    known[key] = len(self._places)
                    self._places.append(_Place(module, name, dtype, self._size))
                    self._size += round_up(parameter.numel() * dtype.itemsize, _ALIGNMENT)
                self._used[module].append(known[key])
        self._backing = make_backing(self._size, device)
        self._address: int | None = None

    @property
    def committed(self) -> int:
        return self._backing.committed

    def refresh(self) -> bool:
        """Casts the weights as they are now. True when what products read has moved: graphs over it are of no use.

        Where the memory cannot be had, autocast casts in every step, as it does without this.
        """
        before = self._address
        if not self._backing.grow(self._size):
            self._forget()
            self._address = None
            return before is not None
        buffer = self._backing.buffer
        self._address = buffer.data_ptr()
        with torch.inference_mode(False), torch.no_grad():
            views = [place.view(buffer) for place in self._places]
            torch._foreach_copy_(views, [place.source for place in self._places])
        for module, used in self._used.items():
            module.__dict__[_CAST] = [None if at is None else views[at] for at in used]
        return before != self._address

    def release(self) -> None:
        """Gives the memory back, until the next `refresh`. Nothing may run meanwhile."""
        self._forget()
        self._backing.shrink(0)

    def close(self) -> None:
        self._forget()
        self._backing.close()

    def _forget(self) -> None:
        for module in self._used:
            module.__dict__.pop(_CAST, None)
