"""`flatbed trace`: runs an engine under the profiler in a process of its own, which may be another Python.

The process does it by `worker.Session.trace`; what comes back is a `Trace` (see traced.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import EngineSpec, ModelAdapter, Settings, Setup, adapter_class
from flatbed.lab.traced import Trace, TraceError
from flatbed.lab.workloads import Workload, to_json

if TYPE_CHECKING:
    from flatbed.lab.measure import Worker

# How long a command of the traced process may take: loading weights, or the whole run with its analysis.
TIME_LIMIT_S = 1800.0


def run_trace(
    spec: EngineSpec,
    settings: Settings,
    setup: Setup,
    workload: Workload,
    *,
    out: Path | None = None,
    gpu_only: bool = False,
    warm: bool = False,
    time_limit: float = TIME_LIMIT_S,
    start: Callable[[EngineSpec, Settings, Setup], Worker] | None = None,
) -> Trace:
    """Traces an engine in a process of its own.

    Args:
        out: where the profiler's trace goes; None keeps none.
        gpu_only: record the device alone, which does not slow down the CPU.
        warm: make one call before, and trace the second.
        time_limit: seconds for loading, and for the run.
        start: makes the process; None is this very Python.

    Raises TraceError when the engine cannot be loaded or run, or is none that can be traced.
    """
    from flatbed.lab.measure import Process

    _check_kind(spec)
    made = (start or Process)(spec, settings, setup)
    try:
        versions: dict[str, str] = {}
        for command in (
            {"do": "hello"},
            {"do": "load"},
            {
                "do": "trace",
                "workload": to_json(workload),
                "out": None if out is None else str(out.resolve()),
                "gpu_only": gpu_only,
                "warm": warm,
            },
        ):
            made.send(command)
            answer = made.receive(time_limit)
            if "error" in answer:
                raise TraceError(f"{spec.text}: {answer['error']['kind']}: {answer['error']['message']}")
            versions = answer.get("versions") or versions
        return Trace.from_json({**answer, "versions": versions})
    finally:
        made.stop()


def _check_kind(spec: EngineSpec) -> None:
    with contextlib.suppress(ConfigError):  # what cannot be imported here may be where it runs, which tells if not
        if not issubclass(adapter_class(spec), ModelAdapter):
            told = f"engine {spec.text!r} cannot be traced: it does not run a Transformers model in its own process"
            raise TraceError(told)


def free_path(wanted: Path | None, spec: EngineSpec) -> Path:
    """Where to write a trace: `wanted`, or else `trace-ENGINE.json` with a number where there is one already.

    Raises ConfigError when `wanted` exists, for nothing is overwritten, or its folder does not.
    """
    if wanted is not None:
        if wanted.exists():
            raise ConfigError(f"{wanted} exists already; name another file")
        if not wanted.parent.is_dir():
            raise ConfigError(f"{wanted.parent} is no folder")
        return wanted
    stem = "trace-" + spec.key.replace("@", "-")
    path, number = Path(f"{stem}.json"), 1
    while path.exists():
        path, number = Path(f"{stem}-{number}.json"), number + 1
    return path


# ---------------------------------------------------------------------------------------------- in the engine's process
