"""Pictures as SVG for a page: matplotlib draws, the page's style sheet colours.

Invariant: the colours of a picture are variables of the page (``--ink``, ``--c0``, ...), which
sets them for light and dark; text stays text. A metric that was not logged is not drawn.
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
from operator import add
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from skyasync.observability.plots import Row, plot_style, series, smooth
from skyasync.observability.report.charts import Chart, Line, step_parts, tokens_by_staleness
from skyasync.observability.timeline import END, IDLE, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LineStyle = str | tuple[int, tuple[float, ...]]

SIZE = (5.4, 3.1)  # inches: wide enough for a phone's column, and read there without zooming
LARGE = (7.4, 3.3)
MOST_BARS = 40  # more would be too thin to read
MOST_POINTS = 500  # about as many as a picture has columns of pixels
COLOURS = 8  # more are not told apart; further lines begin with the first colour again
STEPS = 5  # steps that the timeline shows
MOST_SPANS = 4000  # spans of a trace that are read: enough for some steps
MOST_LANES = 9  # lanes of the timeline, which then fits a screen
_NO_WORK = (f'"name": "{IDLE}"', f'"name": "{END}"')  # in the line of a span
_OUTER = 50  # spans of a lane, the longest, that others may be nested in: drawing stays linear
_STYLES: tuple[LineStyle, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_LARGE = 5000  # axes that reach this have separators of thousands
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
    logged: list[tuple[str, Line]] = []
    for run, rows in runs.items():
        for line in chart.lines:
            if series(rows, line.metric)[0]:
                logged.append((run, line))
    if not logged:
        return ""
    lines = list(dict.fromkeys(line for _, line in logged))
    with canvas(chart.title, LARGE if chart.large else SIZE) as (figure, ax, out):
        if len(runs) == 1:
            for number, (run, line) in enumerate(logged):
                _draw_line(
                    ax,
                    line,
                    runs[run],
                    colour_of(number),
                    "-",
                    line.label,
                )
        else:
            # Colours are runs, as the page says; styles are lines.
            run_names = list(runs)
            for run, line in logged:
                colour = colour_of(run_names.index(run))
                style = _STYLES[lines.index(line) % len(_STYLES)]
                _draw_line(
                    ax,
                    line,
                    runs[run],
                    colour,
                    style,
                    run if len(lines) == 1 else "",
                )
        if len(runs) > 1 and len(lines) > 1:
            # Empty lines for the legend, which names the styles.
            for line, style in zip(lines, itertools.cycle(_STYLES), strict=False):
                label = _literal(line.label)
                ax.plot(
                    [],
                    [],
                    color=_INK,
                    linestyle=style,
                    linewidth=1.5,
                    label=label,
                )
        _finish(figure, ax, chart, len(logged), "training step")
    return out.getvalue()


def _draw_line(
    ax: Axes, line: Line, rows: Sequence[Row], colour: str, style: LineStyle, label: str
) -> None:
    """One metric of one run, with its band; "" as ``label`` leaves it out of the legend."""
    steps, values = thinned(rows, line.metric)
    if line.low and line.high:
        low_steps, lows = thinned(rows, line.low)
        high_steps, highs = thinned(rows, line.high)
        if low_steps == high_steps and low_steps:
            ax.fill_between(
                low_steps,
                lows,
                highs,
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
    if line.smooth and len(values) > 8:
        ax.plot(
            steps,
            values,
            color=colour,
            alpha=0.3,
            linewidth=1,
        )
        values = smooth(values)
    (curve,) = ax.plot(
        steps,
        values,
        color=colour,
        linestyle=style,
        linewidth=1.7,
    )
    curve.set_label(_literal(label) or "_")  # Matplotlib's legend leaves out names like "_"
    if line.markers or len(values) == 1:  # a line through one point is invisible
        curve.set_marker("o")
        curve.set_markersize(4.5)


def _histogram(chart: Chart, runs: Mapping[str, Sequence[Row]]) -> str:
    counts: dict[str, dict[int, float]] = {}  # run -> staleness -> tokens
    for run, rows in runs.items():
        tokens = tokens_by_staleness(rows)
        if tokens:
            counts[run] = tokens
    if not counts:
        return ""
    run_names = list(runs)
    ticks: set[int] = set()
    with canvas(chart.title) as (figure, ax, out):
        width = 0.8 / len(counts)  # the bars of one staleness stand side by side
        for number, (run, tokens) in enumerate(counts.items()):
            ticks.update(tokens)
            total = sum(tokens.values()) or 1.0
            offset = (number - (len(counts) - 1) / 2) * width
            centres = [staleness + offset for staleness in tokens]
            shares = [count / total for count in tokens.values()]
            colour = colour_of(run_names.index(run))
            bars = ax.bar(
                centres,
                shares,
                width * 0.92,
                color=colour,
                label=_literal(run),
            )
            if len(counts) == 1 and len(tokens) <= 12:  # labels of more bars overlap
                texts = [f"{share:.0%}" if share >= 0.005 else "" for share in shares]
                ax.bar_label(bars, texts, fontsize=10.5)
        ax.set_xticks(sorted(ticks))
        ax.grid(visible=False, axis="x")
        lines = len(counts) if len(runs) > 1 else 1
        _finish(figure, ax, Chart(chart.title, (), percent=True), lines, "versions")
    return out.getvalue()


def _stack(chart: Chart, rows: Sequence[Row]) -> str:
    """A bar for each step, or the mean of neighbouring steps."""
    steps = []
    seconds = []  # of a step, by what they were for
    for row in rows:
        components = step_parts(row)
        if components:
            steps.append(row["step"])
            seconds.append(components)
    if not steps:
        return ""
    slices = _slices(len(steps), MOST_BARS)
    size = slices[0].stop
    centres = _means(steps, slices)
    with canvas(chart.title) as (figure, ax, out):
        bottoms = [0.0] * len(centres)
        for number, line in enumerate(chart.lines):
            values = [components.get(line.metric, 0.0) for components in seconds]
            heights = _means(values, slices)
            ax.bar(
                centres,
                heights,
                0.9 * size,
                bottom=bottoms,
                color=colour_of(number),
                label=line.label,
                linewidth=0,
            )
            bottoms = list(map(add, bottoms, heights))
        ax.grid(visible=False, axis="x")
        _finish(figure, ax, chart, len(chart.lines), "training step")
    return out.getvalue()


def colour_of(number: int) -> str:
    """The colour of the n-th line, as the page has it."""
    return _SERIES[number % COLOURS]


def _literal(label: str) -> str:
    """The label as Matplotlib shows it unchanged.

    It hides a label that begins with an underscore, and reads dollars as formulas.
    """
    label = label.replace("$", r"\$")
    if label.startswith("_"):
        return f" {label}"
    return label


def thinned(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """At most ``MOST_POINTS`` steps and values: means of neighbours, if there are more."""
    steps, values = series(rows, name)
    slices = _slices(len(steps), MOST_POINTS)
    return _means(steps, slices), _means(values, slices)


def _means(values: Sequence[float], slices: Sequence[slice]) -> list[float]:
    return [fmean(values[neighbours]) for neighbours in slices]


def _slices(count: int, limit: int) -> list[slice]:
    """At most ``limit`` slices of equal size (the last one may be shorter) of ``count`` items."""
    size = -(-count // limit) or 1  # rounded up
    return [slice(start, start + size) for start in range(0, count, size)]


def _finish(figure: Figure, ax: Axes, chart: Chart, lines: int, below: str) -> None:
    """Scales, number formats and the legend: set when the data is drawn, on which they depend.

    Args:
        lines: number of lines or bars that a legend would name.
        below: label of the horizontal axis.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

    ax.set_xlabel(below)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    # A logarithmic axis would leave out values that are not positive.
    if chart.log and ax.dataLim.minposy == ax.dataLim.y0 > 0:
        ax.set_yscale("log")
    if not chart.log and ax.get_ylim()[1] >= _LARGE:
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if chart.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        low, high = ax.get_ylim()
        # Shares begin at 0, with a little room below: a line at 0 is not hidden by the axis.
        if low > -0.1 and high < 1.1:
            ax.set_ylim(min(0.0, max(low, -0.02)), max(high, 0.02))
    if lines > 1 or (ax.lines and not ax.patches):
        handles, texts = ax.get_legend_handles_labels()
        columns = 1 if max(map(len, texts)) > _LONG or lines < 2 else 2
        figure.legend(
            handles,
            texts,
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
    # Without pyplot: no window system is looked for and no figure outlives the call.
    # Imported here: it takes a second.
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    # The salt: pictures of one page must not share the ids of their elements.
    with rc_context({**_STYLE, "svg.hashsalt": title}):
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
    svg = svg[svg.index("<svg") :]  # without XML's declaration, which HTML does not allow
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
    newest_lines: deque[str] = deque(maxlen=MOST_SPANS)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if '"ph": "X"' in line and not any(name in line for name in _NO_WORK):
                    # Parsed later: of a long trace only the last lines are needed.
                    newest_lines.append(line)
                elif '"thread_name"' in line:
                    event = _event(line)
                    if event:
                        lanes[event["pid"], event["tid"]] = str(event["args"]["name"])
    except OSError:
        return []
    spans: list[Span] = []
    part = 0
    for line in newest_lines:
        event = _event(line)
        if not event or event["pid"] < part:
            continue
        if event["pid"] > part:  # the run was resumed: only its newest part is shown
            part = event["pid"]
            spans = []
        span = Span(
            name=event["name"],
            track=lanes.get((part, event["tid"]), "?"),
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            step=event.get("args", {}).get("step"),
        )
        spans.append(span)
    return spans


def _event(line: str) -> dict[str, Any] | None:
    """The event of a line of a trace; None if the line is no complete event."""
    try:
        event = json.loads(line.strip().strip(","))
    except json.JSONDecodeError:  # torn by a crash, or being written
        return None
    if isinstance(event, dict) and "pid" in event:
        return event
    return None


def last_steps(spans: Sequence[Span], steps: int = STEPS) -> list[Span]:
    """The spans from the beginning of the last so many training steps on."""
    starts: dict[int, float] = {}  # of training, by step
    for span in spans:
        if span.name == "train" and span.step is not None:
            starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
    if not starts:
        return list(spans)
    newest_steps = sorted(starts)[-steps:]
    start_s = starts[newest_steps[0]]
    return [span for span in spans if span.end_s > start_s]


def draw_timeline(spans: Sequence[Span]) -> str:
    """The spans as an ``<svg>``, a lane below the other; "" if there are none."""
    if not spans:
        return ""
    start_s = min(span.start_s for span in spans)
    tracks = sorted({span.track for span in spans}, key=_lane_order)[:MOST_LANES]
    names = sorted({span.name for span in spans if span.track in tracks})
    with canvas("timeline", (15.0, 1.0 + 0.28 * len(tracks))) as (figure, ax, out):
        for row, track in enumerate(tracks):
            lane = [span for span in spans if span.track == track]
            # The longest first: a span inside another is drawn on it, and less high.
            lane.sort(key=lambda span: span.start_s - span.end_s)
            for span in lane:
                height = 0.5 if _is_nested(span, lane) else 0.8
                width_s = max(span.end_s - span.start_s, 1e-4)  # else a short one is not drawn
                ax.broken_barh(
                    [(span.start_s - start_s, width_s)],
                    (row - height / 2, height),
                    color=colour_of(names.index(span.name)),
                    linewidth=0,
                )
        for number, name in enumerate(names):
            # A bar outside of the picture, for the legend.
            ax.barh(
                [-1],
                [0],
                color=colour_of(number),
                label=name.replace("_", " "),
            )
        ax.set_yticks(range(len(tracks)), tracks)
        ax.set_ylim(len(tracks) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("seconds")
        figure.legend(
            loc="outside upper left", ncols=min(len(names), 8), handlelength=1, columnspacing=1.2
        )
    return out.getvalue()


def _lane_order(track: str) -> tuple[int, int, str]:
    """A sort key: the trainer, the evaluation, then the other tracks, all first lanes first."""
    name, _, lane = track.partition(" (")
    number = int(lane.rstrip(")")) if lane else 1  # ``Timeline`` names the second lane "x (2)"
    return {"trainer": 0, "evaluation": 1}.get(name, 2), number, name


def _is_nested(span: Span, lane: Sequence[Span]) -> bool:
    """Whether the span lies inside another of its lane, the longest of which come first."""
    return any(
        outer is not span and outer.start_s <= span.start_s and span.end_s <= outer.end_s
        for outer in lane[:_OUTER]
    )
