"""Runs an experiment: engines and settings, each in a process of its own, taking turns; records as they come.

Which processes are alive together::

    engine that holds only live tokens, or its capacity in calls alone     engine that always holds its capacity
      64 blocks  ▐start▌▐first▌     ▐steady▌     ▐steady▌                   ▐start▌▐first▌▐steady▌▐steady▌
      50%                     ...        ▐steady▌     ▐steady▌                                          ▐start▌ ...
                 in turns: what drifts meets all alike                       one after the other: no memory for more

A crash, a hang or an out-of-memory ends one process and is a record like any other; the others go on.

A process takes ten seconds and more to start, most of it imports. So all of an experiment are started at its beginning,
as many as there are cores, and have imported their engine before anything is measured; then they wait, without having
touched the device, until it is their turn to load the weights.

With `shared`, an engine has one process for all of its settings, which load their weights once::

      ▐import▌▐load▌ 64 blocks ▐start▌▐first▌▐steady▌▐steady▌  50% ▐start▌▐first▌▐steady▌▐steady▌  ...

Only the very first engine of a process is a fresh start then (`fresh` in its records) and counts as a cold one.
Settings take turns only if the engine holds nothing but live tokens. Before another setting is built, torch gives back
what it kept of the last one. An engine that cannot be built twice in a process (vLLM) has one for each setting all the
same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from flatbed.errors import ConfigError
from flatbed.lab import worker
from flatbed.lab.engines.base import CONTROLS, ENGINES, Adapter, EngineSpec, Settings, Setup, adapter_class
from flatbed.lab.workloads import Workload, to_json

SCHEMA = 1

OK = "ok"
DIED = "died"
TIMED_OUT = "timed out"
SKIPPED = "skipped"

Order = Literal["auto", "turns", "sequence"]
ALONE = "alone"  # an engine with one setting
IN_TURNS = "in turns"
IN_SEQUENCE = "one after the other"

# With at most this share of the device's memory in weights of the others, engines that take their capacity within a
# call can be alive together without changing what a percentage of the memory means.
_OTHERS_WEIGHTS = 0.04

_LOG_LINES = 3  # of the log of a process that died, in its record


@dataclass(frozen=True)
class Experiment:
    """What to measure.

    Attributes:
        sweep: which of CONTROLS the settings differ in.
        settings: in the order in which results are shown.
        warm: calls after the first that are not counted yet.
        repeats: steady calls that are.
        cold_repeats: how often each engine is started anew, for more than one figure of its start.
        time_limit: seconds that any one step (loading, construction, a call) may take.
        max_seconds: after which nothing more is begun; None is no limit.
        order: `auto` chooses as the picture above says.
        latency: add one call that records the times of tokens.
        enough: seconds of steady calls after which a setting makes no more of them, two being the least; None is all
            `repeats`, whatever they take.
        shared: one process for all settings of an engine, as above.
        settled: given the seconds of the steady calls of each setting that takes turns, says whether more are needed;
            they are made until it is, or until `most_repeats`.
        pythons: interpreter for an engine, by `name@version` or `name`.
        environments: environment variables for an engine's process, likewise.
    """

    sweep: str
    setup: Setup
    engines: Sequence[EngineSpec]
    settings: Sequence[Settings]
    workloads: Sequence[Workload]
    warm: int = 0
    repeats: int = 5
    cold_repeats: int = 1
    time_limit: float = 600.0
    max_seconds: float | None = None
    order: Order = "auto"
    latency: bool = True
    enough: float | None = None
    shared: bool = False
    settled: Callable[[Sequence[Sequence[float]]], bool] | None = None
    most_repeats: int = 0
    pythons: Mapping[str, str] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    command: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("warm", 0), ("repeats", 1), ("cold_repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if self.time_limit <= 0 or any(limit is not None and limit <= 0 for limit in (self.max_seconds, self.enough)):
            raise ConfigError("time limits must be above 0 seconds")
        if self.sweep not in CONTROLS:
            raise ConfigError.unknown("sweep", self.sweep, CONTROLS)
        _all_different("engine", [spec.text for spec in self.engines])
        _all_different("setting", list(self.settings))
        _all_different("workload", [workload.name for workload in self.workloads])
        for spec in self.engines:
            found = self.adapter(spec)
            if found is not None:
                for settings in self.settings:
                    found.check(spec, settings)
        for name in (*self.pythons, *self.environments):
            if not any(name in (spec.name, spec.key) for spec in self.engines):
                raise ConfigError.unknown("engine in --python or --env", name, [spec.key for spec in self.engines])

    def adapter(self, spec: EngineSpec) -> type[Adapter] | None:
        """The adapter's class; None for one that can only be imported where it runs."""
        elsewhere = self.environments.get(spec.key) or self.environments.get(spec.name) or self.python(spec)
        try:
            return adapter_class(spec)
        except ConfigError:
            if spec.name in ENGINES or "." not in spec.name or not elsewhere:
                raise
            return None

    def python(self, spec: EngineSpec) -> str | None:
        """The interpreter that was named for this engine, or None."""
        return self.pythons.get(spec.key, self.pythons.get(spec.name))


def _all_different(what: str, several: Sequence[Any]) -> None:
    if not several:
        raise ConfigError(f"there is no {what} to measure")
    for one in several:
        if several.count(one) > 1:
            raise ConfigError(f"{what} {one!r} is given twice")


class Worker(Protocol):
    """What drives one session: see `worker.Session`."""

    def send(self, command: Mapping[str, Any]) -> None:
        """Hands over a command; its answer comes by `receive`, in order."""

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next answer, or one with an `error` when there will be none."""

    @property
    def alive(self) -> bool:
        """Whether it takes commands still."""

    def finish(self) -> None:
        """Lets it end by itself: there are no more commands."""

    def stop(self) -> None:
        """Ends it, whatever it does."""


class InProcess:
    """A session in this very process: fast, and a crash or a hang of the engine is one of the caller."""

    def __init__(self, session: worker.Session) -> None:
        self._session = session
        self._answers: list[dict[str, Any]] = []
        self.alive = True

    def send(self, command: Mapping[str, Any]) -> None:
        self._answers.append(self._session.do(command))

    def receive(self, limit_s: float) -> dict[str, Any]:
        return self._answers.pop(0)

    def finish(self) -> None:
        self._session.do({"do": "close"})

    def stop(self) -> None:
        self.finish()
        self.alive = False


class _Part:
    """One setting's part of a process that serves several: ends with the process, and does not end it."""

    def __init__(self, process: Worker, settings: Settings) -> None:
        self._process = process
        self._settings = settings.to_json()

    def send(self, command: Mapping[str, Any]) -> None:
        self._process.send({**command, "settings": self._settings})

    def receive(self, limit_s: float) -> dict[str, Any]:
        return self._process.receive(limit_s)

    @property
    def alive(self) -> bool:
        return self._process.alive

    def finish(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Process:
    """A session in a process of its own, of any Python.

    Args:
        python: the interpreter; None is this one.
        environment: variables to set, over those of this process.
        log: what the engine prints is appended to this file.
    """

    def __init__(
        self,
        spec: EngineSpec,
        settings: Settings,
        setup: Setup,
        *,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flatbed-lab-")
        self._log = log if log is not None else Path(self._folder.name) / "log"
        (Path(self._folder.name) / "flatbed").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        self._partial = b""
        self._ended: dict[str, Any] | None = None
        code = f"from flatbed.lab.worker import main; main({command_read}, {answer_write})"
        try:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(command_read, answer_write),
                    env=self._environment(python, environment or {}),
                    start_new_session=True,  # so that it can be ended with all that it started
                )
        except OSError as error:
            self.finish()
            raise ConfigError(f"cannot start {python or sys.executable} for engine {spec.text!r}: {error}") from error
        finally:
            os.close(command_read)
            os.close(answer_write)
        opening = {
            "engine": spec.text,
            "settings": settings.to_json(),
            "setup": dataclasses.asdict(setup),
        }
        self.send(opening)

    def _environment(self, python: str | None, wanted: Mapping[str, str]) -> dict[str, str]:
        """Only Flatbed's own source is added to the path, not the site folder that it may lie in."""
        inherited = "" if python is not None else os.environ.get("PYTHONPATH", "")
        paths = [self._folder.name, wanted.get("PYTHONPATH", inherited)]
        return {
            **os.environ,
            "PYTHONSAFEPATH": "1",  # the folder one happens to be in is no place to import from
            **wanted,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    @property
    def alive(self) -> bool:
        return self._ended is None

    def send(self, command: Mapping[str, Any]) -> None:
        data = json.dumps(command).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it died; `receive` says so
            while data:
                data = data[os.write(self._commands, data) :]

    def receive(self, limit_s: float) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        while self._ended is None:
            line, newline, rest = self._partial.partition(b"\n")
            if newline:
                self._partial = rest
                return json.loads(line)
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self._end(TIMED_OUT, f"no answer within {limit_s:g} s; the process was ended")
            else:
                data = os.read(self._answers, 1 << 16)
                self._partial += data
                if not data:
                    self._end(DIED, None)
        return self._ended

    def _end(self, kind: str, message: str | None) -> None:
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._kill()
        text = message or f"{_ending(self._process.returncode)}; its last words: {_last_lines(self._log)}"
        self._ended = {"error": {"kind": kind, "message": text}}

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Lets it end by itself for a moment, then ends it, with all that it started."""
        self.finish()
        if self._ended is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._ended = {"error": {"kind": DIED, "message": "the process was stopped"}}
        self._kill()
        self._folder.cleanup()

    def finish(self) -> None:
        for fd in (self._commands, self._answers):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._commands = self._answers = -1


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        more = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"the process was ended by {name}{more}"
    return f"the process ended with status {code}"


def _last_lines(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return " / ".join(line.strip()[:200] for line in lines[-_LOG_LINES:]) or "none"


# --------------------------------------------------------------------------------------------------------- measurement

Spawn = Callable[[EngineSpec, Settings, Setup], Worker]


def measure(
    experiment: Experiment,
    *,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Callable[[str], None] = lambda line: None,
    logs: Path | None = None,
    spawn: Spawn | None = None,
) -> list[dict[str, Any]]:
    """Runs the experiment. Returns its records, in order.

    Args:
        on_record: called with each record the moment it exists.
        say: called with a line of progress.
        logs: a folder for what the engines print.
        spawn: makes a worker; None starts a process as the experiment says.

    Raises ConfigError when an interpreter cannot be started.
    """
    return _Measurement(experiment, on_record, say, logs, spawn).run()


@dataclass
class _Series:
    """One engine at one setting: its process while there is one, and how many calls it made of a workload."""

    spec: EngineSpec
    settings: Settings
    reference: bool
    worker: Worker | None = None
    versions: dict[str, str] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    hello: dict[str, Any] | None = None  # the answer, once it came
    calls: int = 0
    steady: list[float] = field(default_factory=list)  # seconds of these calls of this workload
    fresh: bool = True  # nothing was built before in its process
    asked: bool = False  # an answer to load is under way
    hopeless: bool = False  # it could not be started; trying again would not help


class _Measurement:
    """The state of one `measure`."""

    def __init__(
        self,
        experiment: Experiment,
        on_record: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        logs: Path | None,
        spawn: Spawn | None,
    ) -> None:
        self._experiment = experiment
        self._on_record = on_record
        self._say = say
        self._logs = logs
        self._spawn = spawn or self._start_process
        self._records: list[dict[str, Any]] = []
        self._machine = machine(experiment.setup.device)
        self._begun = time.monotonic()
        self._order = ALONE
        self._cold_round = 0
        self._shared: dict[str, tuple[Worker, _Series]] = {}  # by engine: its process, and the one that started it

    def run(self) -> list[dict[str, Any]]:
        engines = [self._series_of(spec) for spec in self._experiment.engines]
        try:
            self._start_all([one for series in engines for one in series])
            for series in engines:
                for cold_round in range(self._experiment.cold_repeats):
                    self._cold_round = cold_round
                    if cold_round > 0:
                        self._start_all([one for one in series if not one.hopeless])
                    self._engine(series)
                    self._end_shared(series[0])
        finally:
            for series in engines:
                for one in series:
                    self._stop(one)
                self._end_shared(series[0])
        return self._records

    def _series_of(self, spec: EngineSpec) -> list[_Series]:
        """One for each setting; a single one for an engine that does not have the control which is varied."""
        found = self._experiment.adapter(spec)
        if found is not None and self._experiment.sweep not in found.controls:
            first = self._experiment.settings[0]
            kept = {name: value for name, value in first.to_json().items() if name in found.controls}
            return [_Series(spec, Settings(**kept), reference=True)]
        return [_Series(spec, settings, reference=False) for settings in self._experiment.settings]

    def _engine(self, series: list[_Series]) -> None:
        """All settings of an engine, once over."""
        if self._out_of_time(series, self._experiment.workloads):
            return
        if not series[0].hopeless:
            self._ask(series[:1])
            if not self._answered(series[0]) and self._records[-1]["outcome"] == worker.MISSING:
                for one in series:
                    one.hopeless = True  # said once, for all of its settings
        series = [one for one in series if not one.hopeless]
        if not series:
            return
        groups = [series] if self._take_turns(series) else [[one] for one in series]
        self._order = ALONE if len(series) == 1 else IN_TURNS if len(groups) == 1 else IN_SEQUENCE
        for group in groups:
            self._group(group)

    def _take_turns(self, series: list[_Series]) -> bool:
        if self._experiment.order != "auto" or len(series) == 1:
            return self._experiment.order == "turns"
        found = self._experiment.adapter(series[0].spec)
        holding = "always" if found is None else found.holding(series[0].spec)
        if holding == "in calls":
            if self._shares(series[0]):
                return False  # what torch keeps of one's pool would be the other's
            weights, device = (series[0].load.get(name) or 0 for name in ("weights", "device_bytes"))
            return 0 < (len(series) - 1) * weights <= _OTHERS_WEIGHTS * device
        return holding == "live"

    def _group(self, group: list[_Series]) -> None:
        """Processes that are alive together."""
        experiment = self._experiment
        for workload in experiment.workloads:
            if self._out_of_time(group, [workload]):
                continue
            self._ask([one for one in group if not (one.load or one.hopeless)])
            running = [one for one in group if self._cold(one, workload)]
            if self._cold_round == 0:
                running = self._rounds(running, workload, "warm", experiment.warm)
                running = self._rounds(running, workload, "steady", experiment.repeats)
                running = self._until_settled(running, workload)
                if experiment.latency:
                    self._rounds(running, workload, "latency", 1)
            for one in group:
                if one.worker is not None and one.worker.alive:
                    self._step(one, {"do": "close"})
        for one in group:
            if one.worker is not None:
                one.worker.finish()  # all end at the same time
        for one in group:
            self._stop(one)

    def _rounds(
        self, running: list[_Series], workload: Workload, phase: str, count: int, begin: int = 0
    ) -> list[_Series]:
        """Every series in turn, `count` times, every other time backwards. Gives those that are still running."""
        for repeat in range(begin, begin + count):
            wanting = [one for one in running if not (phase == "steady" and self._has_enough(one))]
            if wanting and self._out_of_time(wanting, [workload], f"{phase} calls from number {repeat + 1} on"):
                return running
            order = wanting if repeat % 2 == 0 else wanting[::-1]
            failed = [one for one in order if not self._call(one, workload, phase, repeat)]
            running = [one for one in running if one not in failed]
        return running

    def _has_enough(self, one: _Series) -> bool:
        enough = self._experiment.enough
        return enough is not None and len(one.steady) >= 2 and sum(one.steady) >= enough

    def _until_settled(self, running: list[_Series], workload: Workload) -> list[_Series]:
        """Further steady calls while the experiment asks for them and there is something to compare."""
        experiment = self._experiment
        done = experiment.repeats
        while (
            experiment.settled is not None
            and len(running) > 1
            and done < experiment.most_repeats
            and not experiment.settled([one.steady for one in running])
        ):
            running = self._rounds(running, workload, "steady", 1, begin=done)
            done += 1
        return running

    # ---- one process ------------------------------------------------------------------------------------------------

    def _start_all(self, series: Sequence[_Series]) -> None:
        """Starts processes, at most one for each core, and waits until they have imported their engines."""
        shared = {one.spec.text: one for one in reversed(series) if self._shares(one)}
        own = [one for one in series if not self._shares(one) or shared[one.spec.text] is one]
        first = own[: _cores()]
        for one in first:
            self._start(one)
        for one in first:
            self._greeted(one)

    def _shares(self, one: _Series) -> bool:
        found = self._experiment.adapter(one.spec)
        return self._experiment.shared and found is not None and found.shares

    def _start(self, one: _Series) -> None:
        """Starts the process of a setting, or takes that of its engine."""
        one.fresh = True
        if not self._shares(one):
            one.worker = self._spawn(one.spec, one.settings, self._experiment.setup)
        else:
            process, leader = self._shared.get(one.spec.text, (None, one))
            if process is not None and process.alive:
                one.worker = _Part(process, one.settings)
                one.versions, one.load, one.hello, one.fresh = leader.versions, leader.load, leader.hello, False
                return
            self._end_shared(one)
            process = self._spawn(one.spec, one.settings, self._experiment.setup)
            self._shared[one.spec.text] = process, one
            one.worker = _Part(process, one.settings)
        one.hello = None
        one.worker.send({"do": "hello"})

    def _end_shared(self, one: _Series) -> None:
        if one.spec.text in self._shared:
            self._shared.pop(one.spec.text)[0].stop()

    def _greeted(self, one: _Series) -> dict[str, Any]:
        """The answer to hello, which comes when the engine was imported."""
        assert one.worker is not None
        if one.hello is None:
            one.hello = one.worker.receive(self._experiment.time_limit)
            one.versions = one.hello.get("versions", {})
        return one.hello

    def _ask(self, series: Iterable[_Series]) -> None:
        """Lets processes load, all at once, starting those that are not there; `_answered` takes the answers."""
        for one in series:
            if one.worker is None:
                self._start(one)
            assert one.worker is not None
            if one.fresh and not one.load:
                one.worker.send({"do": "load"})
                one.asked = True

    def _answered(self, one: _Series) -> bool:
        """Whether its process is there and has loaded; a failure is recorded."""
        if one.worker is None:
            return False
        if not one.asked:
            if one.worker.alive or not self._shares(one):
                return one.worker.alive
            self._stop(one)  # with the process that it shared
            self._ask([one])
            return self._answered(one)
        hello = self._greeted(one)
        loaded = one.worker.receive(self._experiment.time_limit)
        one.asked = False
        one.load = loaded
        self._machine = {**loaded.get("gpu", {}), **self._machine}
        for answer in (hello, loaded):
            if "error" in answer:
                self._record(one, None, "load", answer)
                self._stop(one)
                self._end_shared(one)
                one.hopeless = True
                return False
        self._tell(one, None, f"loaded in {loaded['seconds']:.1f} s, after {hello['seconds']:.1f} s of imports")
        return True

    def _cold(self, one: _Series, workload: Workload) -> bool:
        """Construction, warm-up and the first call. Whether all went well."""
        if not self._answered(one):
            return False
        one.calls, one.steady = 0, []
        built = self._step(one, {"do": "construct", "workload": to_json(workload)})
        if "error" not in built:
            warmed = self._step(one, {"do": "warm_up"})
            built["error"] = warmed.get("error")
            built["warm_up"] += warmed.get("seconds", 0.0)
        parts = {name: built[name] for name in ("construction", "warm_up") if name in built}
        load_s = built.get("load") or (one.load.get("seconds") if one.fresh else None)
        self._record(one, workload, "start", built, seconds=sum(parts.values()), parts=parts, load_s=load_s)
        fine = not built.get("error") and self._call(one, workload, "first", 0)
        one.fresh = False
        return fine

    def _call(self, one: _Series, workload: Workload, phase: str, repeat: int) -> bool:
        answer = self._step(one, {"do": "run", "call": one.calls, "latency": phase == "latency"})
        one.calls += 1
        if phase == "steady" and not answer.get("error"):
            one.steady.append(answer["seconds"])
        self._record(one, workload, phase, answer, repeat=repeat)
        return not answer.get("error")

    def _step(self, one: _Series, command: Mapping[str, Any]) -> dict[str, Any]:
        assert one.worker is not None
        one.worker.send(command)
        answer = one.worker.receive(self._experiment.time_limit)
        if not one.worker.alive:
            self._stop(one)
        return answer

    def _stop(self, one: _Series) -> None:
        if one.worker is not None:
            one.worker.stop()
            one.worker = None
        one.asked, one.hello, one.load = False, None, {}

    def _start_process(self, spec: EngineSpec, settings: Settings, setup: Setup) -> Worker:
        experiment = self._experiment
        environment = {**experiment.environments.get(spec.name, {}), **experiment.environments.get(spec.key, {})}
        log = None if self._logs is None else self._logs / f"{_file_name(spec, settings)}.log"
        return Process(spec, settings, setup, python=experiment.python(spec), environment=environment, log=log)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _out_of_time(self, series: list[_Series], workloads: Sequence[Workload], what: str = "all of it") -> bool:
        """Whether nothing more may be begun; then it is recorded what was left out."""
        limit = self._experiment.max_seconds
        if limit is None or time.monotonic() - self._begun < limit:
            return False
        error = {"kind": SKIPPED, "message": f"{what}: {limit:g} s are over (--max-seconds)"}
        for workload in workloads:
            for one in series:
                self._record(one, workload, "skipped", {"error": error})
        return True

    def _record(
        self,
        one: _Series,
        workload: Workload | None,
        phase: str,
        answer: Mapping[str, Any],
        *,
        repeat: int = 0,
        **more: Any,
    ) -> None:
        experiment = self._experiment
        error = answer.get("error") or {}
        seconds, tokens = answer.get("seconds"), answer.get("tokens")
        record = {
            "schema": SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "sweep": experiment.sweep,
            "engine": one.spec.text,
            "reference": one.reference,
            "settings": one.settings.to_json(),
            "engine_settings": answer.get("facts"),
            "workload": None if workload is None else workload.facts(),
            "phase": phase,
            "repeat": repeat,
            "cold_round": self._cold_round,
            "fresh": one.fresh,
            "shared": self._shares(one),
            "order": self._order,
            "outcome": error.get("kind", OK),
            "error": error.get("message"),
            "seconds": seconds,
            "parts": answer.get("parts"),
            "load_s": None,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds if tokens and seconds else None,
            "first_token_s": answer.get("first_token_s"),
            "between_tokens_s": answer.get("between_tokens_s"),
            "preemptions": answer.get("preemptions"),
            "memory": answer.get("memory"),
            "notes": answer.get("notes") or [],
            "setup": dataclasses.asdict(experiment.setup),
            "plan": {
                "warm": experiment.warm,
                "repeats": experiment.repeats,
                "cold_repeats": experiment.cold_repeats,
                "enough_s": experiment.enough,
                "time_limit_s": experiment.time_limit,
                "max_seconds": experiment.max_seconds,
                "command": experiment.command,
            },
            "machine": self._machine,
            "versions": one.versions,
            **more,
        }
        self._records.append(record)
        self._on_record(record)
        figure = f"{record['seconds']:.3f} s" if record["seconds"] is not None and not error else ""
        self._tell(one, workload, " ".join(filter(None, (phase, figure, _complaint(record)))))

    def _tell(self, one: _Series, workload: Workload | None, what: str) -> None:
        where = [one.spec.text, setting_label(one.settings, self._experiment.sweep, one.reference)]
        if workload is not None:
            where.insert(0, workload.name)
        self._say(f"{time.monotonic() - self._begun:7.1f} s  {'  '.join(where)}  {what}")


def setting_label(settings: Settings | Mapping[str, Any], sweep: str, reference: bool = False) -> str:
    """The varied control of a setting, in words."""
    values = settings.to_json() if isinstance(settings, Settings) else settings
    if reference:
        return "reference"
    value = values.get(sweep)
    return "default" if value is None else str(value)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on. `device`: what the engines run on; `cpu` leaves GPUs out."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": _cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    if device != "cpu":
        found.update(_gpu())
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any]:
    """Of the first GPU, asked without taking memory on it."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, memory, driver = (part.strip() for part in answer.splitlines()[0].split(","))
        return {"gpu": name, "gpu_memory_bytes": int(memory) * 2**20, "driver": driver}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def _complaint(record: Mapping[str, Any]) -> str:
    return "" if record["outcome"] == OK else f"{record['outcome']}: {record['error']}"


def _file_name(spec: EngineSpec, settings: Settings) -> str:
    words = [spec.text, *(str(value) for value in settings.to_json().values() if value is not None)]
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in "_".join(words))
