"""The picture of a run, ``reward.png``, and what the report's charts share with it.

Invariant: a picture that cannot be drawn is a warning and never an error; an old picture is
replaced only by a complete new one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyasync.observability import jsonl

logger = logging.getLogger(__name__)

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 150
# Of Okabe and Ito's palette: also distinct for colour-blind readers.
BLUE = "#0072B2"
ORANGE = "#D55E00"
INK = "#333333"
PALE = "#8A8A8A"


def plot_style(ink: str, pale: str, grid: str, size: float) -> dict[str, Any]:
    """Matplotlib's settings for axes of these colours and text of this size in points."""
    return {
        "font.size": size,
        "axes.edgecolor": pale,
        "axes.labelcolor": ink,
        "text.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
    }


STYLE: Any = plot_style(INK, PALE, "#E6E6E6", 10.5) | {"xtick.color": INK, "ytick.color": INK}

Row = Mapping[str, Any]


def plot_reward(metrics: Path, out: Path) -> bool:
    """Training reward, held-out score and staleness per step; True if the picture was written."""
    try:
        rows = jsonl.read_rows(metrics)
        if not rows:
            raise ValueError(f"no metrics in {metrics}")
        _draw(rows, out)
    except Exception as error:  # a picture is never worth a run
        logger.warning("%s was not drawn: %s: %s", out, type(error).__name__, error)
        return False
    return True


def _draw(rows: Sequence[Row], out: Path) -> None:
    # Without pyplot: no window system is looked for and no figure outlives the call. Imported here:
    # it takes a second.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        stale_at, means = series(rows, "staleness/mean")
        if stale_at:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        else:
            top = bottom = figure.subplots()
        steps, rewards = series(rows, "reward/mean")
        if steps:
            top.plot(steps, rewards, color=BLUE, alpha=0.3, linewidth=1.2)
            top.plot(steps, smooth(rewards), color=BLUE, linewidth=2, label="training reward")
        steps, scores = series(rows, "eval/score")
        if steps:
            line: Any = {"linewidth": 1, "linestyle": (0, (4, 2)), "zorder": 3}
            dots: Any = {"marker": "o", "markersize": 6, "markeredgecolor": "white"}
            top.plot(steps, scores, color=ORANGE, label="held-out score", **line, **dots)
            text: Any = {
                "xytext": (0, 8),
                "textcoords": "offset points",
                "ha": "center",
                "fontweight": "bold",
            }
            for index in sorted({0, len(steps) - 1}):
                top.annotate(
                    f"{scores[index]:.2f}", (steps[index], scores[index]), color=ORANGE, **text
                )
        if stale_at:
            low_at, lows = series(rows, "staleness/min")
            high_at, highs = series(rows, "staleness/max")
            if low_at == high_at and low_at:
                bottom.fill_between(
                    low_at, lows, highs, step="mid", color=PALE, alpha=0.2, linewidth=0
                )
            bottom.plot(stale_at, means, color=PALE, drawstyle="steps-mid", linewidth=1.8)
            bottom.set_ylabel("staleness")
            bottom.set_ylim(-0.15, max(1.0, *highs, *means, *bottom.get_ylim()) + 0.3)
            locator: Any = bottom.yaxis.get_major_locator()  # a ``MaxNLocator``
            locator.set_params(integer=True, nbins=3)
        top.set_ylabel("reward")
        top.legend(frameon=False, loc="best")
        bottom.set_xlabel("training step")
        scratch = out.with_name(f".{out.name}.tmp")
        figure.savefig(scratch, format="png")
        os.replace(scratch, out)


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths if two have the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it was logged and finite."""
    points = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the values; near the ends the window is cut off
    evenly."""
    reach = max(1, len(values) // 20)
    means = []
    for index in range(len(values)):
        half = min(reach, index, len(values) - 1 - index)
        window = values[index - half : index + half + 1]
        means.append(sum(window) / len(window))
    return means
