"""benchmarks/sitting.py: a tiny part from end to end, its tables re-read; its list of parts; its judgements."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "sitting.py"


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module that stands beside sitting.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def sitting(imported: Callable[[str], Any]) -> Any:
    return imported("sitting")


@pytest.fixture
def parts(imported: Callable[[str], Any]) -> Any:
    return imported("sitting_parts")


@pytest.fixture
def table(imported: Callable[[str], Any]) -> Any:
    return imported("sitting_table")


def command(*arguments: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def cells(text: str, first: str, which: int) -> list[dict[str, str]]:
    """The rows of the Markdown table with that number, of those whose first column has that name."""
    lines = text.splitlines()
    start = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")][which]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in _until_blank(lines[start:])]
    return [dict(zip(split[0], row, strict=True)) for row in split[2:]]


def _until_blank(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def flatness(out: Path) -> dict[str, Any]:
    """Puts a part there as benchmarks/engine.py leaves it, with this machine's ceilings and figures that are known."""
    from bounds import ceilings

    memory = {"live_peak_mib": 100.0, "committed_mib": 600.0, "committed_after_release_mib": 0.0}
    rows = [
        {"capacity": capacity, "median_s": warm, "median_first_s": cold, **memory}
        for capacity, warm, cold in (("3 blocks", 0.1, 1.0), ("90%", 0.101, 1.5))
    ]
    engine = {"rows": rows, "ceilings": ceilings("cpu"), "machine": "CPU"}
    about = json.loads((out / "vllm-small" / "part.json").read_text())
    (out / "flatness").mkdir()
    (out / "flatness" / "part.json").write_text(json.dumps({**about, "part": "flatness"}))
    (out / "flatness" / "engine.json").write_text(json.dumps(engine))
    return engine


def test_parts_are_run_once_and_their_tables_say_what_was_measured(table: Any, tmp_path: Path) -> None:
    out = tmp_path / "S"
    said = command("run", "--tiny", "--out", str(out), "vllm-small")
    assert re.search(r"^vllm-small: \d+ s$", said, re.MULTILINE)
    again = command("run", "--tiny", "--out", str(out), "vllm-small")
    assert re.search(r"^vllm-small: done before, in \d+ s$", again, re.MULTILINE)
    assert "cold: not begun, 0 s are left" in command("run", "--tiny", "--out", str(out), "cold", "--budget", "-1")

    engine = flatness(out)
    assert "report/report.html" in table.write(out)
    result = json.loads((out / "sitting.json").read_text())
    records = [json.loads(line) for line in (out / "vllm-small" / "runs.jsonl").read_text().splitlines()]
    short, every = (cells((out / "sitting.md").read_text(), "workload", number) for number in (0, 1))
    workloads = ["article", "mixed", "rollout", "one", "concurrent", "long"]
    assert [row["workload"] for row in result["rows"]] == [row["workload"] for row in every] == workloads
    for row, told in zip(result["rows"], every, strict=True):
        steady = [r["seconds"] for r in records if r["phase"] == "steady" and r["workload"]["name"] == row["workload"]]
        assert row["median_s"] == statistics.median(steady)
        assert float(told["seconds"]) == pytest.approx(row["median_s"], abs=5e-5)
        assert (row["calls"], told["calls"]) == (len(steady), str(len(steady)))
        assert row["bound_s"] > 0
        assert row["over_bound"] == pytest.approx(row["median_s"] / row["bound_s"])
        assert row["target_s"] is None, "only Flatbed has targets, and a toy has none"
    assert [(row["workload"], row["vLLM"]) for row in short] == [
        (f"0.5B {told['workload']}", told["seconds"]) for told in every
    ]
    assert result["ceilings"] == engine["ceilings"]
    checks = {check["name"].rpartition(": ")[2]: (check["measured"], check["met"]) for check in result["checks"]}
    assert checks == {
        "warm calls": ("1.010 (3 blocks 0.1000 s, 90% 0.1010 s)", True),
        "an engine and its first call": ("1.500 (3 blocks 1.0000 s, 90% 1.5000 s)", False),
        "K/V memory at 90%, 100.0 MiB live": ("600.0 MiB", False),  # 1.25 x 100 + 400 are allowed
        "K/V memory after release()": ("0.0 MiB", True),
    }
    assert "vllm@0.24.0" in (out / "report" / "report.md").read_text()
    assert str(Path.home()) not in (out / "sitting.md").read_text()
    assert "cold" in result["not_run"]

    command("pack", str(out))
    with tarfile.open(tmp_path / "S.tar.gz") as archive:
        names = archive.getnames()
    assert {"S/sitting.md", "S/sitting.json", "S/vllm-small/runs.jsonl", "S/flatness/engine.json"} <= set(names)
    (out / "a name").write_text("")
    assert "only letters, digits" in command("pack", str(out), expect=1)


def test_a_call_fits_into_ten_minutes_and_every_target_has_its_part(parts: Any, table: Any) -> None:
    assert {part.call for part in parts.PARTS} == {*parts.CALLS, None}
    for call in parts.CALLS:
        assert 0 < sum(part.seconds for part in parts.PARTS if part.call == call) <= 600 - parts.SETUP_S
    measured = {
        (part.model, workload)
        for part in parts.PARTS
        if part.table and part.call is not None and "--engine flatbed" in part.command
        for workload in part.command.split("--workload ")[1].split()[0].split(",")
    }
    assert set(table.TARGETS) <= measured
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names)


def test_commands_name_no_folder_of_this_machine(parts: Any) -> None:
    told = parts.told(["bench", "--env", "vllm:PYTHONPATH=/home/me/vllm:/home/me/site", "--out", "/tmp/S/x"])
    assert told == "flatbed bench --env vllm:PYTHONPATH=vllm:site --out x"
    told = parts.told(["fidelity", "--model", "/home/me/model.gguf", "--out", "/tmp/S/f.partial/fidelity.json"])
    assert told == "python benchmarks/fidelity.py --model model.gguf --out fidelity.json"
    assert parts.told(["tests", "-n", "12", "tests/gpu"]) == "python -m pytest -n 12 tests/gpu"


@pytest.mark.parametrize(
    ("median", "high", "said"),
    [(0.14, 0.149, "met"), (0.15, 0.16, "met by the median, not by the whole spread"), (0.18, 0.2, "missed by 20.0%")],
)
def test_marks(table: Any, median: float, high: float, said: str) -> None:
    row = table.Row("0.5B", "article", "flatbed", "90%", median, 0.1, high, 5, None)
    table._judge(row, {"tiny": False}, None)
    assert (row.target_s, row.mark) == (0.15, said)
    peer = table.Row("0.5B", "article", "vllm", "90%", median, 0.1, high, 5, None)
    table._judge(peer, {"tiny": False}, None)
    assert (peer.target_s, peer.mark) == (None, "")


def test_only_fresh_processes_count_as_first_calls(table: Any) -> None:
    def record(phase: str, seconds: float, **more: Any) -> dict[str, Any]:
        base = {"phase": phase, "seconds": seconds, "outcome": "ok", "fresh": True, "cold_round": 0}
        return {**base, "settings": {"capacity": "90%"}, **more}

    records = [
        record("start", 0.5), record("first", 1.0), record("steady", 0.1),
        record("start", 0.25, cold_round=1), record("first", 1.0, cold_round=1),
        record("start", 9.0, fresh=False, cold_round=2), record("first", 9.0, fresh=False, cold_round=2),
        record("start", 9.0, cold_round=3), record("first", 9.0, cold_round=3, outcome="died"),
    ]  # fmt: skip
    assert table._first_calls(records) == [1.5, 1.25]
    (check,) = table._first_call_check([1.5, 1.25, 1.75])
    assert check.met
    assert check.measured == "1.50 s (processes: 1.50, 1.25, 1.75)"


def test_what_is_misspelt_is_told(tmp_path: Path) -> None:
    out = str(tmp_path / "S")
    assert "unknown part 'nothing'; known: tests, " in command("run", "--out", out, "nothing", expect=1)
    assert "has no finished part" in command("table", out, expect=1)
    told = command("run", "--tiny", "--out", out, "cold", "--python", "flatbed", expect=1)
    assert "written NAME=INTERPRETER" in told


def test_environments_reach_the_commands_of_their_engines_alone(sitting: Any, parts: Any) -> None:
    options = argparse.Namespace(
        tiny=False, old="5.20.2", new="5.24.0", vllm="0.24.0", attention="flash_attention_3", demo="demo",
        env=["old:PYTHONPATH=OLD", "new:PYTHONPATH=NEW", "vllm:A=1"], python=["vllm=VLLM/bin/python"],
    )  # fmt: skip
    given = parts.values(options)
    commands = {part.name: parts.words(part, given, tiny=False) for part in parts.PARTS}

    def added(name: str) -> list[str]:
        return sitting._environment(commands[name], given, options)

    assert added("flatbed-small") == []
    assert added("vllm-small") == ["--python", "vllm@0.24.0=VLLM/bin/python", "--env", "vllm@0.24.0:A=1"]
    assert added("transformers-small") == [
        "--env", "transformers@5.20.2:PYTHONPATH=OLD", "--env", "transformers@5.24.0:PYTHONPATH=NEW",
    ]  # fmt: skip
    assert added("trace-old") == ["--env", "PYTHONPATH=OLD"], "flatbed trace has one engine, and names none"
