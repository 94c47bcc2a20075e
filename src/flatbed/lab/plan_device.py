"""How much memory there is, and what training takes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from flatbed.errors import ConfigError
from flatbed.memory.capacity import Capacity

# Memory of known cards in MiB, as nvidia-smi reports it; torch sees 1-2 % less.
CARDS = {
    "a10g": 23028,
    "a100": 81920,
    "a100-40gb": 40960,
    "a6000": 49140,
    "b200": 183359,
    "gh200": 97871,
    "h100": 81559,
    "h200": 143771,
    "l4": 23034,
    "l40s": 46068,
    "rtx-3090": 24576,
    "rtx-4090": 24564,
    "rtx-5090": 32607,
    "t4": 15360,
    "v100": 32768,
}

# Bytes of optimizer states for a parameter of so many bytes: torch keeps Adam's two in the parameter's own dtype.
OPTIMIZERS: dict[str, Callable[[int], int]] = {
    "adamw": lambda size: 2 * size,
    "adamw-8bit": lambda size: 2,
    "sgd": lambda size: 0,
}

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Device:
    """Where the model is to run.

    Attributes:
        name: as it is told.
        memory: bytes in all.
    """

    name: str
    memory: int


@dataclass(frozen=True)
class Training:
    """What training keeps besides the weights.

    Attributes:
        dtype: of weights and gradients.
        optimizer: one of OPTIMIZERS.
        trained: parameters that are trained.
        gradients, states: bytes.
    """

    dtype: str
    optimizer: str
    trained: int
    gradients: int
    states: int

    @classmethod
    def of(cls, parameters: int, dtype: str, optimizer: str, share: float) -> Training:
        """Training of a `share` of the parameters. Raises ConfigError for a value that makes no sense."""
        if not 0 < share <= 1:
            raise ConfigError(f"the share of trained parameters must be above 0 and at most 1, got {share}")
        if optimizer not in OPTIMIZERS:
            raise ConfigError.unknown("optimizer", optimizer, OPTIMIZERS)
        trained, size = round(parameters * share), itemsize(dtype)
        return cls(dtype, optimizer, trained, trained * size, trained * OPTIMIZERS[optimizer](size))

    @property
    def bytes(self) -> int:
        """Of gradients and states."""
        return self.gradients + self.states


def itemsize(dtype: str) -> int:
    """Bytes of a number of that dtype. Raises ConfigError for an unknown one."""
    if dtype not in ITEMSIZES:
        raise ConfigError.unknown("dtype", dtype, ITEMSIZES)
    return ITEMSIZES[dtype]


def find_device(device: str | None, memory: str | None) -> Device:
    """The device that was named: a card of CARDS, a torch device, or so much memory. Without either, what is here.

    Raises ConfigError when there is no such thing.
    """
    if memory is not None:
        size = Capacity.parse(memory)
        if size.unit != "bytes":
            raise ConfigError(f'--memory is written like "80GiB", got {memory!r}')
        return Device(device or memory, int(size.amount))
    card = None if device is None else known_card(device)
    if card is not None:
        return Device(f"{card.upper()} ({CARDS[card]:,} MiB)", CARDS[card] * 2**20)
    return _present(device)


def known_card(name: str) -> str | None:
    """The card of CARDS that a name means, however it is written: `H100`, `NVIDIA A100-SXM4-40GB`, `RTX 4090`."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    bare = re.sub(r"^(nvidia-)?(geforce-|tesla-)?", "", words)
    model = re.sub(r"-(sxm\d*|pcie|nvl|hbm\d+e?)(?=-|$)", "", bare)
    for candidate in (words, model, f"rtx-{model}", re.sub(r"-\d+gb$", "", model)):
        if candidate in CARDS:
            return candidate
    return None


def _present(device: str | None) -> Device:
    import torch

    from flatbed.memory.select import free_bytes
    from flatbed.models import AUTO, resolve_device

    try:
        found = resolve_device(device or AUTO)
    except ConfigError as error:
        raise ConfigError(f"{error}; or name a card ({', '.join(CARDS)}), or give --memory 80GiB") from error
    if found.type == "cuda":
        return Device(torch.cuda.get_device_name(found), torch.cuda.get_device_properties(found).total_memory)
    return Device("the free memory of this machine", free_bytes(found))
