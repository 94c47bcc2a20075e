"""One sitting: everything that is published about Flatbed and its peers, measured on one machine, in parts.

    python benchmarks/sitting.py list                             # the parts, what they take, in which call they run
    python benchmarks/sitting.py run --out S --call 1 --budget 560 --env old:PYTHONPATH=OLD --env new:PYTHONPATH=NEW
    python benchmarks/sitting.py run --out S vllm-small --python vllm=VLLM/bin/python       # or parts by name
    python benchmarks/sitting.py table S                          # S/sitting.json, S/sitting.md, S/report/
    python benchmarks/sitting.py pack S                           # S.tar.gz
    python benchmarks/sitting.py run --out T --tiny               # all of it with a tiny model on the CPU, in minutes

A part is one command: `flatbed bench`, `trace` or `plan`, or `benchmarks/engine.py`. Each writes a folder of its own
under S, so that a sitting can be interrupted and resumed: a part that ended by itself is not run again. Engines
that are in other environments are named by `--python NAME=INTERPRETER` and `--env NAME:KEY=VALUE`, NAME being `old` and
`new` (the two versions of Transformers), `vllm`, or an engine as in `flatbed bench`; what is not installed is named and
skipped.

`--budget SECONDS` begins nothing that is not expected to end within it. The parts are divided into three calls of at
most ten minutes, because that is how GPU time is often lent; `list` says what each part is expected to take on one
H200, and `run` beside it what it took.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
FAKE_VLLM = HERE.parent / "tests" / "unit" / "fake_vllm"

SMALL, LARGE = "0.5B", "8B"
ALL = "article,mixed,rollout,one,concurrent,long"

# ------------------------------------------------------------------------------------------------------------- targets

# Seconds of a whole call on one H200, warm: the median is to be no more.
TARGETS: dict[tuple[str, str], float] = {
    (SMALL, "article"): 0.15,
    (SMALL, "mixed"): 1.9,
    (SMALL, "rollout"): 1.0,
    (SMALL, "one"): 0.12,
    (SMALL, "concurrent"): 0.9,
    (SMALL, "long"): 1.1,
    (LARGE, "article"): 0.70,
    (LARGE, "rollout"): 4.2,
    (LARGE, "one"): 0.56,
    (LARGE, "concurrent"): 2.4,
    (LARGE, "long"): 9.5,
}
FIRST_CALL_S = 1.5  # 0.5B, article: engine and first call of a process that has loaded the model
FLATNESS = 1.02  # a call at any capacity over one at the smallest that fits
COMMITTED_OVER_LIVE, COMMITTED_MIB = 1.25, 400  # K/V memory: at most so many times the live K/V, and so much more
RELEASED_MIB = 100  # after `release()`
IDLE = 0.03  # share of steady decode in which the GPU does nothing

# --------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Part:
    """One command of a sitting.

    Attributes:
        call: which of the three calls it belongs to; None is an extra, which runs only when it is named.
        seconds: expected on one H200 with 16 cores.
        what: what it shows.
        command: its words, with {names} of `values`; the first is `bench`, `trace`, `plan` or `engine`.
        model: SMALL or LARGE.
        table: its medians belong into the table of workloads.
        report: its calls of `article` belong into the report on capacity.
        gpu: it makes no sense on a CPU.
    """

    name: str
    call: int | None
    seconds: float
    what: str
    command: str
    model: str = SMALL
    table: bool = False
    report: bool = False
    gpu: bool = False


_BENCH = "bench capacity --device {device} --no-report --time-limit 240"
_SMALL, _LARGE = f"{_BENCH} --model {{small}}", f"{_BENCH} --model {{large}}"
_FEW = "--repeats 5 --enough 2 --no-latency"  # for what takes seconds a call: two calls at the least
_REPORT = f"{_SMALL} --workload article --shared"
_VLLM = "--engine {vllm}:FLASH_ATTN,enable_prefix_caching=false,load_format=dummy"
_TRACE = "trace --model {small} --device {device} --workload article --json"
_WITHOUT_MIXED = "article,rollout,one,concurrent,long"

# Expected seconds: about 14 for the first process (imports 9, CUDA and weights 4), 4 for each further one; then calls
# as they were measured in earlier sittings (a call of 5.20.2 takes 20 s at 50 % and 32 s at 90 %, of SDPA 9 s, of the
# 0.5B model by Flatbed 0.1-2 s; vLLM starts in 50-75 s). What is not known yet is guessed high.
PARTS: tuple[Part, ...] = (
    # ---- call 1: the table of the 0.5B model, and what is measured of Flatbed alone
    Part("flatbed-small", 1, 70, "Flatbed, every workload",
         f"{_SMALL} --workload {ALL} --capacity {{most}} --engine flatbed --repeats 9 --warm 1 --enough 6", table=True),
    Part("vllm-small", 1, 100, "vLLM, every workload; its 90 % in the report on capacity",
         f"{_SMALL} --workload {ALL} --capacity 90% {_VLLM} {_FEW}", table=True, report=True),
    Part("transformers-small", 1, 160, "Transformers with a persistent manager (its best setting), every workload",
         f"{_SMALL} --workload {ALL} --capacity {{pool}} --engine {{old}}:{{flash}},persistent "
         f"--engine {{new}}:{{flash}},persistent {_FEW}", table=True),
    Part("cold", 1, 55, "Flatbed: first call of a process, smallest capacity and 90 %",
         f"{_SMALL} --workload article --capacity {{least}},{{most}} --engine flatbed --repeats 1 --no-latency "
         "--cold-repeats {colds}"),
    Part("flatness", 1, 35, "Flatbed: smallest capacity to 90 %, cold and warm; memory; the machine's ceilings",
         "engine --shape {small} --device {device} --workload article --flatness --repeats 5"),
    Part("profile", 1, 65, "Flatbed: how long the GPU idles",
         "engine --shape {small} --device {device} --workload article,mixed --profile", gpu=True),
    Part("verify", 1, 30, "flatbed plan --verify",
         "plan --model {small} --device {here} --workload article --engine flatbed --capacity {least} "
         "--verify --most-repeats 8 --json"),
    # ---- call 2: the report on capacity
    Part("report-flatbed", 2, 50, "Flatbed at four capacities, padded generate beside it",
         f"{_REPORT} --capacity {{capacities}} --engine flatbed --engine generate:sdpa --repeats 9 --warm 1 --enough 8",
         report=True),
    Part("report-new", 2, 95, "the newest Transformers with and without warm-up, the older one without",
         f"{_REPORT} --capacity {{capacities}} --engine {{new}}:{{flash}} --engine {{new}}:{{flash}},warmup=false "
         f"--engine {{old}}:{{flash}},warmup=false {_FEW}", report=True),
    Part("report-old", 2, 190, "the Transformers of the published report",
         f"{_REPORT} --capacity {{capacities}} --engine {{old}}:{{flash}} {_FEW}", report=True),
    Part("vllm-report", 2, 110, "vLLM at 30 % and 50 %",
         f"{_SMALL} --workload article --capacity 30%,50% {_VLLM} {_FEW}", report=True),
    Part("persistent", 2, 25, "the newest Transformers with a persistent manager at 90 %",
         f"{_REPORT} --capacity {{most}} --engine {{new}}:{{flash}},persistent {_FEW}", report=True),
    Part("trace-flatbed", 2, 20, "where Flatbed's time goes", f"{_TRACE} --warm --engine flatbed --capacity {{half}}"),
    Part("trace-old", 2, 40, "where the time of the older Transformers goes (10 %: at 90 % it is all warm-up)",
         f"{_TRACE} --engine {{old}}:{{flash}} --capacity {{tenth}}"),
    # ---- call 3: the 8B model, SDPA
    Part("flatbed-large", 3, 110, "Flatbed, 8B",
         f"{_LARGE} --workload {_WITHOUT_MIXED} --capacity {{most}} --engine flatbed "
         "--repeats 7 --enough 4 --no-latency", LARGE, table=True),
    Part("vllm-large", 3, 165, "vLLM, 8B",
         f"{_LARGE} --workload {_WITHOUT_MIXED} --capacity 90% {_VLLM} {_FEW}", LARGE, table=True),
    Part("transformers-large", 3, 80, "the newest Transformers with a persistent manager, 8B",
         f"{_LARGE} --workload article,rollout,one,concurrent --capacity {{pool}} "
         f"--engine {{new}}:{{flash}},persistent {_FEW}", LARGE, table=True),
    Part("report-sdpa", 3, 75, "Transformers with SDPA, at both ends",
         f"{_REPORT} --capacity {{least}},{{most}} --engine {{old}}:sdpa {_FEW}", report=True),
    Part("trace-new", 3, 35, "where the time of the newest Transformers goes",
         f"{_TRACE} --warm --engine {{new}}:{{flash}} --capacity {{half}}"),
    Part("trace-sdpa", 3, 45, "where the time goes with SDPA",
         f"{_TRACE} --engine {{new}}:sdpa --capacity {{tenth}}"),
    # ---- extras
    Part("mixed-large", None, 130, "the workload mixed, 8B: Flatbed and vLLM",
         f"{_LARGE} --workload mixed --capacity 90% --engine flatbed {_VLLM} {_FEW}", LARGE, table=True),
    Part("long-large", None, 60, "the workload long, 8B: Transformers",
         f"{_LARGE} --workload long --capacity {{pool}} --engine {{new}}:{{flash}},persistent {_FEW}", LARGE,
         table=True),
    Part("persistent-old", None, 60, "the older Transformers with a persistent manager at 90 %",
         f"{_REPORT} --capacity {{most}} --engine {{old}}:{{flash}},persistent {_FEW}", report=True),
    Part("sdpa-between", None, 130, "SDPA at 10 % and 50 %, both versions",
         f"{_REPORT} --capacity {{tenth}},{{half}} --engine {{old}}:sdpa --engine {{new}}:sdpa {_FEW}", report=True),
    Part("verify-new", None, 110, "flatbed plan --verify of the newest Transformers",
         "plan --model {small} --device {here} --workload article --engine {new}:{flash} --verify --most-repeats 6 "
         "--json"),
)  # fmt: skip

SETUP_S = 60  # of a call, for a machine to start and environments to be unpacked; not a part


def values(options: argparse.Namespace) -> dict[str, str]:
    """What the {names} in commands stand for."""
    if not options.tiny:
        return {
            "small": "shape:qwen2.5-0.5b", "large": "shape:qwen3-8b", "device": "cuda", "here": "cuda:0",
            "old": f"transformers@{options.old}", "new": f"transformers@{options.new}",
            "vllm": f"vllm@{options.vllm}", "flash": options.attention,
            "capacities": "64 blocks,10%,50%,90%", "least": "64 blocks", "tenth": "10%", "half": "50%", "most": "90%",
            "pool": "1800 blocks",  # holds every workload at once
            "colds": "3",
        }  # fmt: skip
    from importlib.metadata import version

    return {
        "small": "shape:tiny", "large": "shape:tiny", "device": "cpu", "here": "cpu",
        # One installation stands for both versions, under two names.
        "old": f"transformers@{version('transformers')}", "new": "transformers",
        "vllm": "vllm@0.24.0", "flash": "sdpa",
        # A percentage is one of all the machine's memory, and Transformers takes it.
        "capacities": "2 blocks,4 blocks,8 blocks,16 blocks", "least": "2 blocks", "tenth": "4 blocks",
        "half": "8 blocks", "most": "16 blocks", "pool": "32 blocks",
        "colds": "2",
    }  # fmt: skip


# Added to commands of a tiny sitting; of options that are given twice the last one counts.
TINY = {
    "bench": "--scale 0.05 --token-budget 256 --repeats 3 --warm 0 --enough 0.5",
    "trace": "--scale 0.05 --token-budget 256",
    "plan": "--scale 0.05 --dtype float32 --token-budget 256",
    "engine": "--scale 0.05 --repeats 2",
}
TINY_SCALE = 0.05


def words(part: Part, given: Mapping[str, str], tiny: bool) -> list[str]:
    """The command of a part, to be completed by where its results go."""
    found = [word.format_map(given) for word in part.command.split()]
    if tiny:
        found += shlex.split(TINY[found[0]])
    if found[0] == "engine":
        at = found.index("--shape") + 1
        found[at] = found[at].removeprefix("shape:")
    return found


def chosen(options: argparse.Namespace) -> list[Part]:
    """The parts that are asked for, in order: by name, of a call, or all but the extras."""
    by_name = {part.name: part for part in PARTS}
    for name in options.parts:
        if name not in by_name:
            raise SystemExit(f"unknown part {name!r}; known: {', '.join(by_name)}")
    if options.parts:
        return [by_name[name] for name in options.parts]
    return [part for part in PARTS if part.call is not None and options.call in (None, part.call)]


# ----------------------------------------------------------------------------------------------------------------- run

DONE = "part.json"  # in the folder of a part that ended by itself
LOG = "log.txt"
LOCK = "lock"
_PARTIAL = ".partial"
_FINE = (0, 1, 3)  # statuses with which a command leaves that has said all it can: 1 is that something was not measured


def run(options: argparse.Namespace) -> int:
    """Runs parts; what each took is printed as soon as it ends."""
    given, begun = values(options), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    lock = os.open(options.out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        raise SystemExit(f"another sitting runs in {options.out}") from None
    bad = 0
    for part in chosen(options):
        folder = options.out / part.name
        if part.gpu and options.tiny:
            say(f"{part.name}: left out, it needs a GPU")
            continue
        if (folder / DONE).is_file():
            if not options.again:
                say(f"{part.name}: done before, in {json.loads((folder / DONE).read_text())['seconds']:.0f} s")
                continue
            _put_away(folder)
        left = None if options.budget is None else options.budget - (time.monotonic() - begun)
        expected = 0.0 if options.tiny else part.seconds
        if left is not None and left < max(1.0, expected):
            say(f"{part.name}: not begun, {max(0, left):.0f} s are left of --budget and {expected:.0f} s are expected")
            continue
        say(f"{part.name}: {part.what}" + (f"; {expected:.0f} s expected" if expected else ""))
        bad += not _run_part(part, given, options, left)
    say(f"{time.monotonic() - begun:.0f} s in all; python benchmarks/sitting.py table {options.out}")
    return 1 if bad else 0


def _run_part(part: Part, given: Mapping[str, str], options: argparse.Namespace, left: float | None) -> bool:
    """Runs one part in a folder that gets its name when it has ended by itself. Whether it has."""
    scratch = options.out / f"{part.name}{_PARTIAL}"
    if scratch.exists():
        _put_away(scratch)
    limit = max(3 * part.seconds, 120.0) if left is None else left
    command = words(part, given, options.tiny)
    command += _environment(command, given, options) + _where(command[0], scratch, limit)
    scratch.mkdir()
    started, start = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    status = _run_command(command, scratch, limit)
    seconds = time.monotonic() - start
    if not options.keep_traces:
        (scratch / "trace.json").unlink(missing_ok=True)
    if status not in _FINE:
        why = f"ended after its limit of {limit:.0f} s" if status is None else f"ended with status {status}"
        say(f"{part.name}: {why}; the end of its log:\n{_tail(scratch / LOG)}")
        return False
    about = {
        "part": part.name, "what": part.what, "started": started, "seconds": seconds,
        "expected_s": None if options.tiny else part.seconds, "status": status, "command": told(command),
        "model": part.model, "shape": given["small" if part.model == SMALL else "large"],
        "scale": TINY_SCALE if options.tiny else 1.0, "tiny": options.tiny,
    }  # fmt: skip
    (scratch / DONE).write_text(json.dumps(about, indent=1) + "\n")
    scratch.rename(options.out / part.name)
    remark = "" if status == 0 else f" (status {status}: something was not measured or did not pass)"
    say(f"{part.name}: {seconds:.0f} s{remark}")
    return True


def _where(kind: str, scratch: Path, limit: float) -> list[str]:
    if kind == "bench":
        # Ends by itself before it would be ended: what is left out is then named in its records.
        return ["--max-seconds", f"{max(10.0, 0.85 * limit - 10):.0f}", "--out", str(scratch)]
    if kind == "trace":
        return ["--out", str(scratch / "trace.json")]
    return ["--out", str(scratch / "engine.json")] if kind == "engine" else []


def _environment(command: Sequence[str], given: Mapping[str, str], options: argparse.Namespace) -> list[str]:
    """`--python` and `--env` for the engines of this command, as it wants them."""
    kind = command[0]
    engines = [command[at + 1].partition(":")[0] for at, word in enumerate(command) if word == "--engine"]
    names = {name for engine in engines for name in (engine, engine.partition("@")[0])}
    found: list[str] = []
    wanted = list(options.env)
    if options.tiny and FAKE_VLLM.is_dir():
        wanted += [f"vllm:PYTHONPATH={FAKE_VLLM}", "vllm:VLLM_ENABLE_V1_MULTIPROCESSING=0"]
    for text in options.python:
        name, equals, path = text.partition("=")
        name = given.get(name, name)
        if not equals:
            raise SystemExit(f"cannot read --python {text!r}; it is written NAME=INTERPRETER")
        if name in names:
            found += ["--python", path if kind == "trace" else f"{name}={path}"]
    for text in wanted:
        name, colon, assigned = text.partition(":")
        name = given.get(name, name)
        if not colon or "=" not in assigned:
            raise SystemExit(f"cannot read --env {text!r}; it is written NAME:KEY=VALUE")
        if name in names:
            found += ["--env", assigned if kind == "trace" else f"{name}:{assigned}"]
    return found


# A shell that starts a sitting in the background lets it ignore SIGINT, by which a command is asked to end.
_FLATBED = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from flatbed.cli import main; main()"
)


def _run_command(command: Sequence[str], scratch: Path, limit: float) -> int | None:
    """Its status, or None when it was ended after `limit` seconds. What it prints goes to files in `scratch`."""
    kind, *rest = command
    if kind == "engine":
        full = [sys.executable, str(HERE / "engine.py"), *rest]
    else:
        full = [sys.executable, "-c", _FLATBED, *command]
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    answer = scratch / (f"{kind}.json" if kind in ("trace", "plan") else "said.txt")
    if kind == "trace":
        answer = scratch / "breakdown.json"
    with (scratch / LOG).open("w") as log, answer.open("w") as said:
        process = subprocess.Popen(
            full, stdin=subprocess.DEVNULL, stdout=said, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # it ends its own workers on SIGINT, and keeps what was measured
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=15)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _put_away(folder: Path) -> None:
    """Renames what an earlier run left, so that nothing is lost."""
    number = 1
    while (new := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(new)


def _tail(log: Path) -> str:
    return "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-8:])


def told(command: Sequence[str]) -> str:
    """A command as it is published: folders of this machine left out."""
    short = [re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s=:,]*/", "", word).removesuffix(_PARTIAL) for word in command]
    program = ["python", "benchmarks/engine.py", *short[1:]] if short[0] == "engine" else ["flatbed", *short]
    return shlex.join(program)


def say(line: str) -> None:
    print(line, flush=True)


# --------------------------------------------------------------------------------------------------------------- table


@dataclass
class Row:
    """One engine on one workload of the table. Seconds of whole calls; see `sitting.md` for what the columns mean."""

    model: str
    workload: str
    engine: str
    setting: str
    median_s: float | None
    low_s: float | None
    high_s: float | None
    calls: int
    tokens_per_s: float | None
    bound_s: float | None = None
    over_bound: float | None = None
    target_s: float | None = None
    mark: str = ""
    part: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass
class Check:
    """One of the targets that are no workload's time."""

    name: str
    measured: str
    target: str
    met: bool


def table(options: argparse.Namespace) -> int:
    """Reads what was measured and writes sitting.json, sitting.md and the report on capacity."""
    from flatbed.lab import report

    parts = _read_parts(options.out)
    if not parts:
        raise SystemExit(f"{options.out} has no finished part: python benchmarks/sitting.py run --out {options.out}")
    ceilings = next((p["engine"]["ceilings"] for p in parts.values() if "ceilings" in p.get("engine", {})), None)
    rows = _rows(parts, ceilings)
    result = {
        "date": min(p["started"][:10] for p in parts.values()),
        "machine": _machine(parts),
        "versions": _versions(parts),
        "ceilings": ceilings,
        "tiny": any(p["tiny"] for p in parts.values()),
        "rows": [dataclasses.asdict(row) for row in rows],
        "checks": [dataclasses.asdict(check) for check in _checks(parts)],
        "capacity": _capacity(parts),
        "traces": {name: _trace_lines(p["breakdown"]) for name, p in parts.items() if "breakdown" in p},
        "verified": {name: _verified(p["plan"]) for name, p in parts.items() if "plan" in p},
        "parts": {
            name: {key: p[key] for key in ("what", "command", "started", "seconds", "expected_s", "status")}
            for name, p in parts.items()
        },
        "not_run": [part.name for part in PARTS if part.name not in parts],
    }
    (options.out / "sitting.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "sitting.md").write_text(markdown(result))
    records = [record for p in parts.values() if p["report"] for record in p["records"] if _is_article(record)]
    if records:
        report.write(records, options.out / "report")
    say(f"{options.out}/sitting.md, sitting.json" + (", report/report.md, report/report.html" if records else ""))
    return 0


def _is_article(record: Mapping[str, Any]) -> bool:
    return record["workload"] is None or record["workload"]["name"] == "article"


def _read_parts(out: Path) -> dict[str, dict[str, Any]]:
    """What each finished part left, by name, in the order of PARTS."""
    from flatbed.errors import ConfigError
    from flatbed.lab import report

    found: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        folder = out / part.name
        if not (folder / DONE).is_file():
            continue
        read = {**json.loads((folder / DONE).read_text()), "table": part.table, "report": part.report, "records": []}
        for name in ("engine", "breakdown", "plan"):
            with contextlib.suppress(OSError, ValueError):  # it ended without having anything to say
                read[name] = json.loads((folder / f"{name}.json").read_text())
        with contextlib.suppress(ConfigError):
            read["records"] = report.read(folder)
        found[part.name] = read
    return found


def _rows(parts: Mapping[str, Mapping[str, Any]], ceilings: dict[str, float] | None) -> list[Row]:
    from flatbed.lab.summary import summarise

    rows = []
    for name, part in parts.items():
        if not part["table"]:
            continue
        for summary in summarise(part["records"]):
            for point in summary.points:
                stat = point.steady
                row = Row(
                    part["model"], summary.workload["name"], summary.engine, point.label,
                    None if stat is None else stat.median, None if stat is None else stat.low,
                    None if stat is None else stat.high, 0 if stat is None else stat.count, point.tokens_per_s,
                    part=name, failures=point.failures,
                )  # fmt: skip
                _judge(row, part, ceilings)
                rows.append(row)
    order = [SMALL, LARGE]
    workloads = ALL.split(",")
    rows = [row for row in rows if row.workload in workloads]
    return sorted(rows, key=lambda row: (order.index(row.model), workloads.index(row.workload)))


def _judge(row: Row, part: Mapping[str, Any], ceilings: dict[str, float] | None) -> None:
    """Adds the bound, and for Flatbed the target and whether it was met."""
    if row.workload in ALL.split(",") and ceilings is not None:
        row.bound_s = _bound(part["shape"], row.workload, part["scale"], ceilings)
        if row.median_s is not None:
            row.over_bound = row.median_s / row.bound_s
    if row.engine.partition(":")[0] != "flatbed" or row.median_s is None or part["tiny"]:
        return
    row.target_s = TARGETS.get((row.model, row.workload))
    if row.target_s is not None:
        row.mark = mark(row.median_s, row.high_s, row.target_s)


def mark(median_s: float, high_s: float | None, target_s: float) -> str:
    """Whether a target was met, in words."""
    if median_s > target_s:
        return f"missed by {median_s / target_s - 1:.1%}"
    return "met" if high_s is None or high_s <= target_s else "met by the median, not by the whole spread"


def _bound(shape: str, workload: str, scale: float, ceilings: dict[str, float]) -> float:
    from bounds import bound, parameters

    from flatbed.lab import models
    from flatbed.lab.workloads import make

    config = models.load_config(shape)
    longest, vocabulary = models.limits(shape)
    weights = _PARAMETERS.setdefault(shape, parameters(config))
    itemsize = 4 if shape == "shape:tiny" else 2  # float32 on the CPU, bfloat16 on the GPU
    return bound(config, weights, make(workload, vocabulary, longest, scale=scale), ceilings, itemsize)


_PARAMETERS: dict[str, int] = {}


def _checks(parts: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """The targets that are no workload's time, as far as they were measured."""
    flatness = parts.get("flatness", {}).get("engine", {}).get("rows", [])
    profiles = parts.get("profile", {}).get("engine", {}).get("profiles", [])
    firsts = _first_calls(parts.get("cold", {}).get("records", ()))
    return [*_first_call_check(firsts), *_flatness_checks(flatness), *_memory_checks(flatness), *_idle_checks(profiles)]


def _first_call_check(firsts: Sequence[float]) -> Iterable[Check]:
    if firsts:
        median = statistics.median(firsts)
        measured = f"{median:.2f} s (processes: {', '.join(f'{second:.2f}' for second in firsts)})"
        name = "article, engine and first call of a process that has loaded the model"
        yield Check(name, measured, f"{FIRST_CALL_S} s", median <= FIRST_CALL_S)


def _flatness_checks(rows: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    for name, key in (("warm calls", "median_s"), ("an engine and its first call", "median_first_s")):
        if rows:
            worst = max(row[key] / rows[0][key] for row in rows)
            each = ", ".join(f"{row['capacity']} {row[key]:.4f} s" for row in rows)
            name = f"flat from the smallest capacity to 90 %: {name}"
            yield Check(name, f"{worst:.3f} ({each})", f"{FLATNESS}", worst <= FLATNESS)


def _memory_checks(rows: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    for row in rows[-1:]:
        live, committed, released = (
            row[key] for key in ("live_peak_mib", "committed_mib", "committed_after_release_mib")
        )
        most = COMMITTED_OVER_LIVE * live + COMMITTED_MIB
        name = f"K/V memory at {row['capacity']}, {live:.1f} MiB live"
        yield Check(name, f"{committed:.1f} MiB", f"{most:.0f} MiB", committed <= most)
        yield Check(
            "K/V memory after release()", f"{released:.1f} MiB", f"{RELEASED_MIB} MiB", released <= RELEASED_MIB
        )


def _idle_checks(profiles: Iterable[Mapping[str, Any]]) -> Iterable[Check]:
    for profile in profiles:
        idle, whole = profile["idle_in_steady_decode"], profile["idle"]
        name = f"{profile['workload']}: GPU idle in steady decode"
        yield Check(name, f"{idle:.1%} (whole call {whole:.1%})", f"{IDLE:.0%}", idle <= IDLE)


def _first_calls(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Seconds of construction, warm-up and first call of each fresh process."""
    fresh = [r for r in records if r["outcome"] == "ok" and r["fresh"] and r["phase"] in ("start", "first")]
    pairs: dict[tuple[Any, int], dict[str, float]] = {}
    for record in fresh:
        key = (record["settings"]["capacity"], record["cold_round"])
        pairs.setdefault(key, {})[record["phase"]] = record["seconds"]
    return [sum(pair.values()) for pair in pairs.values() if len(pair) == 2]


def _capacity(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Article at every capacity: one entry for an engine, with its verdict."""
    from flatbed.lab.summary import summarise

    records = [record for p in parts.values() if p["report"] for record in p["records"] if _is_article(record)]
    return [
        {
            "engine": summary.engine,
            "verdict": summary.verdict(),
            "points": [
                {
                    "capacity": point.label, "tokens": point.x, "failures": point.failures, "parts": point.parts,
                    "committed": point.memory.get("committed"), "live": point.memory.get("live"),
                    **({} if point.steady is None else {
                        "median_s": point.steady.median, "low_s": point.steady.low, "high_s": point.steady.high,
                        "calls": point.steady.count}),
                }
                for point in summary.points
            ],
        }
        for summary in summarise(records)
    ]  # fmt: skip


def _trace_lines(value: Mapping[str, Any]) -> list[str]:
    """What a trace says, in a few lines."""
    from flatbed.lab.trace_events import DECODE, PREFILL
    from flatbed.lab.traced import Trace

    trace = Trace.from_json(value)
    busy = trace.window - trace.category("idle")
    lines = [f"{trace.engine}, capacity {trace.settings['capacity']}: {trace.window:,.0f} ms, busy {busy:,.0f} ms"]
    phases = {phase: sum(categories.values()) for phase, categories in trace.phases.items()}
    lines.append("by phase: " + ", ".join(f"{phase} {ms:,.1f} ms" for phase, ms in phases.items() if ms > 0))
    totals: dict[str, float] = {}
    for categories in trace.phases.values():
        for category, ms in categories.items():
            totals[category] = totals.get(category, 0.0) + ms
    most = sorted(totals.items(), key=lambda item: -item[1])
    lines.append("by category: " + ", ".join(f"{name} {ms:,.1f} ms" for name, ms in most[:6] if ms > 0))
    for kind in (PREFILL, DECODE):
        ratio = trace.ratio(kind)
        if ratio is not None:
            lines.append(f"{kind} attention was given {ratio:,.2f} times the keys that were live")
    return lines


def _verified(value: Mapping[str, Any]) -> list[str]:
    from flatbed.lab.plan_verify import Verdict, conclusions

    return conclusions([Verdict(**{**one, "why": tuple(one["why"])}) for one in value["verified"]])


def _machine(parts: Mapping[str, Mapping[str, Any]]) -> str:
    for part in parts.values():
        for record in part["records"]:
            machine = record["machine"]
            gpu = [machine["gpu"], f"driver {machine.get('driver', 'unknown')}"] if "gpu" in machine else []
            return ", ".join(filter(None, [*gpu, machine["cpu"], f"{machine['cores']} cores", machine["system"]]))
    return next((p["engine"]["machine"] for p in parts.values() if "engine" in p), "unknown")


def _versions(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    return {
        record["engine"]: record["versions"]
        for part in parts.values()
        for record in part["records"]
        if record["versions"]
    }


# ------------------------------------------------------------------------------------------------------------ Markdown


_BOUND = (
    "The bound of a workload is the time in which weights and live K/V can be read once a step at the one and the "
    "prefill's operations be done at the other; `over bound` is how many times as long the call took."
)


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of a sitting."""
    lines = ["# One sitting, all engines", "", f"{result['date']}, {result['machine']}."]
    if result["tiny"]:
        lines += ["", "**A tiny sitting: a toy model on the CPU, to test the script. Its figures mean nothing.**"]
    if result["ceilings"]:
        copy, product = result["ceilings"]["copy_tb_per_s"], result["ceilings"]["product_tflop_per_s"]
        lines += ["", f"A large copy reaches {copy:.3g} TB/s here, a large product {product:.3g} TFLOP/s. {_BOUND}"]
    lines += _section("In short", _short_table(result["rows"]))
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        lines += [
            "",
            f"## Whole calls, {model}",
            "",
            *_workload_table(r for r in result["rows"] if r["model"] == model),
        ]
    lines += _section("Other targets", _check_table(result["checks"]))
    lines += _section("Article at every capacity", _capacity_table(result["capacity"]))
    lines += [f"- **{_engine_name(one['engine'])}**: {one['verdict']}" for one in result["capacity"]]
    for name, said in result["traces"].items():
        lines += _section(f"Traced: {name}", [f"- {line}" for line in said])
    for name, said in result["verified"].items():
        lines += _section(f"Planned and verified: {name}", [f"- {line}" for line in said])
    lines += _section("Parts", _part_table(result["parts"]))
    if result["not_run"]:
        lines += ["", f"Not run: {', '.join(result['not_run'])}."]
    lines += ["", *(f"- {name}: `{part['command']}`" for name, part in result["parts"].items())]
    lines += _section("Versions", [f"- {engine}: {_told_versions(v)}" for engine, v in result["versions"].items()])
    return "\n".join(lines) + "\n"


def _section(title: str, body: list[str]) -> list[str]:
    return ["", f"## {title}", "", *body] if body else []


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    made = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if not made:
        return []
    return [f"| {' | '.join(cells)} |" for cells in ([*header], ["---"] * len(header), *made)]


# Of vLLM in every part: said once, below the first table.
_VLLM_OPTIONS = ",enable_prefix_caching=false,load_format=dummy"
_NOTES = (
    "Seconds of a whole call, medians of steady calls. Transformers: the better of its two versions. vLLM: prefix "
    "caching off, weights made up by itself (`load_format=dummy`). Peers over Flatbed: how many times as long the "
    "faster of the two takes."
)


def _engine_name(engine: str) -> str:
    return engine.removesuffix(_VLLM_OPTIONS)


def _short_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model and workload: Flatbed, the best of each peer, bound and target."""
    measured = [row for row in rows if row["median_s"] is not None]
    best: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in measured:
        its = best.setdefault((row["model"], row["workload"]), {})
        name = re.split("[@:]", row["engine"])[0]
        if name not in its or row["median_s"] < its[name]["median_s"]:
            its[name] = row
    made = []
    for (model, workload), its in best.items():
        peers = [row["median_s"] for name, row in its.items() if name != "flatbed"]
        own = its.get("flatbed")
        ratio = f"{min(peers) / own['median_s']:.2f}" if own and peers else ""
        shown = [f"{its[name]['median_s']:.4f}" if name in its else "" for name in ("flatbed", "transformers", "vllm")]
        bound = next((f"{row['bound_s']:.4f}" for row in its.values() if row["bound_s"]), "")
        target = f"{own['target_s']:g}" if own and own["target_s"] else ""
        made.append((f"{model} {workload}", *shown, ratio, bound, target, own["mark"] if own else ""))
    header = ("workload", "Flatbed", "Transformers", "vLLM", "peers over Flatbed", "bound", "target", "")
    return [*_markdown_table(header, made), "", _NOTES] if made else []


def _workload_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    header = (
        "workload",
        "engine",
        "setting",
        "seconds",
        "spread",
        "calls",
        "tokens/s",
        "bound",
        "over bound",
        "target",
        "",
    )
    made = []
    for row in rows:
        measured = row["median_s"] is not None
        made.append((
            row["workload"], _engine_name(row["engine"]), row["setting"],
            f"{row['median_s']:.4f}" if measured else "; ".join(row["failures"]) or "not measured",
            f"{row['low_s']:.4f} – {row['high_s']:.4f}" if measured else "",
            str(row["calls"]) if measured else "",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "",
            f"{row['bound_s']:.4f}" if row["bound_s"] else "",
            f"{row['over_bound']:.1f}" if row["over_bound"] else "",
            f"{row['target_s']:g}" if row["target_s"] else "",
            row["mark"],
        ))  # fmt: skip
    return _markdown_table(header, made)


def _check_table(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(c["name"], c["measured"], c["target"], "met" if c["met"] else "**missed**") for c in checks]
    return _markdown_table(("what", "measured", "target", ""), rows)


def _capacity_table(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            _engine_name(one["engine"]), point["capacity"], f"{point['tokens']:,.0f}" if point["tokens"] else "",
            f"{point['median_s']:.4f}" if "median_s" in point else "; ".join(point["failures"]) or "not measured",
            f"{point['low_s']:.4f} – {point['high_s']:.4f}" if "median_s" in point else "",
            str(point.get("calls", "")), _mib(point["committed"]), _mib(point["live"]),
        )
        for one in engines
        for point in one["points"]
    ]  # fmt: skip
    header = ("engine", "capacity", "tokens", "seconds", "spread", "calls", "K/V taken (MiB)", "K/V live (MiB)")
    return [*_markdown_table(header, rows), ""] if rows else []


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.1f}"


def _part_table(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            name,
            p["what"],
            "" if p["expected_s"] is None else f"{p['expected_s']:.0f}",
            f"{p['seconds']:.0f}",
            str(p["status"]),
        )
        for name, p in parts.items()
    ]
    return _markdown_table(("part", "what", "expected (s)", "took (s)", "status"), rows)


def _told_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# ---------------------------------------------------------------------------------------------------------------- pack

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def pack(options: argparse.Namespace) -> int:
    """Packs the folder into one file. Refuses names that do not travel everywhere."""
    files = sorted(path for path in options.out.rglob("*") if path.is_file() and path.name != LOCK)
    for path in files:
        for name in path.relative_to(options.out).parts:
            if not _PLAIN.fullmatch(name):
                raise SystemExit(f"{path}: only letters, digits, '.', '_' and '-' are allowed in names")
    target = options.file or options.out.with_name(f"{options.out.name}.tar.gz")
    with tarfile.open(target, "w:gz") as archive:
        for path in files:
            archive.add(path, f"{options.out.name}/{path.relative_to(options.out)}")
    say(f"{target}: {len(files)} files, {target.stat().st_size / 1e6:.1f} MB")
    return 0


def show(options: argparse.Namespace) -> int:
    """Lists the parts by call, with what they are expected to take."""
    given = values(options)
    for call in (1, 2, 3, None):
        mine = [part for part in PARTS if part.call == call]
        total = sum(part.seconds for part in mine)
        say(f"extras, {total:.0f} s: only when named" if call is None else f"call {call}: {total:.0f} s expected")
        for part in mine:
            say(f"  {part.name:20} {part.seconds:4.0f} s  {part.what}")
            if options.commands:
                say(f"    {told(words(part, given, options.tiny))}")
    whole = sum(part.seconds for part in PARTS if part.call is not None)
    say(f"all three calls: {whole:.0f} s, and about {SETUP_S} s until the machine is there and unpacked")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="list|run|table|pack")

    def add(name: str, action: Any, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=action.__doc__)
        made.set_defaults(action=action)
        return made

    listing, running = add("list", show, "the parts"), add("run", run, "run parts")
    listing.add_argument("--commands", action="store_true", help="with the command of each")
    for made in (listing, running):
        made.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: to test the script")
        made.add_argument("--old", default="5.20.2", help="version of Transformers (default: %(default)s)")
        made.add_argument("--new", default="5.24.0", help="another, newer one (default: %(default)s)")
        made.add_argument("--vllm", default="0.24.0", help="version of vLLM (default: %(default)s)")
        made.add_argument("--attention", default="flash_attention_3", help="of Transformers (default: %(default)s)")
    running.add_argument("parts", nargs="*", help="by name; otherwise those of --call, or all but the extras")
    running.add_argument("--out", type=Path, required=True, help="folder of the sitting; may have finished parts")
    running.add_argument("--call", type=int, choices=(1, 2, 3), help="the parts of one call")
    running.add_argument("--budget", type=float, help="seconds; nothing is begun that is not expected to end within")
    running.add_argument("--python", action="append", default=[], help="NAME=INTERPRETER of an engine")
    running.add_argument("--env", action="append", default=[], help="NAME:KEY=VALUE, of an engine's environment")
    running.add_argument("--again", action="store_true", help="run finished parts again; what they left is kept")
    running.add_argument("--keep-traces", action="store_true", help="keep the profiler's trace files (hundreds of MB)")
    add("table", table, "make the tables").add_argument("out", type=Path)
    packing = add("pack", pack, "pack the folder")
    packing.add_argument("out", type=Path)
    packing.add_argument("file", type=Path, nargs="?")
    options = parser.parse_args()
    if getattr(options, "out", None) is not None:
        options.out = options.out.resolve()
    sys.path[:0] = [str(HERE), str(SOURCE)]
    raise SystemExit(options.action(options))


if __name__ == "__main__":
    main()
