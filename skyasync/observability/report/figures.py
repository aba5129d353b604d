"""Pictures as SVG for a page: matplotlib draws, the page's style sheet colours.

Invariant: a picture holds no colour of its own but variables of the page (``--ink``, ``--c0``,
...), so light and dark are the page's business; text stays text. Nothing is drawn of data that is
not there.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from skyasync.observability.plots import Row, plot_style, series, smooth
from skyasync.observability.report.charts import Chart, step_parts, tokens_by_staleness
from skyasync.observability.timeline import END, IDLE, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LineStyle = str | tuple[int, tuple[float, ...]]

SIZE = (5.4, 3.1)  # inches: wide enough for a phone's column, and read there without zooming
LARGE = (7.4, 3.3)
MOST_BARS = 40
MOST_POINTS = 500
COLOURS = 8
STEPS = 5  # of a timeline, that are shown
MOST_SPANS = 4000  # that are read
MOST_LANES = 9
_STYLES: tuple[LineStyle, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_LARGE = 5000  # numbers of this size have their thousands apart
_LONG = 22  # characters of a label that needs a line of the legend to itself

# Colours that stand for the page's variables; a picture has no others.
_INK = "#010101"
_PALE = "#020202"
_GRID = "#030303"
_PAPER = "#040404"
_SERIES = [f"#0{n}0{n}1{n}" for n in range(COLOURS)]
_VARIABLES = {_INK: "--ink", _PALE: "--pale", _GRID: "--grid", _PAPER: "--card"} | {
    colour: f"--c{n}" for n, colour in enumerate(_SERIES)
}
_STYLE: Any = plot_style(_INK, _PALE, _GRID, 11.5) | {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "xtick.color": _PALE,
    "ytick.color": _PALE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
}


def draw(chart: Chart, runs: Mapping[str, Sequence[Row]]) -> str:
    """The chart of these runs as an ``<svg>``; "" if no run has logged its metrics."""
    if chart.kind == "histogram":
        return _histogram(chart, runs)
    if chart.kind == "stack":
        return _stack(chart, next(iter(runs.values())))
    several = len(runs) > 1
    logged = [
        (run, line, number)
        for number, (run, rows) in enumerate(runs.items())
        for line in chart.lines
        if series(rows, line.metric)[0]
    ]
    if not logged:
        return ""
    shown = list(dict.fromkeys(line for _, line, _ in logged))
    with canvas(chart.title, LARGE if chart.large else SIZE) as (figure, ax, out):
        for count, (run, line, number) in enumerate(logged):
            if several:
                label = run if len(shown) == 1 else ""
            else:
                label = line.label
            if several:
                style = _STYLES[shown.index(line) % len(_STYLES)]
            else:
                style = "-"
            colour = colour_of(number if several else count)
            steps, values = thinned(*series(runs[run], line.metric))
            if line.low and line.high:
                low_at, lows = thinned(*series(runs[run], line.low))
                high_at, highs = thinned(*series(runs[run], line.high))
                if low_at == high_at and low_at:
                    ax.fill_between(low_at, lows, highs, color=colour, alpha=0.2, linewidth=0)
            if line.smooth and len(values) > 8:
                ax.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
                values = smooth(values)
            dots: Any = (
                {"marker": "o", "markersize": 4.5} if line.markers or len(values) == 1 else {}
            )
            ax.plot(
                steps,
                values,
                color=colour,
                linestyle=style,
                linewidth=1.7,
                label=_literal(label) or "_",
                **dots,
            )
        if several and len(shown) > 1:  # colours are runs, as the page says; styles are lines
            for line, style in zip(shown, itertools.cycle(_STYLES), strict=False):
                ax.plot(
                    [], [], color=_INK, linestyle=style, linewidth=1.5, label=_literal(line.label)
                )
        _finish(figure, ax, chart, len(logged), "training step")
    return out.getvalue()


def _histogram(chart: Chart, runs: Mapping[str, Sequence[Row]]) -> str:
    counts = {run: tokens for run, rows in runs.items() if (tokens := tokens_by_staleness(rows))}
    if not counts:
        return ""
    with canvas(chart.title) as (figure, ax, out):
        width = 0.8 / len(counts)
        for number, (run, tokens) in enumerate(counts.items()):
            total = sum(tokens.values()) or 1.0
            at = [staleness + (number - (len(counts) - 1) / 2) * width for staleness in tokens]
            shares = [count / total for count in tokens.values()]
            bars = ax.bar(
                at,
                shares,
                width * 0.92,
                color=colour_of(list(runs).index(run)),
                label=_literal(run),
            )
            if len(counts) == 1 and len(tokens) <= 12:
                ax.bar_label(
                    bars,
                    [f"{share:.0%}" if share >= 0.005 else "" for share in shares],
                    fontsize=10.5,
                )
        ax.set_xticks(sorted({staleness for tokens in counts.values() for staleness in tokens}))
        ax.grid(visible=False, axis="x")
        _finish(
            figure,
            ax,
            Chart(chart.title, (), percent=True),
            len(counts) if len(runs) > 1 else 1,
            "versions",
        )
    return out.getvalue()


def _stack(chart: Chart, rows: Sequence[Row]) -> str:
    """A bar for each step, or for neighbouring ones the mean."""
    steps = [(row["step"], parts) for row in rows if (parts := step_parts(row))]
    if not steps:
        return ""
    size = -(-len(steps) // MOST_BARS)
    slices = [steps[start : start + size] for start in range(0, len(steps), size)]
    at = [fmean(step for step, _ in part) for part in slices]
    with canvas(chart.title) as (figure, ax, out):
        bottom = [0.0] * len(at)
        for number, line in enumerate(chart.lines):
            heights = [fmean(parts.get(line.metric, 0.0) for _, parts in part) for part in slices]
            ax.bar(
                at,
                heights,
                0.9 * size,
                bottom=bottom,
                color=colour_of(number),
                label=line.label,
                linewidth=0,
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        ax.grid(visible=False, axis="x")
        _finish(figure, ax, chart, len(chart.lines), "training step")
    return out.getvalue()


def colour_of(number: int) -> str:
    """The colour of the n-th line, as the page has it."""
    return _SERIES[number % COLOURS]


def _literal(label: str) -> str:
    """The label as it is: Matplotlib hides one that begins with an underscore, and reads dollars as
    formulas."""
    return " " * label.startswith("_") + label.replace("$", r"\$")


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most ``MOST_POINTS`` points: means of neighbours, where there are more."""
    size = -(-len(steps) // MOST_POINTS)
    if size <= 1:
        return list(map(float, steps)), list(values)
    slices = [slice(start, start + size) for start in range(0, len(steps), size)]
    return [fmean(steps[part]) for part in slices], [fmean(values[part]) for part in slices]


def _finish(figure: Figure, ax: Axes, chart: Chart, lines: int, below: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

    ax.set_xlabel(below)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if chart.log and ax.dataLim.minposy == ax.dataLim.y0 > 0:
        ax.set_yscale("log")
    if not chart.log and ax.get_ylim()[1] >= _LARGE:
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if chart.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        low, high = ax.get_ylim()
        if low > -0.1 and high < 1.1:
            ax.set_ylim(min(0.0, max(low, -0.02)), max(high, 0.02))
    if lines > 1 or (ax.lines and not ax.patches):
        texts = ax.get_legend_handles_labels()[1]
        columns = 1 if max(map(len, texts)) > _LONG or lines < 2 else 2
        figure.legend(
            *ax.get_legend_handles_labels(),
            loc="outside upper left",
            ncols=columns,
            handlelength=1.6,
            borderpad=0.1,
        )


@contextmanager
def canvas(
    title: str, size: tuple[float, float] = SIZE
) -> Iterator[tuple[Figure, Axes, io.StringIO]]:
    """A figure, its axes, and a buffer that holds the SVG after the block."""
    # Without pyplot: no window system is looked for and no figure outlives the call. Imported here:
    # it takes a second.
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    with rc_context(
        {**_STYLE, "svg.hashsalt": title}
    ):  # pictures of one page must not share the names of their parts
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.subplots(), out
        raw = io.StringIO()
        figure.savefig(
            raw,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    # The ``<svg>`` alone, as wide as its column, with the page's colours.
    svg = raw.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for the whole page
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    out.write(svg)


def read_spans(path: Path) -> list[Span]:
    """The last spans of the trace's last part, by lane; none if there is no trace."""
    lanes: dict[tuple[int, int], str] = {}
    newest: deque[str] = deque(maxlen=MOST_SPANS)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"ph": "X"' in line and not any(
                    f'"name": "{name}"' in line for name in (IDLE, END)
                ):
                    newest.append(line)
                elif '"thread_name"' in line and (event := _event(line)):
                    lanes[event["pid"], event["tid"]] = str(event["args"]["name"])
    except OSError:
        return []
    events = [event for line in newest if (event := _event(line))]
    part = max((event["pid"] for event in events), default=0)
    return [
        Span(
            event["name"],
            lanes.get((part, event["tid"]), "?"),
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
            event.get("args", {}).get("step"),
        )
        for event in events
        if event["pid"] == part
    ]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.strip().strip(","))
    except json.JSONDecodeError:  # torn by a crash, or being written
        return None
    if isinstance(event, dict) and "pid" in event:
        return event
    return None


def last_steps(spans: Sequence[Span], steps: int = STEPS) -> list[Span]:
    """The spans from the beginning of the last so many training steps on."""
    trained = sorted({s.step for s in spans if s.name == "train" and s.step is not None})[-steps:]
    if not trained:
        return list(spans)
    first = min(s.start_s for s in spans if s.step == trained[0] and s.name == "train")
    return [s for s in spans if s.end_s > first]


def draw_timeline(spans: Sequence[Span]) -> str:
    """The spans as an ``<svg>``, a lane below the other; "" if there are none."""
    if not spans:
        return ""
    start = min(s.start_s for s in spans)
    order = {"trainer": 0, "evaluation": 1}  # then the other tracks' lanes in their order

    def position(track: str) -> tuple[int, int, str]:
        name, _, lane = track.partition(" (")
        return order.get(name, 2), int(lane.rstrip(")")) if lane else 1, name

    tracks = sorted({s.track for s in spans}, key=position)[:MOST_LANES]
    names = sorted({s.name for s in spans if s.track in tracks})
    with canvas("timeline", (15.0, 1.0 + 0.28 * len(tracks))) as (figure, ax, out):
        for row, track in enumerate(tracks):
            own = sorted((s for s in spans if s.track == track), key=lambda s: s.start_s - s.end_s)
            for span in own:  # the longest first: what lies within it is drawn on it, and less high
                inside = any(
                    o is not span and o.start_s <= span.start_s and span.end_s <= o.end_s
                    for o in own[:50]
                )
                height = 0.5 if inside else 0.8
                width_s = max(span.end_s - span.start_s, 1e-4)
                bar = [(span.start_s - start, width_s)], (row - height / 2, height)
                ax.broken_barh(*bar, color=colour_of(names.index(span.name)), linewidth=0)
        for number, name in enumerate(names):
            ax.barh([-1], [0], color=colour_of(number), label=name.replace("_", " "))
        ax.set_yticks(range(len(tracks)), tracks)
        ax.set_ylim(len(tracks) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("seconds")
        figure.legend(
            loc="outside upper left", ncols=min(len(names), 8), handlelength=1, columnspacing=1.2
        )
    return out.getvalue()
