"""A trace on the terminal, short enough to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatbed.lab.tables import table
from flatbed.lab.trace_events import DECODE, PREFILL
from flatbed.lab.trace_names import CATEGORIES, IDLE
from flatbed.lab.traced import PHASES, Trace

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NAMES = 8  # of the longest kernels
_WIDTH = 96  # of a kernel's name
_DENSE = 1.5  # by how much pairs must exceed what keys explain, to be worth a sentence


def render(trace: Trace, console: Console) -> None:
    """Prints a trace: time by category and phase, the longest kernels, K/V lengths."""
    console.print(_heading(trace), soft_wrap=True)
    console.print()
    console.print(_times(trace))
    console.print()
    if trace.lengths:
        console.print(_lengths(trace))
        for said in said_of(trace):
            console.print(said, soft_wrap=True)
        console.print()
    console.print(_longest(trace))
    unknown = trace.unclassified()
    if unknown:
        names = "; ".join(f"{one.name[:_WIDTH]} ({one.milliseconds:,.2f} ms)" for one in unknown)
        console.print(f"not classified: {names}", soft_wrap=True, markup=False)
    for note in trace.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if trace.file is not None:
        console.print(f"trace: {trace.file} (chrome://tracing, ui.perfetto.dev)", soft_wrap=True)


def said_of(trace: Trace) -> list[str]:
    """K/V lengths in words, a sentence for each kind of attention."""
    said = []
    for kind in (PREFILL, DECODE):
        rows = [row for row in trace.lengths if row.kind == kind]
        if not rows:
            continue
        keys, live = (sum(getattr(row, name) * row.layers for row in rows) for name in ("keys", "live"))
        windows = {row.window: row.layers for row in rows}
        where = f"over {sum(windows.values())} layers"
        if len(windows) == 1:  # then the same in every layer
            keys, live, where = keys // rows[0].layers, live // rows[0].layers, f"in each of {rows[0].layers} layers"
        ratio = trace.ratio(kind)
        times = "" if ratio is None else f" ({ratio:,.2f} times as many as were needed)"
        said.append(f"{kind} attention ran over {keys:,} keys {where}, of which {live:,} were live{times}")
        pairs, live_pairs = (sum(getattr(row, name) * row.layers for row in rows) for name in ("pairs", "live_pairs"))
        if ratio is not None and live_pairs and pairs > _DENSE * ratio * live_pairs:
            said.append(f"and it laid {pairs / live_pairs:,.1f} times as many queries against keys as belong together")
    return said


def _heading(trace: Trace) -> str:
    facts = trace.workload
    set_ = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in trace.settings.items() if value is not None)
    versions = ", ".join(
        f"{name} {trace.versions[name]}" for name in ("transformers", "torch") if name in trace.versions
    )
    busy = 1 - trace.category(IDLE) / trace.window if trace.window else 0.0
    what = "second call" if trace.warm else "from construction on"
    return (
        f"{trace.engine} ({set_ or 'its own settings'}), {trace.model}, workload {facts['name']} "
        f"({facts['samples']:,} samples, {trace.tokens:,} tokens), {trace.device}"
        + (f", {versions}" if versions else "")
        + f"\n{trace.window:,.1f} ms {what}, busy {busy:.1%}; the call took {trace.seconds:.3f} s under the profiler"
    )


def _times(trace: Trace) -> Table:
    phases = [phase for phase in PHASES if phase in trace.phases]
    rows = table(("ms", "left"), *((phase, "right") for phase in phases), ("all", "right"), ("share", "right"))
    for category in (*CATEGORIES, *sorted({c for p in trace.phases.values() for c in p} - set(CATEGORIES))):
        total = trace.category(category)
        if total:
            cells = (trace.phases[phase].get(category) for phase in phases)
            rows.add_row(
                category,
                *("" if cell is None else f"{cell:,.1f}" for cell in cells),
                f"{total:,.1f}",
                f"{total / trace.window:.1%}",
            )
    sums = [sum(trace.phases[phase].values()) for phase in phases]
    rows.add_row("all", *(f"{one:,.1f}" for one in sums), f"{sum(sums):,.1f}", "", style="bold")
    return rows


def _lengths(trace: Trace) -> Table:
    rows = table(
        ("attention", "left"),
        ("phase", "left"),
        ("layers", "right"),
        ("passes", "right"),
        ("queries", "right"),
        ("keys given", "right"),
        ("live", "right"),
        ("given / live", "right"),
        ("pairs / live pairs", "right"),
        ("K/V rows copied", "right"),
    )
    for row in trace.lengths:
        rows.add_row(
            f"{row.kind}" + ("" if row.window is None else f", window {row.window:,}"),
            row.phase,
            str(row.layers),
            f"{row.forwards:,}",
            f"{row.queries:,}",
            f"{row.keys:,}",
            f"{row.live:,}",
            _ratio(row.keys, row.live),
            _ratio(row.pairs, row.live_pairs),
            "" if row.copied is None else f"{row.copied:,}",
        )
    return rows


def _ratio(given: int, live: int) -> str:
    return f"{given / live:,.2f}" if live else "none live"


def _longest(trace: Trace) -> Table:
    from rich.markup import escape

    rows = table(("ms", "right"), ("times", "right"), ("category", "left"), ("longest", "left"))
    for one in trace.names[:_NAMES]:
        rows.add_row(f"{one.milliseconds:,.2f}", f"{one.count:,}", one.category, escape(one.name[:_WIDTH]))
    return rows
