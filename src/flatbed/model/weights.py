"""Noticing that the user's weights changed: moved, replaced, updated in place, or written behind PyTorch's back."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import nn


class Identity:
    """What the model's parameters and modules were when the shadow was made, to notice when it no longer fits.

    In-place updates change nothing here (`changed_in_place` tells them); replaced modules, parameters, dtypes or
    devices do, and so do hooks (a module that somebody hooked into cannot be part of a fusion) and the switches of
    PEFT's adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = self._read_structure()
        self._versions = self._read_versions()

    def _read_structure(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for module in self._model.modules():
            forward = id(module.__dict__.get("forward"))
            hooks = (len(module._forward_hooks), *module._forward_hooks, *module._forward_pre_hooks)
            found.append((forward, *hooks, *map(id, module._modules.values()), *_adapter_state(module)))
            if type(module).__name__.endswith("RotaryEmbedding"):  # a graph holds a table of what it computes
                found += [(0 if b.is_inference() else b._version,) for b in module._buffers.values() if b is not None]
        for tensor in _tensors(self._model):
            found.append((id(tensor), tensor.data_ptr(), hash(tensor.dtype)))
        return found

    def _read_versions(self) -> list[int]:
        # Tensors made under inference_mode keep no version: they count as never changed here, and the checksum of
        # the weights finds what was written to them.
        return [0 if tensor.is_inference() else tensor._version for tensor in _tensors(self._model)]

    def moved(self) -> bool:
        """True when a module or parameter was replaced, moved, converted or hooked into since this was last asked."""
        before, self._structure = self._structure, self._read_structure()
        return before != self._structure

    def changed_in_place(self) -> bool:
        """True when PyTorch saw an in-place update since this was last asked. Writes through `.data` are not seen."""
        before, self._versions = self._versions, self._read_versions()
        return before != self._versions


def _adapter_state(module: nn.Module) -> tuple[object, ...]:
    """What decides how a layer of PEFT computes, besides its tensors: which adapters are on, merged, and how strong."""
    state = vars(module)
    if "merged_adapters" not in state:
        return ()
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return tuple(repr(state.get(name)) for name in names)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer once, in a fixed order. A walk over the dictionaries: `parameters()` costs more."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
    return list(found.values())


# A tensor is read as rows of this many 8-byte words: a prime number, so that rows of a weight matrix are no multiple
# of it.
_COLUMNS = 4093
# How many of them at a time: few enough that a cache still holds them when they are read for the second time.
_CPU_ROWS, _DEVICE_ROWS = 32, 512


def checksum(model: nn.Module) -> tuple[int, ...]:
    """A number per parameter and buffer that any change of a few elements changes, also one made through `.data`.

    Each tensor's bits are read as a table of integers, of which every row and every column is summed modulo 2**64, in
    one pass over the memory. Nothing is lost to rounding. A changed word always shows, and so do two words that changed
    places: they differ in their row or in their column. More changes go unseen only if they cancel in both.
    """
    tensors = _tensors(model)
    if not tensors or tensors[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return tuple(_checksum(tensor) for tensor in tensors)
    plain = [
        t for t in tensors if t.is_contiguous() and not (t.nbytes % 8 or t.data_ptr() % 8) and t.device.type == "cuda"
    ]
    together = {id(t) for t in plain}
    return (*_checksum_together(plain), *(_checksum(t) for t in tensors if id(t) not in together))


# 8-byte words that one program of the CUDA kernel reads, and how many at a time.
_PIECE, _PIECE_BLOCK = 1 << 16, 2048


def _checksum_together(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """The same for contiguous CUDA tensors of whole words, in one launch and one copy (see kernels/checksum.py)."""
    from flatbed.kernels.checksum import checksum_kernel

    words = np.array([t.nbytes // 8 for t in tensors], np.int64)
    counts = -(-words // _PIECE)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * _PIECE
    addresses = np.repeat(np.array([t.data_ptr() for t in tensors], np.int64), counts) + 8 * first
    lengths = np.minimum(np.repeat(words, counts) - first, _PIECE)
    device = tensors[0].device
    pieces = torch.from_numpy(np.stack([addresses, lengths, first], axis=1)).to(device)
    out = torch.empty(len(pieces), dtype=torch.int64, device=device)
    checksum_kernel[(len(pieces),)](pieces, out, WORDS=_PIECE, BLOCK=_PIECE_BLOCK, num_warps=8)
    shapes = hash(tuple(tuple(t.shape) for t in tensors))
    return (shapes, hash(out.cpu().numpy().tobytes()))


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    nbytes = flat.numel() * flat.element_size()
    raw = flat.view(torch.uint8)
    if nbytes < 8 * _COLUMNS:  # less than a row
        return hash((tuple(tensor.shape), _bytes(raw)))
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
    values = torch.cat(sums).cpu().numpy().tobytes() + _bytes(raw[nbytes // 8 * 8 :])
    return hash((tuple(tensor.shape), values))


def _bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of uint8 [n]. Of a copy: a storage that NumPy has seen can never be resized again, as FSDP does."""
    return tensor.clone().cpu().numpy().tobytes()
