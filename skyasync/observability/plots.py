"""Pictures of a run: ``reward.png``, and runs side by side.

    python -m skyasync.observability.plots RUN_DIR [RUN_DIR ...] [--out PICTURE]

Invariant: a picture that cannot be drawn is a warning and never an error; an old picture is replaced only
by a complete new one.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyasync.observability import jsonl

logger = logging.getLogger(__name__)

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 150
# Okabe and Ito's palette: also distinct for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, PALE = "#333333", "#8A8A8A"
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}

Row = Mapping[str, Any]


def plot_reward(metrics_path: Path | str, out_path: Path | str) -> bool:
    """Training reward, held-out score and staleness per step; True if the picture was written."""
    return _guarded({"": Path(metrics_path)}, Path(out_path))


def compare_runs(run_dirs: Sequence[Path], out_path: Path | str) -> bool:
    """The same for several runs in one picture, each in its colour; True if the picture was written."""
    sources = {label: run / "metrics.jsonl" for label, run in zip(labels(run_dirs), run_dirs, strict=True)}
    return _guarded(sources, Path(out_path))


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths if two have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _guarded(sources: Mapping[str, Path], out: Path) -> bool:
    try:
        runs = {label: jsonl.read_rows(path) for label, path in sources.items()}
        if empty := [str(path) for label, path in sources.items() if not runs[label]]:
            raise ValueError(f"no metrics in {', '.join(empty)}")
        _draw(runs, out)
    except Exception as error:  # a picture is never worth a run
        logger.warning("%s was not drawn: %s: %s", out, type(error).__name__, error)
        return False
    return True


def _draw(runs: Mapping[str, Sequence[Row]], out: Path) -> None:
    # Without pyplot: no window system is looked for and no figure outlives the call. Imported here: it takes a second.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        stale = any(series(rows, "staleness/mean")[0] for rows in runs.values())
        if stale:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        else:
            top, bottom = figure.subplots(), None
        for number, (label, rows) in enumerate(runs.items()):
            colours = COLOURS if len(runs) == 1 else [COLOURS[number % len(COLOURS)]] * 2
            prefix = f"{label}: " if label else ""
            steps, rewards = series(rows, "reward/mean")
            if steps:
                top.plot(steps, rewards, color=colours[0], alpha=0.3, linewidth=1.2)
                top.plot(steps, smooth(rewards), color=colours[0], linewidth=2, label=f"{prefix}training reward")
            steps, scores = series(rows, "eval/score")
            if steps:
                top.plot(
                    steps,
                    scores,
                    color=colours[1],
                    linewidth=1,
                    linestyle=(0, (4, 2)),
                    marker="o",
                    markersize=6,
                    markeredgecolor="white",
                    label=f"{prefix}held-out score",
                    zorder=3,
                )
                for index in sorted({0, len(steps) - 1}):
                    top.annotate(
                        f"{scores[index]:.2f}",
                        (steps[index], scores[index]),
                        xytext=(0, 8),
                        textcoords="offset points",
                        ha="center",
                        color=colours[1],
                        fontweight="bold",
                    )
            if bottom is None:
                continue
            colour = PALE if len(runs) == 1 else colours[0]
            steps, means = series(rows, "staleness/mean")
            low_at, lows = series(rows, "staleness/min")
            high_at, highs = series(rows, "staleness/max")
            if low_at == high_at and low_at:
                bottom.fill_between(low_at, lows, highs, step="mid", color=colour, alpha=0.2, linewidth=0)
            bottom.plot(steps, means, color=colour, drawstyle="steps-mid", linewidth=1.8)
            bottom.set_ylabel("staleness")
            bottom.set_ylim(-0.15, max(1.0, *highs, *means, *bottom.get_ylim()) + 0.3)
            locator: Any = bottom.yaxis.get_major_locator()  # a ``MaxNLocator``
            locator.set_params(integer=True, nbins=3)
        top.set_ylabel("reward")
        top.legend(frameon=False, loc="best")
        (top if bottom is None else bottom).set_xlabel("training step")
        scratch = out.with_name(f".{out.name}.tmp")
        figure.savefig(scratch, format="png")
        os.replace(scratch, out)


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it was logged and finite."""
    points = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the values; near the ends the window is cut off evenly."""
    reach = max(1, len(values) // 20)
    means = []
    for index in range(len(values)):
        half = min(reach, index, len(values) - 1 - index)
        window = values[index - half : index + half + 1]
        means.append(sum(window) / len(window))
    return means


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyasync.observability.plots", description="Draw runs' reward curves."
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="default: reward.png in the run's folder, or comparison.png here")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if len(given.run_dirs) == 1:
        out = given.out or given.run_dirs[0] / "reward.png"
        written = plot_reward(given.run_dirs[0] / "metrics.jsonl", out)
    else:
        out = given.out or Path("comparison.png")
        written = compare_runs(given.run_dirs, out)
    if written:
        print(out)
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
