"""One engine, driven by commands: `Session` in this process, `main` in another.

A process gets JSON objects, one a line, and answers each with one, on two pipes of its own; what the engine prints goes
to its standard output, the log, and harms nothing::

    measure.py ── {"do": "run", "call": 3} ──▶ worker ── adapter.run(...)
               ◀── {"seconds": ..., ...} ─────

The process may be any Python that has torch and that one engine; of Flatbed it needs the source on its path, and none
of the packages that the command line uses. An answer with `error` says what went wrong; the next command is served all
the same. The process ends when the commands do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatbed import __version__
from flatbed.errors import ConfigError
from flatbed.lab.engines.base import (
    Adapter,
    EngineSpec,
    MemoryResult,
    MissingEngine,
    NotSupported,
    RunResult,
    Settings,
    Setup,
    adapter_class,
)
from flatbed.lab.workloads import Workload, from_json

# What went wrong, in the words of the records.
OUT_OF_MEMORY = "out of memory"
MISSING = "missing"
NOT_SUPPORTED = "not supported"
REFUSED = "refused"
FAILED = "failed"
INCOMPLETE = "incomplete"

_PACKAGES = ("flatbed", "torch", "transformers", "triton", "vllm", "numpy")
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Session:
    """An engine and the workload it runs now. Each command is a method; `do` runs one and never raises.

    A command may name other `settings` than those it was opened with, for an engine whose settings can share a process:
    each has an adapter of its own then, all of them on the weights that were loaded once.
    """

    def __init__(
        self, spec: EngineSpec, settings: Settings, setup: Setup, *, loaded: tuple[Any, Any] | None = None
    ) -> None:
        """`loaded`: a model and its tokenizer to use instead of loading one."""
        self._spec, self._settings, self._setup, self._loaded = spec, settings, setup, loaded
        self._adapters: dict[Settings, Adapter] = {}
        self._built: set[Settings] = set()  # those whose engine is there now
        self._workload: Workload | None = None
        self._weights: int | None = None

    def do(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a command; an answer with `error` (`kind` and `message`) says what went wrong."""
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self.hello,
            "load": self.load,
            "construct": self.construct,
            "warm_up": self.warm_up,
            "run": self.run,
            "trace": self.trace,
            "close": self.close,
        }
        arguments = {name: value for name, value in command.items() if name not in ("do", "settings")}
        try:
            if "settings" in command:
                self._settings = Settings(**command["settings"])
            return commands[command["do"]](**arguments)
        except Exception as error:  # an engine raises what it likes, and every failure is a result
            traceback.print_exc()
            return {"error": {"kind": _kind(error), "message": _message(error)}}

    def hello(self) -> dict[str, Any]:
        """Makes the adapter and imports its engine. Answers with the versions here, and the seconds of the import.

        Fails when the engine is missing or of another version.
        """
        found = adapter_class(self._spec)
        versions = {"python": platform.python_version(), **_versions((*_PACKAGES, found.package))}
        _check_version(self._spec, found.package, versions.get(found.package))
        start = time.perf_counter()
        found.import_packages()
        seconds = time.perf_counter() - start
        self._adapters[self._settings] = found(self._spec, self._settings, self._setup)
        return {"versions": versions, "seconds": seconds}

    def load(self) -> dict[str, Any]:
        """Loads the weights. Answers with the seconds, the bytes they take, and those the device has."""
        adapter = self._here
        if self._loaded is not None:
            adapter.model, adapter.tokenizer = self._loaded  # type: ignore[attr-defined]
        seconds = _timed(adapter.load)
        self._weights = _taken(self._setup.device)
        return {"seconds": seconds, "weights": self._weights, "device_bytes": _device_bytes(), "gpu": _gpu()}

    def construct(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        """Builds the engine for a workload, which `run` runs from now on."""
        self._workload = from_json(workload)
        self._built.add(self._settings)
        gc.collect()  # what an earlier engine left behind is not this one's memory
        _forget_memory()
        others: dict[str, float] = {}
        seconds = _timed(lambda: others.update(self._here.construct(self._workload)))  # type: ignore[arg-type]
        return {
            "construction": seconds - sum(others.values()),
            "warm_up": others.get("warm_up", 0.0),
            "load": others.get("load"),
        }

    def warm_up(self) -> dict[str, Any]:
        return {"seconds": _timed(self._here.warm_up)}

    def run(self, call: int, latency: bool = False) -> dict[str, Any]:
        """Runs the workload once.

        Args:
            call: how many calls came before it; varies the prompts, so that no cache answers from an earlier call.
            latency: whether to record the times of tokens.
        """
        if self._workload is None:
            raise ConfigError("nothing was constructed")
        result = self._here.run(self._workload.varied(call), latency=latency)
        answer: dict[str, Any] = {
            "seconds": result.seconds,
            "tokens": result.tokens,
            "parts": result.parts,
            "preemptions": result.preemptions,
            "first_token_s": _summary(result.first_token_s),
            "between_tokens_s": _summary(result.between_tokens_s),
            "notes": result.notes,
            "memory": dataclasses.asdict(self._memory()),
            "facts": self._here.facts(),
        }
        problem = _problem(result, self._workload)
        if problem is not None:
            kind = OUT_OF_MEMORY if _says_no_memory(problem) else INCOMPLETE
            answer["error"] = {"kind": kind, "message": problem}
        return answer

    def trace(self, workload: Mapping[str, Any], out: str | None, gpu_only: bool, warm: bool) -> dict[str, Any]:
        """Builds the engine and runs a workload under the profiler. Answers with a `flatbed.lab.traced.Trace`.

        Args: see `trace_adapter`; `out` is a path.
        """
        from flatbed.lab.traced import trace_adapter

        path = None if out is None else Path(out)
        traced = trace_adapter(self._here, from_json(workload), out=path, gpu_only=gpu_only, warm=warm)
        return traced.to_json()

    def close(self) -> dict[str, Any]:
        if self._settings in self._adapters:
            self._adapters[self._settings].close()
        self._built.discard(self._settings)
        return {}

    def close_all(self) -> None:
        """`close`, for all settings."""
        for settings in list(self._adapters):
            self.do({"do": "close", "settings": settings.to_json()})

    @property
    def _here(self) -> Adapter:
        if not self._adapters:
            raise ConfigError("the session was not opened: say hello first")
        if self._settings not in self._adapters:
            first = next(iter(self._adapters.values()))
            self._adapters[self._settings] = first.sibling(self._settings)
        return self._adapters[self._settings]

    def _memory(self) -> MemoryResult:
        memory = self._here.memory()
        if memory.weights is None:
            memory.weights = self._weights
        if memory.peak is None and len(self._built) == 1:  # of several engines nobody can tell whose it was
            memory.peak = _peak(self._setup.device, memory.outside_torch)
        return memory


# ------------------------------------------------------------------------------------------------------- small helpers


def _timed(action: Callable[[], object]) -> float:
    """Seconds that it takes, the device having finished."""
    start = time.perf_counter()
    action()
    torch = _cuda()
    if torch is not None:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cuda() -> Any | None:
    """torch, if it is loaded and this process uses CUDA already; asking must not be what initialises it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _on_host(device: str) -> bool:
    """Whether the engine's memory is this process's RAM."""
    torch = sys.modules.get("torch")
    return device == "cpu" or torch is None or not torch.cuda.is_available()


def _taken(device: str) -> int | None:
    """Bytes that the engine has now: on the GPU what torch allocated, without one the resident memory.

    None when it is not this process that holds them.
    """
    torch = _cuda()
    if torch is not None:
        return int(torch.cuda.memory_allocated())
    return _status("VmRSS") if _on_host(device) else None


def _device_bytes() -> int:
    torch = _cuda()
    if torch is not None:
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu() -> dict[str, Any]:
    torch = _cuda()
    return {} if torch is None else {"gpu": torch.cuda.get_device_name(), "gpu_memory_bytes": _device_bytes()}


def _forget_memory() -> None:
    """Gives back what torch keeps of memory that nothing uses, and starts peaks anew."""
    torch = _cuda()
    if torch is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM anew; see proc_pid_clear_refs(5)


def _peak(device: str, outside_torch: int) -> int | None:
    """The most bytes since `_forget_memory`; None when it is not this process that holds them, as vLLM's may not."""
    torch = _cuda()
    if torch is not None:
        return int(torch.cuda.max_memory_reserved()) + outside_torch
    return _status("VmHWM") if _on_host(device) else None


def _status(name: str) -> int | None:
    """A field of /proc/self/status in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


def _summary(values: list[float]) -> dict[str, float] | None:
    """Median and 99th percentile (the value that 99 % do not exceed) of seconds; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": statistics.median(ordered), "p99": p99, "count": len(ordered)}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if "flatbed" not in found:
        found["flatbed"] = __version__  # from a source folder, which has no metadata
    return found


def _check_version(spec: EngineSpec, package: str, found: str | None) -> None:
    if found is None:
        raise MissingEngine(
            f"{package} is not installed for this Python; install it, or name one that has it with "
            f"--python {spec.key}=PATH"
        )
    if spec.version is not None and found != spec.version:
        raise MissingEngine(
            f"{package} {spec.version} was asked for, and this Python has {found}; name the one that has it with "
            f"--python {spec.key}=PATH, or its site folder with --env {spec.key}:PYTHONPATH=FOLDER"
        )


def _problem(result: RunResult, workload: Workload) -> str | None:
    if result.error is not None:
        return result.error
    if workload.fixed_lengths and result.tokens != workload.tokens:
        return f"made {result.tokens:,} of {workload.tokens:,} tokens, without an error"
    return None


def _kind(error: Exception) -> str:
    kinds = (
        (MissingEngine, MISSING),
        (NotSupported, NOT_SUPPORTED),
        (ConfigError, REFUSED),
        (MemoryError, OUT_OF_MEMORY),
    )
    for kind, name in kinds:
        if isinstance(error, kind):
            return name
    if type(error).__name__ == "OutOfMemoryError" or _says_no_memory(str(error)):
        return OUT_OF_MEMORY
    return FAILED


def _says_no_memory(text: str) -> bool:
    return any(phrase in text.lower() for phrase in _NO_MEMORY)


def _message(error: Exception) -> str:
    """The first line of an error, with its kind unless it is one of ours."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, ConfigError) and line else f"{type(error).__name__}: {line}".rstrip(": ")


# --------------------------------------------------------------------------------------------------------- the process


def main(commands_fd: int, answers_fd: int) -> None:
    """Serves commands until there are no more. The first one is `open`, with engine, settings and setup."""
    for fd in (commands_fd, answers_fd):
        os.set_inheritable(fd, False)  # or a process that the engine starts would keep the pipe open
    with os.fdopen(commands_fd, encoding="utf-8") as commands, os.fdopen(answers_fd, "w", encoding="utf-8") as answers:
        session: Session | None = None
        for line in commands:
            command = json.loads(line)
            if session is None:
                session = Session(
                    EngineSpec.parse(command["engine"]), Settings(**command["settings"]), Setup(**command["setup"])
                )
                continue
            answers.write(json.dumps(session.do(command), default=str) + "\n")
            answers.flush()
        if session is not None:
            session.close_all()
