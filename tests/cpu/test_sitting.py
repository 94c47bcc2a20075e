"""benchmarks/sitting.py: two tiny parts from end to end, their tables re-read; its list of parts; its judgements."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sitting.py"


@pytest.fixture(scope="module")
def sitting() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("sitting", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitting"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sitting"]


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


def test_parts_are_run_once_and_their_tables_say_what_was_measured(
    sitting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "S"
    parts = ("vllm-small", "flatness")
    said = command("run", "--tiny", "--out", str(out), *parts)
    assert all(f"{part}: done before" not in said for part in parts)
    again = command("run", "--tiny", "--out", str(out), *parts)
    assert all(f"{part}: done before" in again for part in parts)
    assert "cold: not begun, 0 s are left" in command("run", "--tiny", "--out", str(out), "cold", "--budget", "-1")

    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # where `bounds` is
    assert sitting.table(argparse.Namespace(out=out)) == 0
    result = json.loads((out / "sitting.json").read_text())
    records = [json.loads(line) for line in (out / "vllm-small" / "runs.jsonl").read_text().splitlines()]
    short, table = (cells((out / "sitting.md").read_text(), "workload", number) for number in (0, 1))
    workloads = ["article", "mixed", "rollout", "one", "concurrent", "long"]
    assert [row["workload"] for row in result["rows"]] == [row["workload"] for row in table] == workloads
    for row, told in zip(result["rows"], table, strict=True):
        steady = [r["seconds"] for r in records if r["phase"] == "steady" and r["workload"]["name"] == row["workload"]]
        assert row["median_s"] == statistics.median(steady)
        assert float(told["seconds"]) == pytest.approx(row["median_s"], abs=5e-5)
        assert (row["calls"], told["calls"]) == (len(steady), str(len(steady)))
        assert row["bound_s"] > 0
        assert row["over_bound"] == pytest.approx(row["median_s"] / row["bound_s"])
        assert row["target_s"] is None, "only Flatbed has targets, and a toy has none"
    assert [(row["workload"], row["vLLM"]) for row in short] == [
        (f"0.5B {told['workload']}", told["seconds"]) for told in table
    ]
    engine = json.loads((out / "flatness" / "engine.json").read_text())
    assert result["ceilings"] == engine["ceilings"]
    worst = max(row["median_s"] / engine["rows"][0]["median_s"] for row in engine["rows"])
    flat = next(check for check in result["checks"] if check["name"].endswith("warm calls"))
    assert flat["measured"].startswith(f"{worst:.3f} ")
    assert flat["met"] == (worst <= 1.02)
    assert "vllm@0.24.0" in (out / "report" / "report.md").read_text()
    assert str(Path.home()) not in (out / "sitting.md").read_text()
    assert "cold" in result["not_run"]

    command("pack", str(out))
    with tarfile.open(tmp_path / "S.tar.gz") as archive:
        names = archive.getnames()
    assert {"S/sitting.md", "S/sitting.json", "S/vllm-small/runs.jsonl", "S/flatness/engine.json"} <= set(names)
    (out / "a name").write_text("")
    assert "only letters, digits" in command("pack", str(out), expect=1)


def test_a_call_fits_into_ten_minutes_and_every_target_has_its_part(sitting: Any) -> None:
    for call in (1, 2, 3):
        assert 0 < sum(part.seconds for part in sitting.PARTS if part.call == call) <= 600 - sitting.SETUP_S
    measured = {
        (part.model, workload)
        for part in sitting.PARTS
        if part.table and part.call is not None and "--engine flatbed" in part.command
        for workload in part.command.split("--workload ")[1].split()[0].split(",")
    }
    assert set(sitting.TARGETS) <= measured
    names = [part.name for part in sitting.PARTS]
    assert len(set(names)) == len(names)


def test_commands_name_no_folder_of_this_machine(sitting: Any) -> None:
    told = sitting.told(["bench", "--env", "vllm:PYTHONPATH=/home/me/vllm:/home/me/site", "--out", "/tmp/S/x"])
    assert told == "flatbed bench --env vllm:PYTHONPATH=vllm:site --out x"


@pytest.mark.parametrize(
    ("median", "high", "said"),
    [(0.14, 0.149, "met"), (0.15, 0.16, "met by the median, not by the whole spread"), (0.18, 0.2, "missed by 20.0%")],
)
def test_marks(sitting: Any, median: float, high: float, said: str) -> None:
    row = sitting.Row("0.5B", "article", "flatbed", "90%", median, 0.1, high, 5, None)
    sitting._judge(row, {"tiny": False}, None)
    assert (row.target_s, row.mark) == (0.15, said)
    peer = sitting.Row("0.5B", "article", "vllm", "90%", median, 0.1, high, 5, None)
    sitting._judge(peer, {"tiny": False}, None)
    assert (peer.target_s, peer.mark) == (None, "")


def test_only_fresh_processes_count_as_first_calls(sitting: Any) -> None:
    def record(phase: str, seconds: float, **more: Any) -> dict[str, Any]:
        base = {"phase": phase, "seconds": seconds, "outcome": "ok", "fresh": True, "cold_round": 0}
        return {**base, "settings": {"capacity": "90%"}, **more}

    records = [
        record("start", 0.5), record("first", 1.0), record("steady", 0.1),
        record("start", 0.25, cold_round=1), record("first", 1.0, cold_round=1),
        record("start", 9.0, fresh=False, cold_round=2), record("first", 9.0, fresh=False, cold_round=2),
        record("start", 9.0, cold_round=3), record("first", 9.0, cold_round=3, outcome="died"),
    ]  # fmt: skip
    assert sitting._first_calls(records) == [1.5, 1.25]
    (check,) = sitting._first_call_check([1.5, 1.25, 1.75])
    assert check.met
    assert check.measured == "1.50 s (processes: 1.50, 1.25, 1.75)"


def test_what_is_misspelt_is_told(tmp_path: Path) -> None:
    out = str(tmp_path / "S")
    assert "unknown part 'nothing'; known: flatbed-small" in command("run", "--out", out, "nothing", expect=1)
    assert "has no finished part" in command("table", out, expect=1)
    told = command("run", "--tiny", "--out", out, "cold", "--python", "flatbed", expect=1)
    assert "written NAME=INTERPRETER" in told
