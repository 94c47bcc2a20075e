"""Engines for tests of the lab, given by their dotted path: `lab_engines.Zeroing`. None of them needs torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from flatbed.lab.engines.base import Adapter, Holding, MemoryResult, MissingEngine, RunResult, Settings
from flatbed.lab.workloads import Workload


class Plain(Adapter):
    """Takes the same time at any capacity. Its options: `sleep` (seconds of a call), `holding`."""

    package = "pytest"

    @classmethod
    def holding(cls, spec: Any) -> Holding:
        return spec.option("holding", "live").replace("_", " ")

    def load(self) -> None:
        print("loading: this must not disturb the answers")

    def construct(self, workload: Workload) -> dict[str, float]:
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        start = time.perf_counter()
        self.work()
        seconds = time.perf_counter() - start
        first, between = ([seconds / 2] * len(workload.requests), [seconds / 4]) if latency else ([], [])
        return RunResult(seconds, workload.tokens, {"generation": seconds}, first, between, preemptions=0)

    def work(self) -> None:
        time.sleep(self.spec.option("sleep", 0.01))

    @property
    def capacity_bytes(self) -> int:
        amount = self.settings.capacity_amount
        assert amount is not None
        return int(amount.amount * (4 if amount.unit == "tokens" else 1))

    def memory(self) -> MemoryResult:
        size = self.capacity_bytes if self.settings.capacity else 4096
        return MemoryResult(capacity_tokens=size // 4, reserved=size, committed=4096, live=1024)

    def facts(self) -> dict[str, Any]:
        return {"dtype": "float32", "pid": os.getpid(), "lab_test": os.environ.get("LAB_TEST")}

    def close(self) -> None:
        pass


class Sharing(Plain):
    """Several settings of it can share a process."""

    shares = True

    def sibling(self, settings: Settings) -> Sharing:
        return type(self)(self.spec, settings, self.setup)


class Dying(Sharing):
    """Dies at a capacity of at least 64 MiB, and its process with it."""

    def work(self) -> None:
        if self.capacity_bytes >= 64 << 20:
            os._exit(7)


class Slowing(Plain):
    """Takes 0.05 s at a capacity of at least 64 MiB, and 1 ms below."""

    def work(self) -> None:
        time.sleep(0.05 if self.capacity_bytes >= 64 << 20 else 0.001)


class Zeroing(Plain):
    """Fills memory of the size of its capacity in every call: what the gate is there to find."""

    def work(self) -> None:
        super().work()
        bytearray(b"\x01") * self.capacity_bytes


class ZeroingAtStart(Plain):
    """The same, once, when it is constructed."""

    def construct(self, workload: Workload) -> dict[str, float]:
        bytearray(b"\x01") * self.capacity_bytes
        return {}


class Troubled(Plain):
    """Gets into trouble at a capacity of at least 64 MiB. Its word says which; `in` says in which step."""

    def _trouble(self, step: str) -> None:
        if self.spec.option("in", "run") != step or self.capacity_bytes < 64 << 20:
            return
        (kind,) = self.spec.words
        if kind == "dies":
            print("the engine's last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exits":
            sys.stderr.write("cannot go on\n")
            os._exit(7)
        if kind == "hangs":
            time.sleep(600)
        if kind == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 100 GiB")
        if kind == "raises":
            raise ValueError("something is wrong\nwith more lines")
        if kind == "missing":
            raise MissingEngine("the engine is not here")

    def load(self) -> None:
        self._trouble("load")

    def construct(self, workload: Workload) -> dict[str, float]:
        self._trouble("construct")
        return {}

    def run(self, workload: Workload, *, latency: bool = False) -> RunResult:
        self._trouble("run")
        result = super().run(workload, latency=latency)
        if self.spec.words == ("silent",) and self.capacity_bytes >= 64 << 20:
            result.tokens = 0
        return result


class Absent(Plain):
    """An engine that is not installed."""

    package = "no-such-package-anywhere"
