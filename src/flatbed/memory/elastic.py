"""CUDA memory that is taken as it is needed, under addresses that never change: the driver's virtual memory calls.

Addresses for the whole capacity are reserved once; memory comes and goes in chunks underneath them::

      address      base          +32 MiB       +64 MiB       +96 MiB                          base + reserved
      reserved     ├─────────────┬─────────────┬─────────────┬──── ─ ─ ─ ─ ─ ─ ─ ────┬──────────────┤
                   │   chunk 0   │   chunk 1   │   chunk 2   │    addresses only     │ the last may │
      committed    ├─────────────────────────────────────────┤                       │  be smaller  │
      live blocks  ████████████████████████████████████

      grow     cuMemCreate ─▶ cuMemMap ─▶ cuMemSetAccess, chunk by chunk upwards; then zeros, on the current stream
      shrink   wait for the device, then from the top down: cuMemUnmap ─▶ cuMemRelease
      end      cuMemAddressFree, when the last tensor over the range is gone

What points into the range (tensors, tensor maps, captured CUDA graphs) stays valid while chunks go and come back.
Touching an address without memory is an error on the device, so nothing may run over blocks that `grow` was not asked
for.

Measured on an H200: reserving 120 GiB takes 26 us; mapping a chunk 35 to 60 us, whatever its size, without waiting for
running kernels; unmapping one 33 to 98 us.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flatbed.memory.capacity import round_up
from flatbed.memory.pool import Backing

# Committed memory follows the blocks in steps of this size, so less than one chunk is taken in vain, however large the
# pool is: little beside the 400 MiB that design section 7 allows over 1.25 times the live K/V, which graphs and
# activations need more. Smaller would cost time: a chunk takes the CPU about 50 us whatever its size. For an 8B model
# (147 kB of K/V a token) a chunk lasts 228 tokens, so that is 0.2 us a token, 0.6 % of a long prefill.
CHUNK = 32 << 20

# What is left of the device for the forward pass when PyTorch's cache had to be emptied for a chunk. The cache is where
# the steps' activations come from: were the pool to take all of it, the next step would fail instead of a request wait.
ROOM_FOR_STEPS = 256 << 20


def load_driver() -> Any:
    """The module with the driver's functions. Raises ImportError where cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:  # its name in older versions
        from cuda import cuda as driver
    return driver


def availability(device: torch.device | None = None, driver: Any = None) -> tuple[bool, str]:
    """Whether memory of `device` (default: the current one) can be mapped chunk by chunk, and why (not)."""
    if not torch.cuda.is_available():
        return False, "no CUDA device that torch can use"
    try:
        driver = driver or load_driver()
    except ImportError as error:
        return False, f"cuda-bindings cannot be imported ({error})"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    try:
        _call(driver, "cuInit", 0)
        supported = _call(driver, "cuDeviceGetAttribute", attribute, _call(driver, "cuDeviceGet", _index(device)))
    except (RuntimeError, MemoryError) as error:  # RuntimeError also where the driver's library cannot be loaded
        return False, f"the driver cannot be used ({error})"
    if not supported:
        return False, "the driver does not map memory for this device"
    return True, "addresses reserved, memory mapped chunk by chunk through cuda-bindings"


class ElasticBacking(Backing):
    """Addresses for the whole capacity, memory by chunks.

    `buffer` is empty until the first chunk is there (PyTorch asks the driver what lies at an address), and from then on
    the same tensor for good, whatever is mapped.

    New chunks are filled with zeros: fresh memory of the driver is not promised to be clean. That is work on the
    *current stream* (about 10 us of the GPU for each chunk): steps over new blocks belong on that stream or after it.

    Args:
        capacity_bytes: rounded up to the driver's granularity (2 MiB on an H200).
        device: a CUDA device.
        driver: the module of the driver's functions; None loads it.

    Raises ImportError without cuda-bindings, OverflowError for more addresses than there are, and RuntimeError with the
    driver's name of the error for whatever else goes wrong there.
    """

    stable: ClassVar[bool] = True

    def __init__(self, capacity_bytes: int, device: torch.device, driver: Any = None) -> None:
        self._device = torch.device(device.type, _index(device))
        self._synchronize = functools.partial(torch.cuda.synchronize, self._device)
        self._synchronize()  # PyTorch makes the context, should this be the first that the process wants of the device
        driver = driver or load_driver()
        _call(driver, "cuInit", 0)
        self._range: _Range | None = _Range(driver, _index(device), capacity_bytes, CHUNK, self._synchronize)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._unreachable = 0  # bytes in PyTorch's cache that emptying it did not free the last time
        self.reserved = self._range.reserved
        self.committed = 0

    @property
    def buffer(self) -> torch.Tensor:
        return self._bytes

    def grow(self, nbytes: int) -> bool:
        have = self.committed
        if nbytes <= have:
            return True
        span = self._open_range()
        if nbytes > span.reserved:
            raise ValueError(f"{nbytes} bytes asked for, {span.reserved} reserved")
        try:
            span.extend(nbytes)
        except MemoryError:
            if not self._make_room(span.rounded(nbytes) - have):
                return False
            try:
                span.extend(nbytes)
            except MemoryError:
                return False
        self.committed = span.mapped
        # Outside of inference mode: a tensor that is made there could never be written to elsewhere.
        with torch.inference_mode(False):
            if not self._bytes.numel():
                self._bytes = _wrap(span, self._device)
            self._bytes[have : self.committed].zero_()
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Empties PyTorch's cache if that can free `nbytes` and leave ROOM_FOR_STEPS. True when so much is free now."""
        needed = nbytes + ROOM_FOR_STEPS
        cached = self._cached()
        self._unreachable = min(self._unreachable, cached)
        if self._free() + cached - self._unreachable < needed:
            return False
        torch.cuda.empty_cache()
        self._unreachable = self._cached()
        return self._free() >= needed

    def _cached(self) -> int:
        return torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def shrink(self, nbytes: int) -> None:
        span = self._open_range()
        if span.rounded(nbytes) >= self.committed:
            return
        self._synchronize()  # work under way may still use what goes
        try:
            span.cut(nbytes)
        finally:
            self.committed = span.mapped

    def close(self) -> None:
        if self._range is not None:
            self.shrink(0)
            # The addresses go with the last tensor over them: stale views then fail, rather than meet other data.
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._range = None

    def _open_range(self) -> _Range:
        if self._range is None:
            raise RuntimeError("this memory was closed")
        return self._range


@dataclass(frozen=True)
class _Chunk:
    """Memory that is mapped: address and size in bytes, and the driver's handle."""

    address: int
    size: int
    handle: Any


class _Range:
    """Reserved addresses and the chunks mapped from their beginning, without gaps. Talks to the driver, not to PyTorch.

    A tensor over it keeps it alive; with the last reference everything goes back to the driver.
    """

    def __init__(self, driver: Any, device: int, nbytes: int, chunk: int, synchronize: Callable[[], object]) -> None:
        self._driver = driver
        on_device = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = on_device, device
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = on_device, device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(_call(driver, "cuMemGetAllocationGranularity", self._kind, minimum))
        self._chunk = round_up(chunk, granularity)
        self.reserved = round_up(max(nbytes, 1), granularity)
        try:
            self.address = int(_call(driver, "cuMemAddressReserve", self.reserved, 0, 0, 0))
        except (RuntimeError, MemoryError) as error:
            raise OverflowError(f"{self.reserved} bytes of addresses cannot be reserved: {error}") from error
        self.mapped = 0
        self._chunks: list[_Chunk] = []
        give_back = weakref.finalize(self, _give_back, driver, self.address, self.reserved, self._chunks, synchronize)
        give_back.atexit = False  # the end of the process frees everything, and by then CUDA may be gone

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)  # not read-only
        return {"version": 3, "typestr": "|u1", "shape": (self.reserved,), "strides": None, "data": data}

    def rounded(self, nbytes: int) -> int:
        """What is mapped when `nbytes` are needed."""
        return min(round_up(nbytes, self._chunk), self.reserved)

    def extend(self, nbytes: int) -> None:
        """Maps further chunks until `nbytes` are there. Raises MemoryError, and maps none, when not all can be had."""
        before = self.mapped
        try:
            while self.mapped < nbytes:
                self._add_chunk(min(self._chunk, self.reserved - self.mapped))
        except BaseException:
            self.cut(before)  # nothing has used them yet
            raise

    def _add_chunk(self, size: int) -> None:
        driver, address = self._driver, self.address + self.mapped
        handle = _call(driver, "cuMemCreate", size, self._kind, 0)
        try:
            _call(driver, "cuMemMap", address, size, 0, handle, 0)
            try:
                _call(driver, "cuMemSetAccess", address, size, [self._access], 1)
            except BaseException:
                _call(driver, "cuMemUnmap", address, size)
                raise
        except BaseException:
            _call(driver, "cuMemRelease", handle)
            raise
        self._chunks.append(_Chunk(address, size, handle))
        self.mapped += size

    def cut(self, nbytes: int) -> None:
        """Unmaps the chunks that begin at or beyond `nbytes`. Nothing on the device may be using them."""
        try:
            _unmap(self._driver, self._chunks, self.address + nbytes)
        finally:
            self.mapped = sum(chunk.size for chunk in self._chunks)


def _unmap(driver: Any, chunks: list[_Chunk], down_to: int) -> None:
    """Gives back chunks from the top, until none begins at or beyond the address `down_to`."""
    while chunks and chunks[-1].address >= down_to:
        chunk = chunks[-1]
        _call(driver, "cuMemUnmap", chunk.address, chunk.size)
        chunks.pop()
        _call(driver, "cuMemRelease", chunk.handle)


def _give_back(
    driver: Any, address: int, reserved: int, chunks: list[_Chunk], synchronize: Callable[[], object]
) -> None:
    """The end of a range."""
    if chunks:
        synchronize()
        _unmap(driver, chunks, address)
    _call(driver, "cuMemAddressFree", address, reserved)


def _wrap(span: _Range, device: torch.device) -> torch.Tensor:
    """uint8 over the whole range, of which at least the first chunk must be mapped."""
    tensor = torch.as_tensor(span, device=device)
    if tensor.data_ptr() != span.address:
        raise RuntimeError(f"torch.as_tensor copied what lies on {device} instead of wrapping it")
    return tensor


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Calls the driver and returns what it gives beside the result code.

    Raises MemoryError when the device has no memory left, RuntimeError with the driver's name of any other error.
    """
    result, *values = getattr(driver, name)(*arguments)
    if result == driver.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    kind = MemoryError if result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
    raise kind(f"{name} gave {result.name}")


def _index(device: torch.device | None) -> int:
    if device is None or device.index is None:
        return torch.cuda.current_device()
    return device.index
