"""One sitting: everything that is published about Flatbed and its peers, measured on one machine, in parts.

    python benchmarks/sitting.py list                             # the parts, what they take, in which call they run
    python benchmarks/sitting.py run --out S --call 1 --budget 560 --env old:PYTHONPATH=OLD --env new:PYTHONPATH=NEW
    python benchmarks/sitting.py run --out S vllm-small --python vllm=VLLM/bin/python       # or parts by name
    python benchmarks/sitting.py table S                          # S/sitting.json, S/sitting.md, S/report/
    python benchmarks/sitting.py pack S                           # S.tar.gz
    python benchmarks/sitting.py run --out T --tiny               # all of it with a tiny model on the CPU, in minutes

A part is one command: `flatbed bench`, `trace` or `plan`, a script that stands beside this one, or the tests that need
a GPU. Each writes a folder of its own under S, so that a sitting can be interrupted and resumed: a part that ended by
itself is not run again. Engines that are in other environments are named by `--python NAME=INTERPRETER` and `--env
NAME:KEY=VALUE`, NAME being `old` and `new` (the two versions of Transformers), `vllm`, or an engine as in `flatbed
bench`; what is not installed is named and skipped. Training runs with the TRL and the Transformers that this script
itself would import. README.md beside this file has the whole way for a GPU machine that reaches no registry.

`--budget SECONDS` begins nothing that is not expected to end within it. The parts are divided into calls of at most ten
minutes, because that is how GPU time is often lent; `list` says what each part is expected to take on one
H200, and `run` beside it what it took.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sitting_parts import (
    CALLS,
    DONE,
    PARTIAL,
    PARTS,
    SAID,
    SCRIPTS,
    SETUP_S,
    SMALL,
    TESTS,
    TINY_SCALE,
    Part,
    chosen,
    told,
    values,
    words,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
FAKE_VLLM = ROOT / "tests" / "unit" / "fake_vllm"

# ----------------------------------------------------------------------------------------------------------------- run

LOG = "log.txt"
LOCK = "lock"
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
    scratch = options.out / f"{part.name}{PARTIAL}"
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
    if status not in ((0,) if command[0] == TESTS else _FINE):
        log = SAID if command[0] == TESTS else LOG
        why = f"ended after its limit of {limit:.0f} s" if status is None else f"ended with status {status}"
        say(f"{part.name}: {why}; the end of its log:\n{_tail(scratch / log)}")
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
    return ["--out", str(scratch / SCRIPTS[kind][1])] if kind in SCRIPTS else []


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
    if kind == TESTS:  # what an engine says when its model's weights move is no fault there
        full = [sys.executable, "-m", "pytest", "-rfEs", "-p", "no:cacheprovider", "-W", "default", *rest]
    elif kind in SCRIPTS:
        full = [sys.executable, str(ROOT / SCRIPTS[kind][0]), *rest]
    else:
        full = [sys.executable, "-c", _FLATBED, *command]
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    answer = scratch / (f"{kind}.json" if kind in ("trace", "plan") else SAID)
    if kind == "trace":
        answer = scratch / "breakdown.json"
    with (scratch / LOG).open("w") as log, answer.open("w") as said:
        process = subprocess.Popen(
            full, stdin=subprocess.DEVNULL, stdout=said, stderr=log, start_new_session=True,
            cwd=ROOT if kind == TESTS else None,
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


def say(line: str) -> None:
    print(line, flush=True)


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


def table(options: argparse.Namespace) -> int:
    """Makes the tables and the report on capacity of what was measured so far."""
    from sitting_table import write

    say(f"{options.out}/{', '.join(write(options.out))}")
    return 0


def show(options: argparse.Namespace) -> int:
    """Lists the parts by call, with what they are expected to take."""
    given = values(options)
    for call in (*CALLS, None):
        mine = [part for part in PARTS if part.call == call]
        total = sum(part.seconds for part in mine)
        title = "extras, only when named" if call is None else f"call {call}: {CALLS[call]}"
        say(f"{title}; {total:.0f} s expected")
        for part in mine:
            say(f"  {part.name:20} {part.seconds:4.0f} s  {part.what}")
            if options.commands:
                say(f"    {told(words(part, given, options.tiny))}")
    whole = sum(part.seconds for part in PARTS if part.call is not None)
    say(f"all calls: {whole:.0f} s, and for each about {SETUP_S} s until the machine is there and unpacked")
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
        made.add_argument("--new", default="5.25.0", help="another, newer one (default: %(default)s)")
        made.add_argument("--vllm", default="0.24.0", help="version of vLLM (default: %(default)s)")
        made.add_argument(
            "--demo", default="demo", help="SmolLM2-135M: a folder or a .gguf file (default: %(default)s)"
        )
        made.add_argument("--attention", default="flash_attention_3", help="of Transformers (default: %(default)s)")
    running.add_argument("parts", nargs="*", help="by name; otherwise those of --call, or all but the extras")
    running.add_argument("--out", type=Path, required=True, help="folder of the sitting; may have finished parts")
    running.add_argument("--call", type=int, choices=tuple(CALLS), help="the parts of one call")
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
    sys.path[:0] = [str(SOURCE)]
    raise SystemExit(options.action(options))


if __name__ == "__main__":
    main()
