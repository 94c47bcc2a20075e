"""Elastic memory without a GPU: the order of the driver's calls, running out of memory, and what is left behind.

The driver is a fake that is stricter than the real one: it refuses what the real one only documents as wrong, and
knows what was not given back. Its sizes are tiny (granularity 64 bytes, chunks of 256).
"""

from __future__ import annotations

import enum
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatbed.memory import elastic, select
from flatbed.memory.elastic import ElasticBacking, availability
from flatbed.memory.growing import GrowingBacking

GRANULARITY, CHUNK, ROOM = 64, 256, 128
CPU = torch.device("cpu", 0)  # stands for the GPU
GARBAGE = 0xAB


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NOT_SUPPORTED = 801


OK, INVALID, FULL = Result.CUDA_SUCCESS, Result.CUDA_ERROR_INVALID_VALUE, Result.CUDA_ERROR_OUT_OF_MEMORY


class FakeDriver:
    """The driver's functions that Flatbed calls, over `memory` bytes of a device, and PyTorch's cache beside them.

    Attributes:
        calls: (name, arguments) of every call, and of what the tests' stand-ins for PyTorch did.
        broken: names of functions and the result that they give instead of working.
        cached: bytes in PyTorch's cache; `stuck` of them stay when it is emptied.
    """

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="VMM")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")

    def __init__(self, memory: int = 1 << 20) -> None:
        self.memory = memory
        self.cached = self.stuck = 0
        self.supported = 1
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken: dict[str, Result] = {}
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # size by handle
        self.mapped: dict[int, tuple[int, int]] = {}  # (size, handle) by address
        self.accessible: set[int] = set()
        self.content: dict[int, torch.Tensor] = {}
        self.in_use: set[int] = set()  # what work under way may be using
        self._initialized = False
        self._next = 0

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    @property
    def free(self) -> int:
        return self.memory - self.cached - sum(self.handles.values())

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def nothing_left(self) -> bool:
        return not (self.reserved or self.handles or self.mapped or self.accessible)

    def use(self) -> None:
        """Work over everything that is mapped gets under way."""
        self.in_use = set(self.accessible)

    def _begin(self, name: str, *arguments: Any) -> Result:
        self.calls.append((name, arguments))
        if not self._initialized and name != "cuInit":
            return Result.CUDA_ERROR_NOT_INITIALIZED
        return self.broken.get(name, OK)

    def cuInit(self, flags: int) -> tuple[Result]:
        result = self._begin("cuInit", flags)
        self._initialized = result is OK
        return (result,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int | None]:
        result = self._begin("cuDeviceGet", ordinal)
        return result, None if result else 100 + ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Result, int | None]:
        result = self._begin("cuDeviceGetAttribute", attribute, device)
        return (INVALID, None) if result or device < 100 or attribute != "VMM" else (result, self.supported)

    def cuMemGetAllocationGranularity(self, prop: Any, option: str) -> tuple[Result, int | None]:
        result = self._begin("cuMemGetAllocationGranularity", option)
        return (result or INVALID, None) if result or prop.type != "pinned" else (OK, GRANULARITY)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Result, int | None]:
        result = self._begin("cuMemAddressReserve", size)
        if result or size % GRANULARITY or (alignment, address, flags) != (0, 0, 0):
            return result or INVALID, None
        self._next += 1
        base = self._next << 40
        self.reserved[base] = size
        self.content[base] = torch.full((size,), GARBAGE, dtype=torch.uint8)
        return OK, base

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Result]:
        result = self._begin("cuMemAddressFree", address, size)
        if result or self.reserved.get(address) != size or any(a >> 40 == address >> 40 for a in self.mapped):
            return (result or INVALID,)
        del self.reserved[address]
        return (OK,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Result, int | None]:
        result = self._begin("cuMemCreate", size)
        right = (prop.type, prop.location.type, prop.location.id, flags) == ("pinned", "device", 0, 0)
        if result or size % GRANULARITY or not size or not right:
            return result or INVALID, None
        if size > self.free:
            return FULL, None
        self._next += 1
        self.handles[self._next] = size
        return OK, self._next

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Result]:
        result = self._begin("cuMemMap", address, size)
        base = address >> 40 << 40
        inside = address + size <= base + self.reserved.get(base, 0)
        overlaps = any(a < address + size and address < a + s for a, (s, _) in self.mapped.items())
        if result or not inside or overlaps or offset or flags or self.handles.get(handle) != size:
            return (result or INVALID,)
        self.mapped[address] = (size, handle)
        self.content[base][address - base : address - base + size] = GARBAGE
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Result]:
        result = self._begin("cuMemSetAccess", address, size)
        right = [(a.location.type, a.location.id, a.flags) for a in access] == [("device", 0, "read and write")]
        if result or not right or count != 1 or self.mapped.get(address, (0, 0))[0] != size:
            return (result or INVALID,)
        self.accessible.add(address)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Result]:
        result = self._begin("cuMemUnmap", address, size)
        if result or self.mapped.get(address, (0, 0))[0] != size:
            return (result or INVALID,)
        assert address not in self.in_use, "unmapped while the device may use it"
        del self.mapped[address]
        self.accessible.discard(address)
        return (OK,)

    def cuMemRelease(self, handle: int) -> tuple[Result]:
        result = self._begin("cuMemRelease", handle)
        if result or handle not in self.handles or any(h == handle for _, h in self.mapped.values()):
            return (result or INVALID,)
        del self.handles[handle]
        return (OK,)

    # ---- what PyTorch does ------------------------------------------------------------------------------------------

    def synchronize(self, device: torch.device) -> None:
        assert device == CPU
        self.calls.append(("synchronize", ()))
        self.in_use.clear()

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", ()))
        self.cached = min(self.cached, self.stuck)

    def wrap(self, span: Any, device: torch.device) -> torch.Tensor:
        interface = span.__cuda_array_interface__
        (size,) = interface["shape"]
        address, read_only = interface["data"]
        assert (interface["typestr"], interface["strides"], read_only) == ("|u1", None, False)
        assert address in self.accessible, "PyTorch asks the driver about an address that nothing is mapped to"
        assert self.reserved[address] == size
        self.calls.append(("wrap", ()))
        tensor = self.content[address]
        tensor.owner = span  # as the real tensor does, it keeps its range alive
        return tensor


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(elastic, "CHUNK", CHUNK)
    monkeypatch.setattr(elastic, "ROOM_FOR_STEPS", ROOM)
    monkeypatch.setattr(elastic, "_wrap", fake.wrap)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free, fake.memory))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: fake.cached + 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    return fake


@pytest.fixture
def make(driver: FakeDriver) -> Callable[[int], ElasticBacking]:
    return lambda capacity: ElasticBacking(capacity, CPU, driver)


Make = Callable[[int], ElasticBacking]


def after(driver: FakeDriver, action: Callable[[], object]) -> list[str]:
    """Names of the calls that an action makes."""
    before = len(driver.calls)
    action()
    return driver.names()[before:]


# ---- growing and shrinking -------------------------------------------------------------------------------------------


def test_reserving_takes_no_memory(driver: FakeDriver, make: Make) -> None:
    backing = make(1000)
    assert (backing.reserved, backing.committed) == (1024, 0)  # up to the granularity
    assert driver.free == driver.memory
    assert backing.buffer.numel() == 0
    assert "cuMemCreate" not in driver.names()
    assert driver.names().index("synchronize") < driver.names().index("cuInit"), "PyTorch makes the context"


def test_a_chunk_is_created_mapped_and_opened_in_this_order(driver: FakeDriver, make: Make) -> None:
    backing = make(1000)
    chunk = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    assert after(driver, lambda: backing.grow(1)) == [*chunk, "wrap"]
    assert backing.committed == CHUNK
    assert after(driver, lambda: backing.grow(CHUNK)) == []
    assert after(driver, lambda: backing.grow(3 * CHUNK)) == chunk * 2  # the tensor is there already
    assert backing.committed == 3 * CHUNK
    assert driver.accessible == set(driver.mapped)


def test_the_last_chunk_ends_with_the_reservation(driver: FakeDriver, make: Make) -> None:
    backing = make(2 * CHUNK + GRANULARITY + 1)
    assert backing.grow(backing.reserved)
    assert backing.committed == backing.reserved == 2 * CHUNK + 2 * GRANULARITY
    assert [size for size, _ in driver.mapped.values()] == [CHUNK, CHUNK, 2 * GRANULARITY]
    backing.shrink(2 * CHUNK)
    assert backing.committed == 2 * CHUNK
    assert backing.grow(2 * CHUNK + 1)
    assert backing.committed == backing.reserved


def test_a_capacity_below_one_chunk(driver: FakeDriver, make: Make) -> None:
    backing = make(10)
    assert backing.grow(10)
    assert backing.committed == backing.reserved == GRANULARITY


def test_chunks_follow_a_coarser_granularity(driver: FakeDriver, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "CHUNK", GRANULARITY + 1)
    backing = make(CHUNK)
    assert backing.grow(1)
    assert backing.committed == 2 * GRANULARITY


def test_new_memory_is_zero_and_the_rest_keeps_its_content(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(1)
    tensor = backing.buffer
    assert not tensor[:CHUNK].any()
    assert (tensor[CHUNK:] == GARBAGE).all()  # nothing is done to what is not there
    tensor[:CHUNK] = 7
    backing.grow(2 * CHUNK)
    assert backing.buffer is tensor
    assert (tensor[:CHUNK] == 7).all()
    assert not tensor[CHUNK : 2 * CHUNK].any()
    tensor[CHUNK : 2 * CHUNK] = 8
    backing.shrink(CHUNK)
    backing.grow(2 * CHUNK)
    assert backing.buffer is tensor
    assert (tensor[:CHUNK] == 7).all()
    assert not tensor[CHUNK : 2 * CHUNK].any()


def test_shrinking_waits_for_the_device_and_unmaps_before_it_releases(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(3 * CHUNK)
    driver.use()
    assert after(driver, lambda: backing.shrink(CHUNK + 1)) == ["synchronize", "cuMemUnmap", "cuMemRelease"]
    assert backing.committed == 2 * CHUNK
    assert after(driver, lambda: backing.shrink(0)) == ["synchronize", *["cuMemUnmap", "cuMemRelease"] * 2]
    assert (backing.committed, driver.free) == (0, driver.memory)
    assert list(driver.reserved.values()) == [4 * CHUNK]


@pytest.mark.parametrize("nbytes", [2 * CHUNK, 2 * CHUNK - 1, CHUNK + 1, 3 * CHUNK])
def test_shrinking_that_frees_no_chunk_does_not_wait(driver: FakeDriver, make: Make, nbytes: int) -> None:
    backing = make(4 * CHUNK)
    backing.grow(2 * CHUNK)
    assert after(driver, lambda: backing.shrink(nbytes)) == []
    assert backing.committed == 2 * CHUNK


def test_the_buffer_can_be_written_wherever_it_was_made(driver: FakeDriver, make: Make) -> None:
    backing = make(2 * CHUNK)
    with torch.inference_mode():
        backing.grow(1)
        backing.grow(2 * CHUNK)
    assert not backing.buffer.is_inference()
    backing.buffer[:10] = 1


def test_more_than_the_reservation_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="257 bytes asked for, 256 reserved"):
        make(CHUNK).grow(CHUNK + 1)


# ---- out of memory ---------------------------------------------------------------------------------------------------


def test_out_of_memory_is_false_and_leaves_everything_as_it_was(driver: FakeDriver, make: Make) -> None:
    backing = make(8 * CHUNK)
    backing.grow(CHUNK)
    backing.buffer[:CHUNK] = 7
    driver.memory = 3 * CHUNK + 10
    assert not backing.grow(6 * CHUNK)  # two more can be had, five are needed
    assert backing.committed == CHUNK
    assert len(driver.handles) == len(driver.mapped) == len(driver.accessible) == 1
    assert (backing.buffer[:CHUNK] == 7).all()
    assert backing.grow(3 * CHUNK)
    assert not backing.grow(4 * CHUNK)
    driver.memory = 4 * CHUNK
    assert backing.grow(4 * CHUNK)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_out_of_memory_in_any_call_leaves_nothing_half_mapped(driver: FakeDriver, make: Make, name: str) -> None:
    backing = make(8 * CHUNK)
    driver.broken[name] = FULL
    assert not backing.grow(CHUNK)
    assert (driver.handles, driver.mapped, driver.accessible) == ({}, {}, set())
    driver.broken.clear()
    assert backing.grow(CHUNK)


def test_the_cache_of_pytorch_is_emptied_once(driver: FakeDriver, make: Make) -> None:
    backing = make(8 * CHUNK)
    driver.memory, driver.cached = 4 * CHUNK, 3 * CHUNK
    assert "empty_cache" not in after(driver, lambda: backing.grow(CHUNK))
    assert after(driver, lambda: backing.grow(3 * CHUNK)).count("empty_cache") == 1
    assert (backing.committed, driver.cached) == (3 * CHUNK, 0)


def test_some_of_the_cache_is_left_to_the_steps(driver: FakeDriver, make: Make) -> None:
    backing = make(8 * CHUNK)
    driver.memory, driver.cached = CHUNK + ROOM - 1, CHUNK + ROOM - 1
    assert after(driver, lambda: backing.grow(1)) == ["cuMemCreate"]
    assert (backing.committed, driver.cached) == (0, CHUNK + ROOM - 1)
    driver.memory = driver.cached = CHUNK + ROOM
    assert backing.grow(1)


def test_the_cache_is_not_emptied_again_where_that_freed_nothing(driver: FakeDriver, make: Make) -> None:
    backing = make(8 * CHUNK)
    driver.memory = driver.cached = driver.stuck = 2 * CHUNK + ROOM
    assert after(driver, lambda: backing.grow(1)) == ["cuMemCreate", "empty_cache"]
    assert after(driver, lambda: backing.grow(1)) == ["cuMemCreate"]
    driver.memory += CHUNK + ROOM
    driver.cached += CHUNK + ROOM  # what steps put there since, on top of what is stuck
    assert backing.grow(1)
    assert driver.names().count("empty_cache") == 2


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuInit", "cuMemGetAllocationGranularity"])
def test_errors_while_reserving_are_named(driver: FakeDriver, make: Make, name: str) -> None:
    driver.broken[name] = Result.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RuntimeError, match=f"{name} gave CUDA_ERROR_NOT_SUPPORTED"):
        make(CHUNK)
    assert driver.nothing_left()


@pytest.mark.parametrize("result", [INVALID, FULL])
def test_more_addresses_than_there_are(driver: FakeDriver, make: Make, result: Result) -> None:
    driver.broken["cuMemAddressReserve"] = result
    with pytest.raises(OverflowError, match=f"256 bytes of addresses .* cuMemAddressReserve gave {result.name}"):
        make(CHUNK)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_errors_while_growing_are_named_and_leave_nothing(driver: FakeDriver, make: Make, name: str) -> None:
    backing = make(4 * CHUNK)
    backing.grow(CHUNK)
    driver.broken[name] = Result.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RuntimeError, match=f"{name} gave CUDA_ERROR_NOT_SUPPORTED"):
        backing.grow(2 * CHUNK)
    assert backing.committed == CHUNK
    assert len(driver.handles) == len(driver.mapped) == 1
    driver.broken.clear()
    backing.close()
    driver.content.clear()
    gc.collect()
    assert driver.nothing_left()


def test_an_error_while_shrinking_is_named_and_the_books_stay_right(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(3 * CHUNK)
    driver.broken["cuMemUnmap"] = INVALID
    with pytest.raises(RuntimeError, match="cuMemUnmap gave CUDA_ERROR_INVALID_VALUE"):
        backing.shrink(0)
    assert backing.committed == sum(driver.handles.values()) == 3 * CHUNK
    driver.broken.clear()
    backing.shrink(0)
    assert (backing.committed, driver.free) == (0, driver.memory)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_gives_everything_back(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(3 * CHUNK)
    driver.use()
    driver.content.clear()  # the fake's own tensors stand for nobody's
    names = after(driver, backing.close)
    assert names == ["synchronize", *["cuMemUnmap", "cuMemRelease"] * 3, "cuMemAddressFree"]
    assert driver.nothing_left()
    assert (backing.committed, backing.buffer.numel()) == (0, 0)
    assert after(driver, backing.close) == []
    with pytest.raises(RuntimeError, match="closed"):
        backing.grow(1)


def test_addresses_outlast_close_for_as_long_as_a_tensor_points_there(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(CHUNK)
    held = backing.buffer
    driver.content.clear()
    backing.close()
    assert driver.free == driver.memory
    assert list(driver.reserved) == [held.owner.address]
    del held
    assert driver.nothing_left()


@pytest.mark.parametrize("used", [True, False])
def test_what_is_dropped_without_close_is_given_back_too(driver: FakeDriver, make: Make, used: bool) -> None:
    backing = make(4 * CHUNK)
    if used:
        backing.grow(2 * CHUNK)
        driver.use()
    driver.content.clear()
    del backing
    gc.collect()
    assert driver.nothing_left()


def test_a_tensor_keeps_the_memory_of_a_dropped_backing(driver: FakeDriver, make: Make) -> None:
    backing = make(4 * CHUNK)
    backing.grow(CHUNK)
    held = backing.buffer
    driver.content.clear()
    del backing
    gc.collect()
    assert len(driver.accessible) == 1
    del held
    gc.collect()
    assert driver.nothing_left()


# ---- anything goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(driver: FakeDriver, make: Make, seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randrange(1, 12 * CHUNK)
    backing = make(capacity)
    written = 0  # bytes from the beginning that hold their own number
    numbers = torch.arange(backing.reserved).to(torch.uint8)
    for _ in range(60):
        driver.memory = draw.choice([sum(driver.handles.values()), draw.randrange(20 * CHUNK), 1 << 20])
        driver.cached = draw.choice([0, draw.randrange(4 * CHUNK)])
        driver.stuck = draw.choice([0, driver.cached // 2])
        before, nbytes = backing.committed, draw.randrange(capacity + 1)
        if draw.random() < 0.6:
            if backing.grow(nbytes):
                assert backing.committed == max(before, min(-(-nbytes // CHUNK) * CHUNK, backing.reserved))
                assert not backing.buffer[written : backing.committed].any()
                backing.buffer[written:nbytes] = numbers[written:nbytes]
                written = max(written, nbytes)
            else:
                assert backing.committed == before < nbytes
        else:
            backing.shrink(nbytes)
            assert backing.committed == min(before, -(-nbytes // CHUNK) * CHUNK, backing.reserved)
            written = min(written, backing.committed)
        assert backing.committed == sum(driver.handles.values()) == sum(size for size, _ in driver.mapped.values())
        assert driver.accessible == set(driver.mapped)
        assert torch.equal(backing.buffer[:written], numbers[:written])
        driver.use()
    driver.content.clear()
    backing.close()
    assert driver.nothing_left()


# ---- which backing ---------------------------------------------------------------------------------------------------


def test_available_with_a_driver_that_maps_memory(driver: FakeDriver) -> None:
    ok, reason = availability(driver=driver)
    assert ok
    assert "cuda-bindings" in reason


def test_not_available_and_why(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.supported = 0
    assert availability(driver=driver) == (False, "the driver does not map memory for this device")
    driver.broken["cuInit"] = Result.CUDA_ERROR_NOT_SUPPORTED
    ok, reason = availability(driver=driver)
    assert not ok
    assert "cuInit gave CUDA_ERROR_NOT_SUPPORTED" in reason

    def missing() -> Any:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(elastic, "load_driver", missing)
    assert availability() == (False, "cuda-bindings cannot be imported (No module named 'cuda')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert availability(driver=driver) == (False, "no CUDA device that torch can use")


@pytest.mark.parametrize("available", [True, False])
def test_cuda_gets_elastic_memory_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    made: list[tuple[type, int]] = []
    monkeypatch.setattr(select, "availability", lambda device: (available, ""))
    for kind in (ElasticBacking, GrowingBacking):
        monkeypatch.setattr(select, kind.__name__, lambda capacity, device, kind=kind: made.append((kind, capacity)))
    select.make_backing(1000, torch.device("cuda", 0))
    assert made == [(ElasticBacking if available else GrowingBacking, 1000)]
