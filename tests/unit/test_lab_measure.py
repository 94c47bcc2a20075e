"""How the lab runs its engines: processes, turns, trouble, time limits. With engines that need no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatbed.errors import ConfigError
from flatbed.lab import worker
from flatbed.lab.engines.base import EngineSpec, Settings, Setup
from flatbed.lab.measure import Experiment, InProcess, Process, measure
from flatbed.lab.report import RunFile, compose, read, read_all
from flatbed.lab.summary import summarise
from flatbed.lab.workloads import LabRequest, Workload, to_json

HERE = str(Path(__file__).parent)
WORK = Workload("small", (LabRequest([1, 2, 3], 4), LabRequest([5], 4)))
OTHER = Workload("other", (LabRequest([1], 2),))
SETUP = Setup("shape:tiny", "cpu", "float32")


def experiment(*engines: str, **more: Any) -> Experiment:
    names = {spec.name for spec in map(EngineSpec.parse, engines)}
    settings: dict[str, Any] = {
        "settings": [Settings("1 MiB"), Settings("64 MiB")],
        "workloads": [WORK],
        "repeats": 2,
        "time_limit": 60.0,
        "environments": {name: {"PYTHONPATH": HERE} for name in names if name.startswith("lab_engines.")},
    }
    return Experiment("capacity", SETUP, [EngineSpec.parse(e) for e in engines], **{**settings, **more})


def phases(records: list[dict[str, Any]], capacity: str | None = None) -> list[tuple[str, str]]:
    return [(r["phase"], r["outcome"]) for r in records if capacity is None or r["settings"]["capacity"] == capacity]


WELL = [("start", "ok"), ("first", "ok"), ("steady", "ok"), ("steady", "ok"), ("latency", "ok")]


# ---- order -----------------------------------------------------------------------------------------------------------


def in_process(found: Experiment, log: list[str] | None = None) -> list[dict[str, Any]]:
    return measure(
        found,
        spawn=lambda *what: InProcess(worker.Session(*what)),
        on_record=lambda r: None if log is None else log.append(f"{r['phase']} {r['settings']['capacity']}"),
    )


def test_settings_take_turns_where_memory_allows_it() -> None:
    order: list[str] = []
    records = in_process(experiment("lab_engines.Plain:sleep=0", repeats=3), order)
    assert order == [
        "start 1 MiB", "first 1 MiB", "start 64 MiB", "first 64 MiB",
        "steady 1 MiB", "steady 64 MiB", "steady 64 MiB", "steady 1 MiB", "steady 1 MiB", "steady 64 MiB",
        "latency 1 MiB", "latency 64 MiB",
    ]  # fmt: skip
    assert {r["order"] for r in records} == {"in turns"}


def test_engines_that_hold_their_capacity_run_one_after_the_other() -> None:
    order: list[str] = []
    records = in_process(experiment("lab_engines.Plain:sleep=0,holding=always", latency=False), order)
    assert order == [
        f"{phase} {capacity}" for capacity in ("1 MiB", "64 MiB") for phase in ("start", "first", "steady", "steady")
    ]
    assert {r["order"] for r in records} == {"one after the other"}


@pytest.mark.parametrize(("weights", "turns"), [(1, True), (3, False)])
def test_engines_that_take_their_capacity_in_calls_take_turns_while_weights_are_small(
    weights: int, turns: bool
) -> None:
    class Weighing(worker.Session):
        def load(self) -> dict[str, Any]:
            return {**super().load(), "weights": weights, "device_bytes": 50}  # 1 of 50 is less than 4 %, 3 is more

    records = measure(
        experiment("lab_engines.Plain:sleep=0,holding=in_calls"), spawn=lambda *what: InProcess(Weighing(*what))
    )
    assert {r["order"] for r in records} == {"in turns" if turns else "one after the other"}


@pytest.mark.parametrize("order", ["turns", "sequence"])
def test_the_order_can_be_chosen(order: Any) -> None:
    engine = f"lab_engines.Plain:sleep=0,holding={'always' if order == 'turns' else 'live'}"
    records = in_process(experiment(engine, order=order))
    assert {r["order"] for r in records} == {"in turns" if order == "turns" else "one after the other"}


def test_cold_starts_are_repeated_in_fresh_processes() -> None:
    records = in_process(experiment("lab_engines.Plain:sleep=0", cold_repeats=3, latency=False))
    cold = [(r["phase"], r["cold_round"]) for r in records if r["settings"]["capacity"] == "1 MiB"]
    first = [("start", 0), ("first", 0), ("steady", 0), ("steady", 0)]
    assert cold == [*first, ("start", 1), ("first", 1), ("start", 2), ("first", 2)]


def test_warm_calls_do_not_count() -> None:
    records = in_process(experiment("lab_engines.Plain:sleep=0", warm=2, latency=False))
    assert [p for p, _ in phases(records, "1 MiB")] == ["start", "first", "warm", "warm", "steady", "steady"]


def test_an_engine_without_the_control_is_measured_once() -> None:
    from lab_engines import Plain

    before = Plain.controls
    Plain.controls = frozenset({"token_budget"})
    try:
        records = in_process(
            experiment("lab_engines.Plain:sleep=0", settings=[Settings("1 MiB", 7), Settings("2 MiB", 7)])
        )
    finally:
        Plain.controls = before
    assert {r["reference"] for r in records} == {True}
    assert {tuple(r["settings"].values()) for r in records} == {(None, 7, None)}
    assert phases(records) == WELL


def test_prompts_differ_between_calls_and_not_between_engines() -> None:
    seen: list[list[list[int]]] = []

    class Watching(worker.Session):
        def run(self, call: int, latency: bool = False) -> dict[str, Any]:
            assert self._workload is not None
            seen.append([list(r.prompt) for r in self._workload.varied(call).requests])
            return super().run(call, latency)

    measure(experiment("lab_engines.Plain:sleep=0", repeats=1), spawn=lambda *what: InProcess(Watching(*what)))
    first, other_first, steady, other_steady, *_ = seen
    assert first == other_first == [[1, 2, 3], [5]]
    assert steady == other_steady == [[2, 3, 1], [5]]


# ---- one process for all settings of an engine ----------------------------------------------------------------------


class Counting(worker.Session):
    """Remembers what it was told to do, and at which capacity."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.done: list[tuple[str, str]] = []

    def do(self, command: Any) -> dict[str, Any]:
        answer = super().do(command)
        self.done.append((command["do"], self._settings.capacity))
        return answer


def counted(found: Experiment) -> tuple[list[dict[str, Any]], list[Counting]]:
    sessions: list[Counting] = []

    def spawn(*what: Any) -> InProcess:
        sessions.append(Counting(*what))
        return InProcess(sessions[-1])

    return measure(found, spawn=spawn), sessions


@pytest.mark.parametrize("holding", ["live", "in_calls", "always"])
def test_settings_can_share_a_process(holding: str) -> None:
    engine = f"lab_engines.Sharing:sleep=0,holding={holding}"
    records, sessions = counted(experiment(engine, shared=True, workloads=[WORK, OTHER]))
    (session,) = sessions
    assert [what for what, _ in session.done].count("load") == 1
    assert phases(records, "1 MiB") == phases(records, "64 MiB") == WELL * 2
    assert {r["order"] for r in records} == {"in turns" if holding == "live" else "one after the other"}
    fresh = [(r["phase"], r["settings"]["capacity"], r["workload"]["name"]) for r in records if r["fresh"]]
    assert fresh == [("start", "1 MiB", "small"), ("first", "1 MiB", "small")], "only that found a fresh process"
    assert [r["load_s"] is None for r in records if r["phase"] == "start"] == [False, True, True, True]
    assert all(r["shared"] for r in records)
    # Each setting has an engine of its own: what is told is that of its own capacity.
    assert {(r["settings"]["capacity"], r["memory"]["reserved"]) for r in records if r["memory"]} == {
        ("1 MiB", 1 << 20), ("64 MiB", 64 << 20),
    }  # fmt: skip
    peaks = [r["memory"]["peak"] is None for r in records if r["phase"] == "steady"]
    assert peaks == [holding == "live"] * 8, "of several engines in one process nobody can tell whose peak it is"


def test_cold_starts_of_settings_that_share_a_process_need_one_each() -> None:
    found = experiment("lab_engines.Sharing:sleep=0", shared=True, cold_repeats=2, latency=False)
    records, sessions = counted(found)
    assert len(sessions) == 2
    assert [r["cold_round"] for r in records if r["phase"] == "first" and r["fresh"]] == [0, 1]
    assert any("lab_engines.Sharing:sleep=0 ran in one process" in note for note in compose(records, plots=False).notes)
    (summary,) = summarise(records)
    assert [point.cold is not None for point in summary.points] == [True, False]


def test_an_engine_that_cannot_share_has_a_process_for_each_setting() -> None:
    records, sessions = counted(experiment("lab_engines.Plain:sleep=0", shared=True))
    assert len(sessions) == 2
    assert phases(records, "1 MiB") == phases(records, "64 MiB") == WELL
    assert not any(r["shared"] for r in records)


def test_a_shared_process_that_dies_is_followed_by_another() -> None:
    found = experiment(
        "lab_engines.Dying:sleep=0,holding=in_calls", shared=True, workloads=[WORK, OTHER], latency=False
    )
    settings = [Settings("64 MiB"), Settings("1 MiB")]
    records = measure(dataclasses.replace(found, settings=settings))
    assert phases(records, "64 MiB") == [("start", "ok"), ("first", "died")] * 2
    assert phases(records, "1 MiB") == WELL[:4] * 2
    assert [r["fresh"] for r in records if r["phase"] == "first"] == [True, True, True, False]


def test_processes_import_before_anything_is_measured() -> None:
    order: list[str] = []

    class Watching(worker.Session):
        def do(self, command: Any) -> dict[str, Any]:
            order.append(f"{command['do']} {self._spec.text[-1]}")
            return super().do(command)

    found = experiment("lab_engines.Plain:sleep=0", "lab_engines.Plain:sleep=0.001", settings=[Settings("1 MiB")])
    measure(found, spawn=lambda *what: InProcess(Watching(*what)))
    assert order.index("hello 1") < order.index("load 0") < order.index("run 0") < order.index("load 1")


# ---- how many calls --------------------------------------------------------------------------------------------------


def test_a_slow_setting_makes_fewer_calls() -> None:
    found = experiment("lab_engines.Slowing", repeats=6, enough=0.04, latency=False)
    records = in_process(found)
    steady = {c: [r["seconds"] for r in records if r["phase"] == "steady" and r["settings"]["capacity"] == c]
              for c in ("1 MiB", "64 MiB")}  # fmt: skip
    assert len(steady["64 MiB"]) == 2, "a call of 0.05 s is enough, and two are the least"
    assert len(steady["1 MiB"]) == 6, "others go on"


def test_calls_go_on_until_it_is_settled() -> None:
    asked: list[list[int]] = []

    def settled(samples: Any) -> bool:
        asked.append([len(sample) for sample in samples])
        return len(asked) == 3

    found = experiment("lab_engines.Plain:sleep=0", repeats=2, settled=settled, most_repeats=9, latency=False)
    records = in_process(found)
    assert asked == [[2, 2], [3, 3], [4, 4]]
    assert [p for p, _ in phases(records, "1 MiB")].count("steady") == 4
    never = in_process(dataclasses.replace(found, settled=lambda samples: False, most_repeats=5))
    assert [p for p, _ in phases(never, "64 MiB")].count("steady") == 5
    alone = in_process(dataclasses.replace(found, settings=[Settings("1 MiB")], settled=lambda samples: 1 / 0))
    assert [p for p, _ in phases(alone)].count("steady") == 2, "one alone has nothing to be compared with"


# ---- processes -------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_process_of_its_own(tmp_path: Path) -> None:
    found = experiment(
        "lab_engines.Plain", environments={"lab_engines.Plain": {"PYTHONPATH": HERE, "LAB_TEST": "said"}}
    )
    records = measure(found, logs=tmp_path)
    assert phases(records, "1 MiB") == phases(records, "64 MiB") == WELL
    processes = {r["engine_settings"]["pid"] for r in records if r["engine_settings"]}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert records[-1]["engine_settings"]["lab_test"] == "said"
    assert records[-1]["versions"]["flatbed"]
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) == 2
    assert "this must not disturb the answers" in logs[0].read_text()


def test_records_are_on_disk_the_moment_they_exist(tmp_path: Path) -> None:
    counts = []
    with RunFile(tmp_path / "out") as runs:

        def keep(record: dict[str, Any]) -> None:
            runs.write(record)
            counts.append(len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()))

        records = measure(experiment("lab_engines.Plain:sleep=0"), on_record=keep)
    assert counts == list(range(1, len(records) + 1))
    assert read(tmp_path / "out") == json.loads(json.dumps(records))


@pytest.mark.parametrize(
    ("trouble", "outcome", "said"),
    [
        ("dies", "died", "SIGKILL, as the system does when memory runs out; its last words: the engine's last words"),
        ("exits", "died", "ended with status 7; its last words: cannot go on"),
        ("hangs", "timed out", "no answer within 1.5 s"),
        ("memory", "out of memory", "RuntimeError: CUDA out of memory. Tried to allocate 100 GiB"),
        ("raises", "failed", "ValueError: something is wrong"),
        ("silent", "incomplete", "made 0 of 8 tokens"),
    ],
)
def test_trouble_in_a_call_is_a_result_and_harms_nothing_else(trouble: str, outcome: str, said: str) -> None:
    begun = time.monotonic()
    found = experiment(
        f"lab_engines.Troubled:{trouble}", "lab_engines.Plain", time_limit=1.5 if trouble == "hangs" else 60
    )
    records = measure(found)
    assert time.monotonic() - begun < 30
    troubled = [r for r in records if "Troubled" in r["engine"]]
    assert phases(troubled, "1 MiB") == WELL
    assert phases(troubled, "64 MiB") == [("start", "ok"), ("first", outcome)]
    assert said in next(r for r in troubled if r["outcome"] == outcome)["error"]
    assert phases([r for r in records if "Plain" in r["engine"]]).count(("latency", "ok")) == 2


@pytest.mark.parametrize("trouble", ["dies", "raises"])
def test_trouble_in_construction(trouble: str) -> None:
    records = measure(experiment(f"lab_engines.Troubled:{trouble},in=construct"))
    assert phases(records, "1 MiB") == WELL
    assert [phase for phase, _ in phases(records, "64 MiB")] == ["start"]


@pytest.mark.parametrize("trouble", ["dies", "raises"])
def test_trouble_in_loading_is_told_once(trouble: str) -> None:
    records = measure(experiment(f"lab_engines.Troubled:{trouble},in=load", workloads=[WORK, OTHER], cold_repeats=2))
    assert [phase for phase, _ in phases(records, "64 MiB")] == ["load"]
    assert phases(records, "1 MiB") == [*WELL, *WELL, *WELL[:2], *WELL[:2]]


def test_a_process_that_died_is_started_again_for_the_next_workload() -> None:
    records = measure(experiment("lab_engines.Troubled:dies", workloads=[WORK, OTHER], latency=False))
    died = [(r["workload"]["name"], r["phase"]) for r in records if r["outcome"] == "died"]
    assert died == [("small", "first"), ("other", "first")]


def test_a_missing_engine_is_named_once_and_skipped() -> None:
    records = measure(experiment("lab_engines.Absent", "lab_engines.Plain@0.0.1", "lab_engines.Plain"))
    absent, version, *rest = records
    assert (absent["outcome"], version["outcome"]) == ("missing", "missing")
    assert "no-such-package-anywhere is not installed" in absent["error"]
    assert "--python lab_engines.Absent=PATH" in absent["error"]
    assert f"pytest 0.0.1 was asked for, and this Python has {pytest.__version__}" in version["error"]
    assert phases(rest, "1 MiB") == WELL


def test_the_time_guard_names_what_it_leaves_out() -> None:
    records = in_process(
        experiment("lab_engines.Plain:sleep=0.2", "lab_engines.Zeroing", repeats=50, max_seconds=3, latency=False)
    )
    skipped = [r for r in records if r["outcome"] == "skipped"]
    assert 2 < len([r for r in records if r["phase"] == "steady"]) < 20
    assert {r["engine"] for r in skipped} == {"lab_engines.Plain:sleep=0.2", "lab_engines.Zeroing"}
    assert "steady calls from number" in skipped[0]["error"]
    assert "all of it: 3 s are over (--max-seconds)" in skipped[-1]["error"]


def test_a_process_and_its_children_end_with_it() -> None:
    one = Process(
        EngineSpec.parse("lab_engines.Troubled:hangs"), Settings("64 MiB"), SETUP, environment={"PYTHONPATH": HERE}
    )
    one.send({"do": "hello"})
    assert "versions" in one.receive(30)
    pid = one._process.pid
    assert "error" in one.receive(0.2)
    assert not one.alive
    one.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert "error" in one.receive(1)


def test_the_process_ends_when_nobody_drives_it() -> None:
    one = Process(EngineSpec.parse("lab_engines.Plain"), Settings("1 MiB"), SETUP, environment={"PYTHONPATH": HERE})
    one.send({"do": "hello"})
    one.receive(30)
    os.close(one._commands)
    assert one._process.wait(timeout=20) == 0
    one._commands = os.open(os.devnull, os.O_WRONLY)
    one.stop()


def test_a_worker_needs_none_of_the_packages_of_the_command_line(tmp_path: Path) -> None:
    """As in another environment: of Flatbed its source alone, and neither typer, rich, matplotlib, jinja2 nor torch."""
    absent = {"typer", "rich", "matplotlib", "jinja2", "pydantic", "torch", "transformers"}
    blocker = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {absent!r}:\n"
        "            raise ImportError(f'{name} is not in this environment')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(blocker)
    found = experiment(
        "lab_engines.Plain", environments={"lab_engines.Plain": {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE}"}}
    )
    assert phases(measure(found), "1 MiB") == WELL


def test_another_python_gets_only_flatbed_on_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/of/this/environment")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {tmp_path}/path\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    one = Process(EngineSpec.parse("flatbed"), Settings(), SETUP, python=str(script))
    one.send({"do": "hello"})
    assert "versions" in one.receive(30)
    one.stop()
    (entry,) = (tmp_path / "path").read_text().split()
    assert "flatbed-lab-" in entry


def test_an_interpreter_that_is_not_there_is_a_clear_error() -> None:
    found = experiment("lab_engines.Plain", pythons={"lab_engines.Plain": "/no/such/python"})
    with pytest.raises(ConfigError, match="cannot start /no/such/python for engine"):
        measure(found)


class FakeCuda:
    """Of `torch.cuda`, what the worker asks."""

    def __init__(self, initialized: bool, available: bool = True) -> None:
        self.is_initialized = lambda: initialized
        self.is_available = lambda: available
        self.calls: list[str] = []

    def memory_allocated(self) -> int:
        return 1000

    def max_memory_reserved(self) -> int:
        return 5000

    def mem_get_info(self) -> tuple[int, int]:
        return 1, 99000

    def get_device_name(self) -> str:
        return "a GPU"

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")


def gpu_session(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, device: str = "cuda") -> worker.Session:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    session = worker.Session(EngineSpec.parse("lab_engines.Plain:sleep=0"), Settings("1 MiB"), Setup("m", device))
    session.do({"do": "hello"})
    return session


def test_memory_on_a_gpu_is_that_of_torch_and_what_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab_engines import Plain

    own = Plain.memory
    monkeypatch.setattr(Plain, "memory", lambda self: dataclasses.replace(own(self), outside_torch=300))
    cuda = FakeCuda(initialized=True)
    session = gpu_session(monkeypatch, cuda)
    loaded = session.do({"do": "load"})
    assert {name: loaded[name] for name in ("weights", "device_bytes", "gpu")} == {
        "weights": 1000, "device_bytes": 99000, "gpu": {"gpu": "a GPU", "gpu_memory_bytes": 99000},
    }  # fmt: skip
    session.do({"do": "construct", "workload": to_json(WORK)})
    assert cuda.calls == ["synchronize", "empty", "reset", "synchronize"], (
        "the device has finished when the clock stops"
    )
    memory = session.do({"do": "run", "call": 0})["memory"]
    assert (memory["peak"], memory["weights"]) == (5300, 1000)


def test_memory_of_an_engine_in_another_process_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    session = gpu_session(monkeypatch, FakeCuda(initialized=False))
    assert session.do({"do": "load"})["weights"] is None
    session.do({"do": "construct", "workload": to_json(WORK)})
    assert session.do({"do": "run", "call": 0})["memory"]["peak"] is None
    session = gpu_session(monkeypatch, FakeCuda(initialized=False), device="cpu")
    session.do({"do": "load"})
    session.do({"do": "construct", "workload": to_json(WORK)})
    memory = session.do({"do": "run", "call": 0})["memory"]
    assert memory["peak"] >= memory["weights"] > 1 << 20


# ---- what cannot be understood ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engines": ["nothing"]}, "unknown engine 'nothing'; known: flatbed, transformers, generate, vllm"),
        ({"engines": ["no.such.Adapter"]}, "engine 'no.such.Adapter' cannot be imported"),
        ({"engines": ["json.JSONDecoder"]}, "not a class made from flatbed.lab.engines.base.Adapter"),
        ({"engines": ["flatbed", "flatbed"]}, "engine 'flatbed' is given twice"),
        ({"engines": ["flatbed:nonsense=1"]}, "unknown engine setting 'nonsense'"),
        ({"engines": ["flatbed:a,b"]}, "it takes the name of an attention backend"),
        ({"engines": ["flatbed:capacity=8 GiB"]}, "sets 'capacity', which is set already"),
        ({"engines": ["transformers:sdpa,eager"]}, "one attention implementation at a time"),
        ({"engines": ["generate:sdpa,warmup=false"]}, "generate has no option 'warmup'"),
        ({"engines": ["vllm:a,b"]}, "it takes the name of an attention backend"),
        ({"engines": []}, "there is no engine to measure"),
        ({"settings": []}, "there is no setting to measure"),
        ({"settings": [Settings("1 MiB"), Settings("1 MiB")]}, "is given twice"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"cold_repeats": 0}, "cold-repeats must be at least 1"),
        ({"time_limit": 0}, "time limits must be above 0"),
        ({"max_seconds": -1}, "time limits must be above 0"),
        ({"enough": 0}, "time limits must be above 0"),
        ({"pythons": {"vllm": "python"}}, "unknown engine in --python or --env 'vllm'; known: flatbed"),
        ({"sweep": "colour"}, "unknown sweep 'colour'"),
    ],
)
def test_an_experiment_that_makes_no_sense(change: dict[str, Any], said: str) -> None:
    whole: dict[str, Any] = {"sweep": "capacity", "engines": ["flatbed"], "settings": [Settings("1 MiB")], **change}
    with pytest.raises(ConfigError, match=_literal(said)):
        Experiment(
            setup=SETUP, workloads=[WORK], **{**whole, "engines": [EngineSpec.parse(e) for e in whole["engines"]]}
        )


def _literal(text: str) -> str:
    import re

    return re.escape(text)


@pytest.mark.parametrize("text", ["", ":sdpa", "a b", "transformers@", "1up"])
def test_an_engine_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read engine"):
        EngineSpec.parse(text)


def test_an_engine_is_read() -> None:
    spec = EngineSpec.parse("transformers@5.20.2:sdpa,warmup=false,page_size=32,x=1.5,persistent,y=none,z=text")
    assert (spec.name, spec.version, spec.key) == ("transformers", "5.20.2", "transformers@5.20.2")
    assert spec.words == ("sdpa", "persistent")
    assert dict(spec.options) == {"warmup": False, "page_size": 32, "x": 1.5, "y": None, "z": "text"}
    assert (EngineSpec.parse("vllm").key, EngineSpec.parse("a.b.C:d").name) == ("vllm", "a.b.C")
    with pytest.raises(ConfigError, match="sets 'x' twice"):
        EngineSpec.parse("flatbed:x=1,x=2")


@pytest.mark.parametrize("text", ["64 pages", "0%", "", "101%", "-3 blocks"])
def test_a_capacity_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown capacity"):
        Settings(text)


def test_blocks_are_the_same_tokens_for_every_engine() -> None:
    amount = Settings("64 blocks").capacity_amount
    assert amount is not None
    assert (amount.amount, amount.unit) == (16384, "tokens")
    with pytest.raises(ConfigError, match="at least 1"):
        Settings(token_budget=0)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    with RunFile(tmp_path) as runs:
        runs.write({"schema": 1})
    before = (tmp_path / "runs.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="has results already, and they are kept: give another --out"):
        RunFile(tmp_path)
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"schema": 1}\n{"schema": 1}\n{"sch')
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no results in"),
        ("", "has no records"),
        ('nonsense\n{"schema": 1}\n', "line 1 is not a record of flatbed bench"),
        ('{"schema": 99}\n{"schema": 1}\n', "line 1 has schema 99"),
    ],
)
def test_folders_without_results(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "runs.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path)


def test_folders_side_by_side(tmp_path: Path) -> None:
    for name, engine, sweep in (("a", "flatbed", "capacity"), ("b", "flatbed", "capacity"), ("c", "vllm", "schedule")):
        with RunFile(tmp_path / name) as runs:
            runs.write({"schema": 1, "engine": engine, "sweep": sweep})
    records = read_all([tmp_path / "a", tmp_path / "b"])
    assert [record["engine"] for record in records] == ["flatbed (a)", "flatbed (b)"]
    with pytest.raises(ConfigError, match="cannot stand side by side: they vary capacity and schedule"):
        read_all([tmp_path / "a", tmp_path / "c"])


def test_the_lab_imports_neither_torch_nor_plots_by_itself() -> None:
    code = (
        "import sys; import flatbed.lab.measure, flatbed.lab.report, flatbed.lab.gate, flatbed.lab.cli\n"
        "import flatbed.lab.engines.flatbed, flatbed.lab.engines.transformers, flatbed.lab.engines.vllm\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'jinja2', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
