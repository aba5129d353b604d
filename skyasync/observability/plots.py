"""The picture of a run, ``reward.png``, and what the report's charts share with it.

Invariant: a picture that cannot be drawn is a warning and never an error; an old picture is
replaced only by a complete new one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.observability import jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 150
# Blue and vermilion of Okabe and Ito's palette: distinct for colour-blind readers, too.
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
    """Draw training reward, held-out score and staleness per step; True if the file was written."""
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
    # Without pyplot: no window system is looked for and no figure outlives the call.
    # Imported here: it takes a second, and the package must not need it.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        if series(rows, "staleness/mean")[0]:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
            _draw_rewards(top, rows)
            _draw_staleness(bottom, rows)
        else:
            top = bottom = figure.subplots()
            _draw_rewards(top, rows)
        top.set_ylabel("reward")
        top.legend(frameon=False, loc="best")
        bottom.set_xlabel("training step")
        scratch = out.with_name(f".{out.name}.tmp")  # replaces the old picture once it is complete
        figure.savefig(scratch, format="png")
        os.replace(scratch, out)


def _draw_rewards(ax: Axes, rows: Sequence[Row]) -> None:
    """The training reward, and the scores with the figures of the first and the last."""
    steps, rewards = series(rows, "reward/mean")
    if steps:
        ax.plot(
            steps,
            rewards,
            color=BLUE,
            alpha=0.3,
            linewidth=1.2,
        )
        ax.plot(
            steps,
            smooth(rewards),
            color=BLUE,
            linewidth=2,
            label="training reward",
        )
    steps, scores = series(rows, "eval/score")
    if not steps:
        return
    ax.plot(
        steps,
        scores,
        color=ORANGE,
        label="held-out score",
        linewidth=1,
        linestyle=(0, (4, 2)),
        zorder=3,  # above the rewards, which are many
        marker="o",
        markersize=6,
        markeredgecolor="white",
    )
    for index in sorted({0, len(steps) - 1}):  # one figure if there is one score
        ax.annotate(
            f"{scores[index]:.2f}",
            (steps[index], scores[index]),
            color=ORANGE,
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
        )


def _draw_staleness(ax: Axes, rows: Sequence[Row]) -> None:
    """The mean staleness, in a band from the smallest to the largest."""
    steps, means = series(rows, "staleness/mean")
    low_steps, lows = series(rows, "staleness/min")
    high_steps, highs = series(rows, "staleness/max")
    if low_steps == high_steps and low_steps:
        ax.fill_between(
            low_steps,
            lows,
            highs,
            step="mid",
            color=PALE,
            alpha=0.2,
            linewidth=0,
        )
    ax.plot(
        steps,
        means,
        color=PALE,
        drawstyle="steps-mid",
        linewidth=1.8,
    )
    ax.set_ylabel("staleness")
    ax.set_ylim(-0.15, max(1.0, *highs, *means, *ax.get_ylim()) + 0.3)
    locator: Any = ax.yaxis.get_major_locator()  # a ``MaxNLocator``
    locator.set_params(integer=True, nbins=3)  # versions are whole numbers


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths if two have the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it was logged and finite."""
    points = jsonl.rows_with(rows, name)
    return [row["step"] for row in points], jsonl.values_of(points, name)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the values; narrower near both ends."""
    reach = max(1, len(values) // 20)
    means = []
    for index in range(len(values)):
        # As far to the left as to the right: else the ends would be drawn towards the middle.
        half = min(reach, index, len(values) - 1 - index)
        window = values[index - half : index + half + 1]
        means.append(sum(window) / len(window))
    return means
