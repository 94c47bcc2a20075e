"""The plots of a report: time against what was varied, phases stacked, memory taken against memory live.

Each is made twice: as a PNG on white, and as an SVG for the page, whose text and axes take the page's own colour, so
that it reads on a light and on a dark background. The colours of the data are chosen for both.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatbed.lab.engines.base import PARTS
from flatbed.lab.summary import PART_NAMES, Point, Summary, seconds
from flatbed.lab.units import told_bytes

# Middle tones: each has a contrast of about 3 or more with white and with near-black.
COLOURS = (
    "#3f7fe0", "#d9730d", "#9a60d8", "#d9455f", "#8d8a1f", "#c85aa5", "#5b8c9e", "#b07b4f", "#6f7fd1", "#7d8790",
)  # fmt: skip
FLATBED_COLOUR = "#0f9d8a"
PART_COLOURS = {"construction": "#9a60d8", "warm_up": "#d9730d", "generation": "#0f9d8a", "teardown": "#7d8790"}
_MARKERS = "osD^vPX<>h"

_INK = "#010203"  # stands for the colour of the page's text until the SVG is written
_WIDTH = 10.0  # inches
_FONT = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        name: of its PNG, without the ending.
        title: what it shows, as one line.
        caption: how to read it.
        png, svg: the plot; `svg` is an element to be put into a page.
    """

    name: str
    title: str
    caption: str
    png: bytes
    svg: str


def colours(engines: Sequence[str]) -> dict[str, str]:
    """A colour for each engine: Flatbed's is always the same."""
    given: dict[str, str] = {}
    rest = iter(range(len(engines)))
    for engine in engines:
        first_flatbed = engine.split("@")[0].split(":")[0].split(" ")[0] == "flatbed" and (
            FLATBED_COLOUR not in given.values()
        )
        given[engine] = FLATBED_COLOUR if first_flatbed else COLOURS[next(rest) % len(COLOURS)]
    return given


def figures(workload: str, summaries: Sequence[Summary], palette: dict[str, str]) -> list[Figure]:
    """The plots of one workload; those for which there is nothing to show are left out.

    Raises ImportError without matplotlib.
    """
    measured = [summary for summary in summaries if summary.measured]
    if not measured:
        return []
    made = [_time_figure(workload, measured, palette)]
    if any(point.parts or point.cold_parts for summary in measured for point in summary.measured):
        made.append(_phases_figure(workload, measured))
    if any(point.memory.get("committed") for summary in measured for point in summary.measured):
        made.append(_memory_figure(workload, measured, palette))
    return made


# ------------------------------------------------------------------------------------------- time against the setting


def _time_figure(workload: str, summaries: Sequence[Summary], palette: dict[str, str]) -> Figure:
    sweep = summaries[0].sweep
    drawn = [s for s in summaries if not s.reference]
    by_name = sweep == "schedule" or not any(p.x is not None for s in drawn for p in s.measured)
    names = list(dict.fromkeys(point.label for s in drawn for point in s.measured))

    def draw(figure: Any, ink: str) -> None:
        axes = figure.add_axes((0.07, 0.115, 0.6, 0.865))
        ends: list[tuple[float, str, str]] = []
        for number, summary in enumerate(drawn):
            points = [p for p in summary.measured if by_name or p.x is not None]
            if not points:
                continue
            xs = [float(names.index(p.label)) if by_name else float(p.x or 0) for p in points]
            stats = [p.steady for p in points if p.steady is not None]
            ys = [s.median for s in stats]
            errors = [[s.median - s.low for s in stats], [s.high - s.median for s in stats]]
            colour = palette[summary.engine]
            bold = colour == FLATBED_COLOUR
            axes.errorbar(
                xs, ys, yerr=errors, color=colour, marker=_MARKERS[number % len(_MARKERS)], capsize=2.5, elinewidth=1.2,
                markersize=6.5 if bold else 5, linewidth=2.6 if bold else 1.8, zorder=4 if bold else 3,
            )  # fmt: skip
            ends.append((ys[-1], summary.engine, colour))
        for summary in summaries:
            if summary.reference and summary.measured[0].steady is not None:
                y, colour = summary.measured[0].steady.median, palette[summary.engine]
                axes.axhline(y, color=colour, linewidth=1.6, linestyle=(0, (5, 3)), zorder=2)
                ends.append((y, f"{summary.engine} (no {sweep.replace('_', ' ')})", colour))
        axes.set_yscale("log")
        axes.set_ylabel("seconds a call")
        if by_name:
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.4, max(len(names) - 0.6, 0.4))
        else:
            axes.set_xscale("log")
            axes.set_xlabel(_AXIS[sweep])
            _label_log(axes.xaxis, axes.get_xlim, _tokens)
        _decade(axes)
        _label_log(axes.yaxis, axes.get_ylim, lambda value: f"{value:g}")
        _grid(axes, ink)
        _label_ends(axes, ends)

    caption = (
        "The median of steady calls; bars show the spread (the middle half). Flat is good: what is reserved and not "
        "used should cost nothing."
        if sweep == "capacity"
        else "The median of steady calls; bars show the spread (the middle half)."
    )
    title = f"Time of a call against {_NAME[sweep]}"
    return _made(f"time-{workload}", title, caption, draw, 5.4)


_NAME = {"capacity": "K/V-cache capacity", "token_budget": "token budget", "schedule": "schedule"}
_AXIS = {"capacity": "K/V-cache capacity (tokens)", "token_budget": "token budget (tokens in one forward pass)"}


def _tokens(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _decade(axes: Any) -> None:
    """At least a factor of ten on the axis of time, so that noise does not look like growth."""
    low, high = axes.get_ylim()
    if high / low < 10:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))


def _label_log(axis: Any, limits: Callable[[], tuple[float, float]], text: Callable[[float], str]) -> None:
    """Names the powers of ten of a logarithmic axis, and 2 and 5 times these where few powers are in sight."""

    def named(value: float, _: object) -> str:
        low, high = limits()
        wanted = (1, 2, 5) if high / low < 120 else (1,)
        lead = value / 10 ** math.floor(math.log10(value) + 1e-9)
        return text(value) if any(math.isclose(lead, one, rel_tol=1e-6) for one in wanted) else ""

    axis.set_major_formatter(named)
    axis.set_minor_formatter(named)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names each line (its last y, name, colour) at the right, moved apart where names would lie on each other."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    ordered = sorted(ends)
    heights = [(math.log10(y) - low) / (high - low) for y, _, _ in ordered]
    gap = 0.05 + 0.035 * max((_wrapped(name).count("\n") for _, name, _ in ends), default=0)
    for (_, name, colour), at, place in zip(ordered, heights, spread(heights, gap), strict=True):
        axes.annotate(
            _wrapped(name), (1.0, at), (1.04, place), xycoords="axes fraction", textcoords="axes fraction",
            color=colour, fontweight="bold" if colour == FLATBED_COLOUR else "normal", fontsize=9.5, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0},
        )  # fmt: skip


_LINE = 38  # characters of a name that fit beside the plot


def _wrapped(name: str) -> str:
    """A long name in several lines, broken after colons and commas."""
    lines = [""]
    for piece in re.findall(r"[^:,]*[:,]?", name):
        if lines[-1] and len(lines[-1]) + len(piece) > _LINE:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ordered places from 0 to 1, moved as little as needed (in squares) so that neighbours are `gap` apart.

    Less `i * gap`, the places have only to be in order: isotonic regression, by pooling neighbours that are not.
    """
    pools: list[tuple[float, int]] = []  # sum and count of places that lie together
    for i, place in enumerate(places):
        total, count = place - i * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return [start + i * gap for i, start in enumerate(starts)]


# ----------------------------------------------------------------------------------------------------- phases, stacked


# Inches of the figure of phases: above all panels, a row, above the rows of a panel, below them.
_TOP, _ROW, _ABOVE, _BELOW = 0.66, 0.27, 0.34, 0.28


def _phases_figure(workload: str, summaries: Sequence[Summary]) -> Figure:
    rows = [len(summary.measured) for summary in summaries]
    height = _TOP + sum(_ABOVE + _ROW * count + _BELOW for count in rows) + 0.22

    def draw(figure: Any, ink: str) -> None:
        top = height - _TOP
        for summary, count in zip(summaries, rows, strict=True):
            bottom = top - _ABOVE - _ROW * count
            for left, cold in ((0.13, False), (0.56, True)):
                axes = figure.add_axes((left, bottom / height, 0.40, _ROW * count / height))
                _phases(axes, summary.measured, cold)
                _grid(axes, ink, only="x")
                if cold:
                    axes.set_yticklabels([])
                else:
                    axes.set_title(summary.engine, loc="left", fontsize=10, fontweight="bold")
            top = bottom - _BELOW
        for left, what in ((0.13, "A steady call"), (0.56, "A cold start: construction, warm-up and first call")):
            figure.text(left, 1 - 0.6 / height, what, fontsize=11)
            figure.text(left + 0.2, 0.05 / height, "seconds", ha="center", va="bottom")
        figure.legend(
            [_patch(PART_COLOURS[part]) for part in PARTS], [PART_NAMES[part] for part in PARTS], loc="upper left",
            bbox_to_anchor=(0.12, 1.0), ncols=len(PARTS), frameon=False, labelcolor=ink, fontsize=9.5,
        )  # fmt: skip

    caption = (
        "Where the seconds go, each engine on its own scale. A cold start counts from loaded weights on: construction, "
        "warm-up and the first call. Grey hatching: the engine's calls could not be split."
    )
    return _made(f"phases-{workload}", "Phases of a call", caption, draw, height)


def _phases(axes: Any, points: Sequence[Point], cold: bool) -> None:
    axes.set_yticks(range(len(points)), [point.label for point in points])
    totals = [0.0]
    for at, point in enumerate(points):
        stat, parts = (point.cold, point.cold_parts) if cold else (point.steady, point.parts)
        if stat is None:
            continue
        left = 0.0
        for part in PARTS if parts is not None else ():
            width = max(0.0, (parts or {}).get(part, 0.0))
            axes.barh(at, width, left=left, height=0.62, color=PART_COLOURS[part], linewidth=0)
            left += width
        if parts is None:
            left = stat.median
            axes.barh(at, left, height=0.62, color="none", edgecolor="#7d8790", hatch="////", linewidth=0.8)
        axes.annotate(seconds(stat.median), (left, at), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        totals.append(left)
    axes.set_xlim(0, (max(totals) or 1.0) * 1.22)
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)


# ------------------------------------------------------------------------------------------------------------- memory


def _memory_figure(workload: str, summaries: Sequence[Summary], palette: dict[str, str]) -> Figure:
    groups = [(s, [p for p in s.measured if p.memory.get("committed") or p.memory.get("live")]) for s in summaries]
    groups = [(summary, points) for summary, points in groups if points]
    rows = sum(1 + len(points) for _, points in groups)
    height = 1.1 + 0.26 * rows

    def draw(figure: Any, ink: str) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import LogLocator

        axes = figure.add_axes((0.13, 0.5 / height, 0.83, 1 - 1.0 / height))
        axes.set_xscale("log", base=2)
        at, labels = 0, {}
        for summary, points in groups:
            axes.annotate(
                summary.engine, (0.008, at), xycoords=("axes fraction", "data"), va="center", fontweight="bold"
            )
            for point in points:
                at += 1
                labels[at] = point.label
                _memory_row(axes, at, point, palette[summary.engine])
            at += 1
        axes.set_yticks(list(labels), list(labels.values()))
        axes.set_ylim(rows - 0.5, -0.7)
        low, high = axes.get_xlim()
        axes.set_xlim(low / 2, high * 1.5)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        axes.xaxis.set_major_formatter(lambda value, _: told_bytes(value).replace(".0 ", " "))
        axes.set_xlabel("bytes of K/V cache")
        _grid(axes, ink, only="x")
        marks = (("o", "live at most"), ("s", "taken"), ("|", "reserved (addresses)"))
        style: dict[str, Any] = {"color": ink, "linestyle": "none", "markersize": 7, "markeredgewidth": 1.6}
        figure.legend(
            [Line2D([], [], marker=mark, **style) for mark, _ in marks], [text for _, text in marks], loc="upper left",
            bbox_to_anchor=(0.12, 1.0), ncols=3, labelcolor=ink, fontsize=9.5, frameon=False,
        )  # fmt: skip

    caption = (
        "K/V cache on a logarithmic scale: blocks that held tokens of running requests (live), memory really taken, "
        "and addresses reserved, which cost no memory where memory is committed apart from them. The line between live "
        "and taken is waste."
    )
    return _made(f"memory-{workload}", "Memory reserved against live", caption, draw, height)


def _memory_row(axes: Any, at: int, point: Point, colour: str) -> None:
    taken, live, limit = (point.memory.get(name) for name in ("committed", "live", "reserved"))
    if taken and live:
        axes.plot([live, taken], [at, at], color=colour, linewidth=3, alpha=0.35, zorder=2)
    if limit:
        axes.plot(limit, at, marker="|", markersize=11, markeredgewidth=1.6, color=colour, zorder=3)
    if taken:
        axes.plot(taken, at, marker="s", markersize=6.5, color=colour, zorder=4)
    if live:
        axes.plot(live, at, marker="o", markersize=6.5, color=colour, zorder=5)


# ------------------------------------------------------------------------------------------------------------ drawing


def _grid(axes: Any, ink: str, only: str = "both") -> None:
    axes.grid(True, which="major", axis=only, color=ink, alpha=0.13, linewidth=0.8)
    axes.set_axisbelow(True)


def _made(name: str, title: str, caption: str, draw: Callable[[Any, str], None], height: float) -> Figure:
    png = _rendered(draw, "#1c2126", height, name, format="png", dpi=160, facecolor="white")
    svg = _rendered(draw, _INK, height, name, format="svg", transparent=True, metadata={"Date": None})
    return Figure(name, title, caption, png, _inline(svg.decode(), title))


def _rendered(draw: Callable[[Any, str], None], ink: str, height: float, name: str, **options: Any) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    ink_of = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**_FONT, "svg.hashsalt": name, **dict.fromkeys(ink_of, ink), "axes.facecolor": "none"}
    with mpl.rc_context(style):
        figure = Canvas(figsize=(_WIDTH, height))
        draw(figure, ink)
        out = io.BytesIO()
        figure.savefig(out, **options)
    return out.getvalue()


def _inline(svg: str, title: str) -> str:
    """An SVG file as an element of a page: sized by the page, its text in the page's font and colour."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", element, count=1)
    element = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", element, count=1)
    element = element.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    element = re.sub(r"font: ((?:\w+ )*[\d.]+px) [^;\"]*", _font, element)
    return element.replace(_INK, "currentColor")


def _font(match: re.Match[str]) -> str:
    *weight, size = match[1].split()
    return f"font-size: {size}; font-weight: {weight[0] if weight else 'normal'}; font-family: inherit"
