"""A report out of raw records: `report.md`, PNG plots, and one HTML page that needs nothing but itself.

The raw records (`runs.jsonl`) are the result; a report can be made of them again at any time, and of several folders
side by side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatbed.errors import ConfigError
from flatbed.lab.figures import Figure, colours, figures
from flatbed.lab.measure import IN_SEQUENCE, IN_TURNS, SCHEMA
from flatbed.lab.page import render
from flatbed.lab.summary import FLAT, Point, Stat, Summary, summarise
from flatbed.lab.units import told_bytes

RUNS = "runs.jsonl"
REPORT = "report.md"
PAGE = "report.html"
PLOTS_MISSING = (
    "The plots are missing: matplotlib is not installed (pip install 'flatbed[lab]'); the report can be made again"
)

TITLES = {
    "capacity": "What K/V-cache capacity costs",
    "token_budget": "What the token budget costs",
    "schedule": "What the schedule costs",
}


class RunFile:
    """The raw records of a bench, growing by a line the moment a record exists.

    Raises ConfigError when the folder has results already: they are kept, never overwritten.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUNS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise ConfigError(
                f"{folder} has results already, and they are kept: give another --out, or make their report again with "
                f"flatbed report {folder}"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot write results: {error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record as one line."""
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder. Raises ConfigError when it has none, or has a line that is not one."""
    path = folder / RUNS if folder.is_dir() else folder
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"no results in {folder}: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            schema = record["schema"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue  # half a line, of a bench that was killed while it wrote
            raise ConfigError(f"{path}, line {number} is not a record of flatbed bench") from error
        if schema != SCHEMA:
            raise ConfigError(f"{path}, line {number} has schema {schema}, and this version of Flatbed reads {SCHEMA}")
        records.append(record)
    if not records:
        raise ConfigError(f"{path} has no records")
    return records


def read_all(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of several folders; an engine that stands in more than one is told apart by the folder's name.

    Raises ConfigError when they are of different experiments (a capacity and a schedule, say).
    """
    each = [read(folder) for folder in folders]
    sweeps = {record["sweep"] for records in each for record in records}
    if len(sweeps) > 1:
        raise ConfigError(f"these folders cannot stand side by side: they vary {' and '.join(sorted(sweeps))}")
    engines = [{record["engine"] for record in records} for records in each]
    for at, records in enumerate(each):
        others = set().union(*(names for number, names in enumerate(engines) if number != at))
        for record in records:
            if record["engine"] in others:
                record["engine"] = f"{record['engine']} ({folders[at].resolve().name})"
    return [record for records in each for record in records]


# --------------------------------------------------------------------------------------------------------- the content


@dataclass
class Section:
    """One workload of a report; `line` says what it is."""

    name: str
    line: str
    verdicts: list[Verdict]
    table: list[list[str]]
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """A verdict and its kind: `flat`, `noise`, `grows`, `reference`, `failed` or `unjudged`."""

    engine: str
    kind: str
    text: str
    colour: str


@dataclass
class Report:
    """All that a report says, before it is Markdown or HTML."""

    title: str
    facts: list[tuple[str, str]]
    summaries: list[Summary]
    columns: list[str]
    sections: list[Section]
    notes: list[str]
    versions: list[tuple[str, str]]
    commands: list[str]


def compose(records: Sequence[Mapping[str, Any]], limit: float = FLAT, *, plots: bool = True) -> Report:
    """The content of a report.

    Args:
        limit: up to what growth an engine is called flat.
        plots: whether to draw them, which takes seconds.
    """
    summaries = summarise(records)
    palette = colours(list(dict.fromkeys(summary.engine for summary in summaries)))
    sections: list[Section] = []
    notes = []
    for workload in dict.fromkeys(summary.workload["name"] for summary in summaries):
        its = [summary for summary in summaries if summary.workload["name"] == workload]
        section = Section(
            workload or "Nothing ran",
            workload_line(its[0].workload),
            [Verdict(s.engine, _kind(s, limit), s.verdict(limit), palette[s.engine]) for s in its],
            [row for summary in its for row in _rows(summary)],
        )
        try:
            section.figures = figures(workload, its, palette) if plots else []
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            notes.append(PLOTS_MISSING)
        sections.append(section)
    sweep = records[0]["sweep"]
    return Report(
        TITLES[sweep],
        _facts(records),
        summaries,
        [*_COLUMNS[:1], sweep.replace("_", " "), *_COLUMNS[1:]],
        sections,
        [*dict.fromkeys([*notes, *_notes(records, summaries)])],
        _versions(summaries),
        list(dict.fromkeys(r["plan"]["command"] for r in records if r["plan"]["command"])),
    )


def _versions(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Engines, and the versions that they ran with; engines with the same ones together."""
    found: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.versions:
            text = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
            engines = found.setdefault(text, [])
            if summary.engine not in engines:
                engines.append(summary.engine)
    return [(", ".join(engines), versions) for versions, engines in found.items()]


def _kind(summary: Summary, limit: float) -> str:
    if not summary.measured:
        return "failed"
    if summary.reference:
        return "reference"
    found = [growth for cold in (False, True) if (growth := summary.growth(cold=cold)) is not None]
    if not found:
        return "unjudged"
    if any(growth.ratio > limit and not growth.noise for growth in found):
        return "grows"
    return "noise" if found[0].ratio > limit else "flat"


_COLUMNS = (
    "engine",
    "tokens",
    "steady call (s)",
    "spread (s)",
    "over the first",
    "cold start (s)",
    "tokens/s",
    "first token (s): median, p99",
    "between tokens (ms): median, p99",
    "K/V taken",
    "K/V live",
    "peak memory",
    "preemptions",
)
_NONE = "–"


def _rows(summary: Summary) -> Iterator[list[str]]:
    """A row of the table for each setting."""
    base: Stat | None = None
    for point in summary.points:
        base = base or point.steady
        yield [summary.engine, point.label, *_cells(point, base)]


def _cells(point: Point, base: Stat | None) -> list[str]:
    if point.steady is None:
        return [_count(point.x), "; ".join(point.failures) or "not measured", *[_NONE] * (len(_COLUMNS) - 3)]
    steady = point.steady
    return [
        _count(point.x),
        figure(steady.median),
        f"{figure(steady.low)} – {figure(steady.high)}",
        f"{steady.median / base.median:.2f}" if base is not None else _NONE,
        _NONE if point.cold is None else figure(point.cold.median),
        _count(point.tokens_per_s),
        _pair(point.first_token_s, 1.0),
        _pair(point.between_tokens_s, 1e3),
        _bytes(point.memory.get("committed")),
        _bytes(point.memory.get("live")),
        _bytes(point.memory.get("peak")),
        _count(point.preemptions),
    ]


def figure(value: float) -> str:
    """A number with four digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


def _bytes(value: int | None) -> str:
    return _NONE if value is None else told_bytes(value)


def _pair(summary: Mapping[str, float] | None, factor: float) -> str:
    if summary is None:
        return _NONE
    return f"{figure(summary['median'] * factor)}, {figure(summary['p99'] * factor)}"


def _facts(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What was measured on what, each fact once."""
    rows: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        known = rows.setdefault(name, [])
        if not any(value in other for other in known):
            rows[name] = [other for other in known if other not in value] + [value]

    for record in records:
        setup, machine, plan = record["setup"], record["machine"], record["plan"]
        add("model", ", ".join(filter(None, (setup["model"], (record["engine_settings"] or {}).get("dtype")))))
        if machine.get("gpu"):
            driver = f", driver {machine['driver']}" if "driver" in machine else ""
            add("GPU", f"{machine['gpu']}, {told_bytes(machine['gpu_memory_bytes'])}{driver}")
        add("CPU", f"{machine['cpu']}, {machine['cores']} cores, {told_bytes(machine['memory_bytes'])}")
        add("calls", _calls(plan))
        add("date", record["time"][:10])
    return [(name, "; ".join(values)) for name, values in rows.items()]


def _calls(plan: Mapping[str, Any]) -> str:
    warm = f", after {plan['warm']} that do not count" if plan["warm"] else ""
    cold = f"; {plan['cold_repeats']} cold starts" if plan["cold_repeats"] > 1 else ""
    return f"median of {plan['repeats']} steady calls{warm}{cold}"


def _notes(records: Sequence[Mapping[str, Any]], summaries: Sequence[Summary]) -> Iterator[str]:
    shared = list(dict.fromkeys(r["engine"] for r in records if r.get("shared")))
    if shared:
        yield (
            f"All settings of {', '.join(shared)} ran in one process, one for each engine: only the first of them is a "
            "cold start, and where they took turns nobody can tell whose the process's peak of memory was."
        )
    if any(not r.get("shared") for r in records):
        yield f"Each engine and setting{' besides' if shared else ''} ran in a process of its own."
    for order in (IN_TURNS, IN_SEQUENCE):
        engines = list(dict.fromkeys(r["engine"] for r in records if r["phase"] == "steady" and r["order"] == order))
        if engines:
            yield f"Steady calls of the settings of {', '.join(engines)} were made {order}."
    yield "Peak memory is that of the whole process, weights included."
    if any(record["phase"] == "latency" for record in records):
        yield "Times of tokens come from one further call of each setting, because recording them may cost time itself."
    if any(record["workload"] and record["workload"]["synthetic"] for record in records):
        yield "Repeated calls have other prompts of the same lengths: no prefix cache answers from an earlier call."
    if any(record["workload"] and not record["workload"]["synthetic"] for record in records):
        yield "The prompts of a file are the same in every call: a prefix cache may answer them from an earlier one."
    for summary in summaries:
        for note in dict.fromkeys(note for point in summary.points for note in point.notes):
            yield f"{summary.engine}: {note}."


# ----------------------------------------------------------------------------------------------------------- the files


def write(records: Sequence[Mapping[str, Any]], out: Path, limit: float = FLAT) -> Report:
    """Writes the report into `out`: report.md, report.html and PNG plots. What it wrote there before is replaced."""
    report = compose(records, limit)
    out.mkdir(parents=True, exist_ok=True)
    for section in report.sections:
        for plot in section.figures:
            (out / f"{plot.name}.png").write_bytes(plot.png)
    (out / REPORT).write_text(markdown(report), encoding="utf-8")
    (out / PAGE).write_text(render(report), encoding="utf-8")
    return report


def markdown(report: Report) -> str:
    """The report as Markdown, with its plots beside it."""
    lines = [f"# {report.title}", ""]
    lines += [f"- {name}: {value}" for name, value in report.facts]
    for section in report.sections:
        lines += ["", f"## {section.name}", "", section.line, ""]
        lines += [f"- **{verdict.engine}**: {verdict.text}" for verdict in section.verdicts]
        for plot in section.figures:
            lines += ["", f"![{plot.title}]({plot.name}.png)", "", plot.caption]
        lines += ["", *_markdown_table([report.columns, *section.table])]
    lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    lines += ["", "Versions:", "", *(f"- {engine}: {versions}" for engine, versions in report.versions)]
    for command in report.commands:
        lines += ["", "```console", f"$ {command}", "```"]
    return "\n".join(lines) + "\n"


def workload_line(workload: Mapping[str, Any]) -> str:
    """A workload in one sentence."""
    if not workload["name"]:
        return "No engine came so far as to run a workload."
    samples = f", {workload['n']} samples each" if workload["n"] > 1 else ""
    greedy = f"temperature {workload['temperature']:g}" if workload["temperature"] else "greedy"
    lengths = "fixed lengths" if workload["fixed_lengths"] else "lengths up to EOS"
    arrivals = ", arriving over time" if workload["arrives_over_time"] else ""
    return (
        f"{workload['requests']:,} requests{samples}{arrivals}: {workload['prompt_tokens']:,} prompt tokens, "
        f"{workload['new_tokens']:,} new, {greedy}, {lengths}; {workload['live_tokens']:,} tokens are live when all "
        "are at their longest."
    )


def _markdown_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    header, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join('---' for _ in header)} |"
    for row in body:
        yield f"| {' | '.join(row)} |"
