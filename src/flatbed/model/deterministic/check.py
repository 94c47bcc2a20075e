"""The proof on this machine: the same token gives the same logits, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flatbed.errors import UnsupportedModelError

# Called with ids and positions int64 [1, T] and which logits to return int64 [n]; returns [n, vocabulary].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Batches that a token is put into. The last meets the tiles for many rows on CUDA (see products.py).
_BATCHES = {"cpu": (2, 5, 33), "cuda": (2, 5, 33, 160)}
_PLACES = 3  # of each batch, that are compared
_POSITIONS = 8  # that the tokens stand at; any model has so many


def check_rows(forward: Forward, vocabulary: int, device: torch.device) -> None:
    """Runs the same tokens alone and in batches, and compares their logits bit for bit.

    `forward` runs the model with an attention that only looks at a token's own value (see interface.py). Raises
    UnsupportedModelError where they differ.
    """
    draw = torch.Generator().manual_seed(0)
    most = max(_BATCHES[device.type])
    ids = torch.randint(vocabulary, (1, most), generator=draw).to(device)
    positions = (torch.arange(most, device=device) % _POSITIONS)[None]
    first = torch.zeros(1, dtype=torch.int64, device=device)
    alone: dict[int, torch.Tensor] = {}

    def of(at: int) -> torch.Tensor:
        if at not in alone:
            alone[at] = forward(ids[:, at : at + 1], positions[:, at : at + 1], first)
        return alone[at][0]

    for count in _BATCHES[device.type]:
        places = torch.linspace(0, count - 1, _PLACES, dtype=torch.int64, device=device).unique()
        together = forward(ids[:, :count], positions[:, :count], places)
        for logits, at in zip(together, places.tolist(), strict=True):
            different = int(((logits != of(at)) & ~(logits.isnan() & of(at).isnan())).sum())
            if different:
                raise UnsupportedModelError(
                    f"with deterministic=True: {different} of {len(logits)} logits of the same token are other numbers "
                    f"in a batch of {count} than alone, on {device} with torch {torch.__version__}"
                )
