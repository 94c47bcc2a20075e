"""`flatbed bench` and `flatbed report` from end to end: a tiny model on the CPU, the report re-read, the page seen."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flatbed.cli import app
from flatbed.lab.cli import Sweep, _settings

UNIT = str(Path(__file__).parents[1] / "unit")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
CAPACITIES = ("8 blocks", "20000 tokens", "64 MiB")
ENGINES = ("flatbed", "transformers:sdpa", "generate")


def flatbed(*arguments: str, expect: int = 0) -> Result:
    """The command, in this process; what it starts are processes all the same."""
    with mock.patch.object(sys, "argv", ["flatbed", *arguments]), mock.patch.dict(os.environ, ENVIRONMENT):
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == expect, f"status {done.exit_code}\n{done.output}\n{done.exception!r}"
    return done


def bench(out: Path, *more: str, engines: tuple[str, ...], expect: int = 0) -> Result:
    chosen = [part for engine in engines for part in ("--engine", engine)]
    own = [
        part for engine in engines if "lab_engines" in engine for part in ("--env", f"{_key(engine)}:PYTHONPATH={UNIT}")
    ]
    base = ("bench", "capacity", "--model", "shape:tiny", "--device", "cpu", "--out", str(out))
    return flatbed(*base, *chosen, *own, *more, expect=expect)


def _key(engine: str) -> str:
    return engine.partition(":")[0]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One bench of three engines at three capacities; the tests below look at what it left."""
    out = tmp_path_factory.mktemp("lab") / "out"
    done = bench(
        out, "--capacity", ",".join(CAPACITIES), "--token-budget", "64", "--scale", "0.1", "--repeats", "3",
        engines=ENGINES,
    )  # fmt: skip
    return out, done


def test_what_a_bench_leaves(run: Any) -> None:
    out, done = run
    names = {path.name for path in out.iterdir()}
    plots = {f"{plot}-article.png" for plot in ("time", "phases", "memory")}
    assert names == {"runs.jsonl", "report.md", "report.html", "logs", *plots}
    assert len(list((out / "logs").iterdir())) == 7
    for engine in ENGINES:
        assert f"article  {engine}: " in done.stdout
    assert "loaded in" in done.stderr
    assert "steady" in done.stderr


def test_raw_records_say_everything(run: Any) -> None:
    rows = records(run[0])
    series = {(r["engine"], r["settings"]["capacity"]) for r in rows}
    assert series == {(e, c) for e in ENGINES[:2] for c in CAPACITIES} | {("generate", None)}
    for engine, capacity in series:
        its = [r for r in rows if (r["engine"], r["settings"]["capacity"]) == (engine, capacity)]
        assert [r["phase"] for r in its] == ["start", "first", "steady", "steady", "steady", "latency"]
        assert {r["outcome"] for r in its} == {"ok"}
        for r in its:
            assert r["machine"]["cpu"]
            assert {"python", "torch", "transformers", "flatbed"} <= set(r["versions"])
            assert r["settings"]["token_budget"] == (None if engine == "generate" else 64)
            assert r["plan"]["command"].startswith("flatbed bench capacity --model shape:tiny")
            assert str(Path.home()) not in r["plan"]["command"]
            assert UNIT not in json.dumps(r)
            if r["phase"] != "start":
                assert r["tokens"] == r["workload"]["new_tokens"]
                assert sum(r["parts"].values()) == pytest.approx(r["seconds"])
                assert r["memory"]["peak"] >= r["memory"]["committed"] > 0
                assert r["engine_settings"]["dtype"] == "float32"
            if r["phase"] == "latency":
                assert r["first_token_s"]["median"] <= r["first_token_s"]["p99"]
                assert r["between_tokens_s"]["median"] <= r["between_tokens_s"]["p99"]
    flatbed_rows = [r for r in rows if r["engine"] == "flatbed" and r["phase"] == "latency"]
    committed = {r["settings"]["capacity"]: r["memory"]["committed"] for r in flatbed_rows}
    assert len(set(committed.values())) == 1, "flatbed takes memory for live tokens, whatever the capacity"
    pool = [r for r in rows if r["engine"] == "transformers:sdpa" and r["phase"] == "latency"]
    taken = {r["settings"]["capacity"]: r["memory"]["committed"] for r in pool}
    assert taken["64 MiB"] > 5 * taken["8 blocks"]


class _Tables(html.parser.HTMLParser):
    """The cells of all tables of a page, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_the_numbers_of_the_report_are_those_of_the_records(run: Any) -> None:
    out = run[0]
    markdown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (out / "report.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    page = _Tables()
    page.feed((out / "report.html").read_text())
    assert page.rows == markdown
    header, *table = markdown
    assert len(table) == 7
    rows = records(out)
    for cells in table:
        told = dict(zip(header, cells, strict=True))
        capacity = None if told["capacity"] == "reference" else told["capacity"]
        its = [r for r in rows if (r["engine"], r["settings"]["capacity"]) == (told["engine"], capacity)]
        steady = [r["seconds"] for r in its if r["phase"] == "steady"]
        assert _number(told["steady call (s)"]) == pytest.approx(statistics.median(steady), rel=1e-3)
        low, high = map(_number, told["spread (s)"].split(" – "))
        assert min(steady) <= low * 1.001
        assert low <= statistics.median(steady) * 1.001
        assert statistics.median(steady) <= high * 1.001
        assert high <= max(steady) * 1.001
        cold = sum(r["seconds"] for r in its if r["phase"] in ("start", "first"))
        assert _number(told["cold start (s)"]) == pytest.approx(cold, rel=1e-3)
        rate = its[0]["workload"]["new_tokens"] / statistics.median(steady)
        assert _number(told["tokens/s"]) == pytest.approx(rate, rel=0.02, abs=1)
        latency = next(r for r in its if r["phase"] == "latency")
        first = told["first token (s): median, p99"].split(", ")
        assert _number(first[0]) == pytest.approx(latency["first_token_s"]["median"], rel=1e-3)
        between = told["between tokens (ms): median, p99"].split(", ")
        assert _number(between[1]) == pytest.approx(latency["between_tokens_s"]["p99"] * 1e3, rel=1e-3)
        if capacity is not None:
            assert _number(told["tokens"]) == latency["memory"]["capacity_tokens"]
        assert told["preemptions"] == "0"


def test_a_report_can_be_made_again(run: Any, tmp_path: Path) -> None:
    out, done = run
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(out / "runs.jsonl", again)
    said = flatbed("report", str(again))
    assert (again / "report.md").read_text() == (out / "report.md").read_text()
    assert (again / "time-article.png").read_bytes() == (out / "time-article.png").read_bytes()
    assert [line for line in said.stdout.splitlines() if line.startswith("article")] == [
        line for line in done.stdout.splitlines() if line.startswith("article")
    ]
    both = tmp_path / "both"
    flatbed("report", str(out), str(again), "--out", str(both))
    text = (both / "report.md").read_text()
    assert "**flatbed (out)**" in text
    assert "**flatbed (again)**" in text
    assert not (both / "runs.jsonl").exists()
    assert "give a folder for it with --out" in flatbed("report", str(out), str(again), expect=2).stderr


def test_results_are_kept(run: Any) -> None:
    out = run[0]
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    done = bench(out, engines=("generate",), expect=2)
    assert "has results already, and they are kept" in done.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


# ---- the page, in a browser ------------------------------------------------------------------------------------------


def _browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome on this machine: the page was not opened")
    return found


def _seen(page: Path, folder: Path, *more: str) -> Any:
    """The page as a browser without a network shows it: an image, [height, width, 3] of 0-255."""
    import numpy as np
    from PIL import Image

    picture = folder / "page.png"
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )  # fmt: skip
    subprocess.run(
        [_browser(), *flags, *more, f"--user-data-dir={folder / 'profile'}", "--window-size=1200,3600",
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return np.asarray(Image.open(picture).convert("RGB"))


def _pixels(image: Any, colour: str) -> Any:
    """Where that colour is: an array of (row, column)."""
    import numpy as np

    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return np.argwhere((image == wanted).all(axis=-1))


def _drawn(image: Any, colour: str, background: str) -> Any:
    """Where that colour is, or at least a third of it over the background: a thin line may lie between two pixels."""
    import numpy as np

    wanted, behind = (np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)], float) for c in (colour, background))
    way = wanted - behind
    share = ((image - behind) @ way) / (way @ way)
    off = np.abs(image - behind - share[..., None] * way).max(axis=-1)
    return np.argwhere((share > 1 / 3) & (share < 1.05) & (off < 12))


@pytest.mark.parametrize(
    ("scheme", "background", "ink"), [("light", "#fbfbfa", "#1c2126"), ("dark", "#14171a", "#e8eaec")]
)
def test_the_page_is_seen_in_a_browser(run: Any, tmp_path: Path, scheme: str, background: str, ink: str) -> None:
    page = run[0] / "report.html"
    flag = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    image = _seen(page, tmp_path, flag)
    assert len(_pixels(image, background)) > image.shape[0] * image.shape[1] * 0.1
    assert len(_pixels(image, ink)) > 2000, "text is there, in the colour of this scheme"
    plot = _first_plot(page, image)
    # In the plot of time against capacity all engines are there, and lines go from one side to the other. Not every
    # line need be seen as long: where two engines take the same time, one lies under the other.
    widths = []
    for colour in _line_colours(page):
        found = _drawn(plot, colour, background)
        assert len(found) > 100, f"nothing in {colour}"
        widths.append(found[:, 1].max() - found[:, 1].min())
    assert sorted(widths)[-2] > 0.4 * plot.shape[1], f"lines are short: {widths}"
    assert len(_pixels(plot, ink)) > 100, "axes and their numbers are readable on this background"


def _line_colours(page: Path) -> list[str]:
    return list(dict.fromkeys(re.findall(r'style="--engine: (#[0-9a-f]{6})"', page.read_text())))


def _first_plot(page: Path, image: Any) -> Any:
    """The part of the image between the verdicts and the plot of phases: where the first line's colour is widest."""
    import numpy as np

    widest = [
        row
        for colour in _line_colours(page)
        for row in np.unique(_pixels(image, colour)[:, 0])
        if np.ptp(_pixels(image[row : row + 1], colour)[:, 1]) > 300
    ]
    top = min(widest)
    return image[max(0, top - 420) : top + 420]


def test_the_page_needs_nothing_else(run: Any) -> None:
    text = (run[0] / "report.html").read_text()
    assert len(_line_colours(run[0] / "report.html")) == 3
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)([^"')>\s]+)""", text)
    assert outside == []
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org", "https://www.w3.org"}  # namespaces
    assert "<script" not in text


# ---- gate and exit statuses ------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_the_gate_passes_what_is_flat_and_fails_what_grows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed = bench(
        out, "--capacity", "1 MiB,32 MiB,256 MiB", "--repeats", "4", "--gate", "4", "--scale", "0.1", "--no-latency",
        engines=("lab_engines.Plain", "lab_engines.Zeroing:sleep=0"), expect=3,
    )  # fmt: skip
    assert "gate: lab_engines.Zeroing:sleep=0 on article: steady calls grow" in failed.stderr
    assert "from 1 MiB to 256 MiB, all of it in generation (the gate is 4)" in failed.stderr
    assert "gate: lab_engines.Plain" not in failed.stderr
    flatbed("report", str(out), "--gate", "4", expect=3)
    flatbed("report", str(out), "--gate", "1000000")


def test_flatbed_passes_its_own_gate(run: Any, tmp_path: Path) -> None:
    rows = [
        line for line in (run[0] / "runs.jsonl").read_text().splitlines() if json.loads(line)["engine"] == "flatbed"
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(rows) + "\n")
    said = flatbed("report", str(tmp_path), "--gate", "3")
    assert re.search(r"article  flatbed: (flat|no growth)", said.stdout)


def test_trouble_leaves_status_1_and_the_other_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(
        out, "--capacity", "1 MiB,2 MiB,64 MiB", "--repeats", "2", "--time-limit", "30", "--scale", "0.1",
        engines=("lab_engines.Troubled:dies", "lab_engines.Plain", "lab_engines.Absent"), expect=1,
    )  # fmt: skip
    assert "lab_engines.Absent: not measured: 1 MiB: missing: no-such-package-anywhere is not installed" in done.stdout
    assert "64 MiB: died in the first call: the process was ended by SIGKILL" in done.stdout
    assert re.search(r"lab_engines.Plain: .* from 1 MiB to ", done.stdout)
    assert "died in the first call" in (out / "report.html").read_text()
    # A missing engine alone is named and skipped: that is no trouble.
    bench(
        tmp_path / "b",
        "--capacity",
        "1 MiB,2 MiB",
        "--scale",
        "0.1",
        engines=("lab_engines.Absent", "lab_engines.Plain"),
    )
    bench(tmp_path / "c", "--capacity", "1 MiB,2 MiB", "--scale", "0.1", engines=("lab_engines.Absent",), expect=1)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable, "-c", "from flatbed.cli import main; main()", "bench", "capacity", "--model", "shape:tiny",
        "--device", "cpu", "--out", str(out), "--scale", "0.1", "--engine", "lab_engines.Plain:sleep=0.2",
        "--env", f"lab_engines.Plain:PYTHONPATH={UNIT}", "--repeats", "500", "--capacity", "1 MiB,2 MiB",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and (not (out / "runs.jsonl").exists() or len(records(out)) < 8):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len([r for r in records(out) if r["phase"] == "steady"]) >= 4
    assert "lab_engines.Plain:sleep=0.2: " in said
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["capacity", "--engine", "nothing"], "unknown engine 'nothing'; known: flatbed, transformers, generate, vllm"),
        (["capacity", "--engine", "flatbed", "--workload", "nothing"], "unknown workload 'nothing'; known: article"),
        (["capacity", "--engine", "flatbed", "--capacity", "64 pages"], "unknown capacity '64 pages'; known:"),
        (["capacity", "--engine", "flatbed", "--capacity", ","], "has none"),
        (["capacity", "--engine", "flatbed", "--token-budget", "1,2"], "--token-budget takes one value here"),
        (["budget", "--engine", "flatbed", "--token-budget", "many"], "a token budget is a whole number, got 'many'"),
        (["schedule", "--engine", "flatbed", "--schedule", "random"], "unknown schedule 'random'; known: fifo"),
        (
            ["capacity", "--engine", "flatbed", "--python", "vllm"],
            "cannot read 'vllm'; it is written --python NAME=PATH",
        ),
        (["capacity", "--engine", "flatbed", "--env", "A=1"], "cannot read 'A=1'; it is written --env NAME:KEY=VALUE"),
        (["capacity", "--engine", "flatbed", "--gate", "0.5"], "the gate must be at least 1, got 0.5"),
        (["capacity", "--engine", "flatbed", "--repeats", "0"], "repeats must be at least 1, got 0"),
        (["capacity", "--engine", "flatbed", "--model", "shape:none"], "unknown shape 'none'; known: qwen2.5-0.5b"),
        (["capacity", "--engine", "flatbed", "--scale", "7"], "scale must be above 0 and at most 1"),
        (["colour", "--engine", "flatbed"], "Invalid value"),
    ],
)
def test_bad_input_is_told_before_anything_runs(tmp_path: Path, arguments: list[str], said: str) -> None:
    model = [] if "--model" in arguments else ["--model", "shape:tiny"]
    out = tmp_path / "out"
    result = flatbed("bench", *arguments, *model, "--out", str(out), "--device", "cpu", expect=2)
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not out.exists()


def test_budget_and_schedule(tmp_path: Path) -> None:
    given = {"capacity": "90%", "token_budget": None, "schedule": None}
    found = [one.to_json() for one in _settings(Sweep.budget, given)]
    assert found == [{"capacity": "90%", "token_budget": tokens, "schedule": None} for tokens in (256, 1024, 8192)]
    schedules = _settings(Sweep.schedule, {"capacity": None, "token_budget": "64", "schedule": None})
    assert [(one.schedule, one.token_budget) for one in schedules] == [("fifo", 64), ("prefill_first", 64)]
    for sweep, title, values in (
        ("budget", "# What the token budget costs", "256,512"),
        ("schedule", "# What the schedule costs", "a,b"),
    ):
        out = tmp_path / sweep
        option = "--token-budget" if sweep == "budget" else "--schedule"
        flatbed(
            "bench", sweep, "--model", "shape:tiny", "--device", "cpu", "--engine", "lab_engines.Plain", "--env",
            f"lab_engines.Plain:PYTHONPATH={UNIT}", "--out", str(out), "--scale", "0.1", "--repeats", "2", option,
            values,
        )  # fmt: skip
        field = "token_budget" if sweep == "budget" else "schedule"
        assert {str(r["settings"][field]) for r in records(out)} == set(values.split(","))
        assert (out / "report.md").read_text().startswith(title)
        assert (out / "time-article.png").exists()
