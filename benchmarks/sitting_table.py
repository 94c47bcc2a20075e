"""The tables of a sitting: what its parts measured, beside targets and bounds (see sitting.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bounds import bound, parameters
from sitting_parts import ALL, DONE, LARGE, PARTS, SAID, SCRIPTS, SMALL, TESTS, Part

from flatbed.errors import ConfigError
from flatbed.lab import models, report
from flatbed.lab.plan_verify import Verdict, conclusions
from flatbed.lab.summary import summarise
from flatbed.lab.trace_events import DECODE, PREFILL
from flatbed.lab.traced import Trace
from flatbed.lab.workloads import make

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


def write(out: Path) -> list[str]:
    """Reads what was measured in `out`, writes sitting.json, sitting.md and the report on capacity, and names them."""
    parts = _read_parts(out)
    if not parts:
        raise SystemExit(f"{out} has no finished part: python benchmarks/sitting.py run --out {out}")
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
        "said": {name: p["said"] for name, p in parts.items() if p["said"]},
        "parts": {
            name: {key: p[key] for key in ("what", "command", "started", "seconds", "expected_s", "status")}
            for name, p in parts.items()
        },
        "not_run": [part.name for part in PARTS if part.name not in parts],
    }
    (out / "sitting.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "sitting.md").write_text(markdown(result))
    records = [record for p in parts.values() if p["report"] for record in p["records"] if _is_article(record)]
    if not records:
        return ["sitting.md", "sitting.json"]
    report.write(records, out / "report")
    return ["sitting.md", "sitting.json", "report/report.md", "report/report.html"]


def _is_article(record: Mapping[str, Any]) -> bool:
    return record["workload"] is None or record["workload"]["name"] == "article"


def _read_parts(out: Path) -> dict[str, dict[str, Any]]:
    """What each finished part left, by name, in the order of PARTS."""
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
        read["said"] = _said(part, folder)
        found[part.name] = read
    return found


def _said(part: Part, folder: Path) -> list[str]:
    """What a part says that has tables of its own, or only a few lines: as Markdown."""
    kind = part.command.split()[0]
    if kind == TESTS:
        return [line for line in (folder / SAID).read_text().splitlines() if line.strip()][-1:]
    if kind not in SCRIPTS:
        return []
    results = folder / SCRIPTS[kind][1]
    if kind == "arithmetic":
        summary = json.loads((results / "grpo-arithmetic.json").read_text())
        return [*(f"- {line}" for line in summary["runs"]), f"- {summary['comparison']['verdict']}"]
    if kind == "deterministic":
        result = json.loads(results.read_text())
        alike = {name: row["alone_as_in_the_batch"] for name, row in result["engines"].items()}
        return [
            f"{result['deterministic_over_default']} times the time. Of {result['alone']} requests that ran alone, "
            f"{alike['deterministic']} gave the bits that they gave in the batch; by default {alike['default']}."
        ]
    told = results.with_suffix(".md")
    return told.read_text().split("\n", 2)[2].splitlines() if told.is_file() else []  # without its title


def _rows(parts: Mapping[str, Mapping[str, Any]], ceilings: dict[str, float] | None) -> list[Row]:
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
    for name, said in result["said"].items():
        lines += _section(f"{name}: {result['parts'][name]['what']}", said)
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
