"""Functions of single numbers on the CPU, such that a number's result does not depend on where it stands.

PyTorch's loops on the CPU work on whole vectors and finish with what is left of one, number by number, in other code:
SiLU of the last numbers of a tensor differs in the last bit from SiLU of the same numbers elsewhere. Several threads
divide a tensor anywhere, so there can be such a rest in the middle too. Here numbers are padded to whole vectors, and
given to PyTorch in pieces that it does not divide::

      numbers of all rows, one behind the other          padding
      ├──────── piece ────────┼──────── piece ────────┼─────▒▒▒┤
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# A multiple of what any processor's loops take at a time: two vectors of 2,048 bits of the smallest type (two bytes).
_WHOLE = 256
# Up to so many numbers no loop of PyTorch's is divided among threads.
_PIECE = 2048


def tail_free(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """function(*tensors) of equal shape, in which every number's result depends on the numbers at its place alone.

    `function` works on numbers one by one: tensors [n] → tensor [n].
    """
    shape = tensors[0].shape
    count = tensors[0].numel()
    flat = [_whole(tensor.reshape(-1)) for tensor in tensors]
    if torch.get_num_threads() == 1 or len(flat[0]) <= _PIECE:
        done = function(*flat)
    else:
        done = torch.cat([function(*pieces) for pieces in zip(*(one.split(_PIECE) for one in flat), strict=True)])
    return done[:count].view(shape)


def _whole(flat: torch.Tensor) -> torch.Tensor:
    """flat [n], padded with zeros to a multiple of _WHOLE."""
    rest = -len(flat) % _WHOLE
    return torch.nn.functional.pad(flat, (0, rest)) if rest else flat
