"""``skyasync replay --show``: episodes in a terminal, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyasync.errors import UserError
from skyasync.observability import jsonl
from skyasync.observability.report import samples, settings
from skyasync.rollout.trajectory_files import NONFINITE

Row = Mapping[str, Any]
COLOURS = ("blue", "dark_orange3", "green4", "magenta", "gold3", "deep_sky_blue3")
_FAINT = "dim italic"
MOST = 20  # episodes that are printed if none is named


def show(
    run: Path,
    step: int | None,
    episode: str,
    *,
    tokens: bool = False,
    nonfinite: bool = False,
    console: Console | None = None,
) -> None:
    """Print the episodes of a step (by default the last), or the one whose id begins with ``episode``.

    Args:
        nonfinite: of the batches that were not trained on because of non-finite values.

    Raises:
        UserError: if there are none.
    """
    console = console or Console(highlight=False)
    rows = _recorded(run, step, episode, NONFINITE if nonfinite else "")
    if not rows and not nonfinite:
        samples_of_run: Sequence[Row] = jsonl.read_rows(run / "samples.jsonl")
        if step is None and not episode:
            step = max((row["step"] for row in samples_of_run), default=0)
        rows = [row for row in samples_of_run if step in (None, row["step"]) and row["prompt_id"].startswith(episode)]
    if not rows:
        raise UserError(f"{run} has recorded no {f'episode {episode}' if episode else f'episodes of step {step}'}")
    for row in rows[:MOST]:
        _print(row, console, tokens=tokens)
    if len(rows) > MOST:
        console.print(f"and {len(rows) - MOST} more of step {rows[0]['step']}: name one with --episode")


def _recorded(run: Path, step: int | None, episode: str, folder: str) -> list[Row]:
    """The episodes of the recorded trajectories, if there are any."""
    from skyasync.rollout.metrics import token_columns
    from skyasync.rollout.trajectory_files import files_of, read

    files = files_of(run / folder)
    if step is not None:
        files = [file for file in files if int(file.stem.removeprefix("step_")) == step]
    elif not episode:
        files = files[-1:]
    if not files:
        return []
    model = str(settings.read(run / "config.yaml").get(settings.MODEL, ""))
    if model and (not model.startswith("/") or Path(model).is_dir()):
        from skyasync.rollout.tokenizer import load_tokenizer

        decode: Callable[..., str] = load_tokenizer(model).decode
    else:  # the tokenizer is gone: tokens are numbers

        def decode(tokens: Sequence[int]) -> str:
            return f"<{tokens[0]}>"

    rows = list[Row]()
    for file in files:
        recorded = read(file)
        logprobs = iter(recorded.trainer_logprobs)
        for group in recorded.groups:
            for trajectory in group.trajectories:
                sequences = [(segments, next(logprobs)) for segments in trajectory.sequences]
                if not str(trajectory.id).startswith(episode):
                    continue
                for segments, trained in sequences:
                    rows.append(
                        {
                            "step": recorded.step,
                            "prompt_id": str(trajectory.id),
                            "prompt": group.prompt.messages[-1]["content"],
                            "reward": trajectory.reward,
                            "stop_reason": trajectory.stop_reason,
                            "tokens": token_columns(segments, decode, trained, most=None),
                        }
                    )
    return rows


def _print(row: Row, console: Console, *, tokens: bool) -> None:
    sample = samples.sample(row)
    versions = sorted({token.version for token in sample.tokens if token.version >= 0})
    head = f"{sample.name}  step {row['step']}  reward {sample.reward:.3g}  {sample.ended}  versions "
    line = Text(head, style="bold")
    for version in versions:
        line.append(f" {version} ", style=_colour(version))
    console.print(line)
    console.print(Text(sample.prompt, style="dim"))
    if not tokens:
        text = Text()
        for token in sample.tokens:
            text.append(token.text, style=_FAINT if token.version < 0 else _colour(token.version))
        console.print(text if sample.tokens else Text(sample.response))
        console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "version", "engine", "trainer", "gap"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for place, token in enumerate(sample.tokens):
        figures = ["" if value is None else f"{value:.4f}" for value in (token.engine, token.trainer, token.gap)]
        gap = Text(figures[2], style="bold red" if token.strength > 0.3 else "")
        shown = Text(repr(token.text), style=_FAINT if token.version < 0 else "")
        table.add_row(str(place), shown, "" if token.version < 0 else str(token.version), figures[0], figures[1], gap)
    console.print(table)


def _colour(version: int) -> str:
    return f"white on {COLOURS[version % len(COLOURS)]}"
