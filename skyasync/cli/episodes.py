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
MOST = 20  # episodes that are printed where none is named


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
        nonfinite: of the batches that could not be learnt from.

    Raises:
        UserError: if there are none.
    """
    console = console or Console(highlight=False)
    found = _of_files(run, step, episode, NONFINITE if nonfinite else "")
    if not nonfinite:
        found = found or _of_samples(run, step, episode)
    if not found:
        raise UserError(f"{run} has recorded no {f'episode {episode}' if episode else f'episodes of step {step}'}")
    for row in found[:MOST]:
        _print(row, console, tokens=tokens)
    if len(found) > MOST:
        console.print(f"and {len(found) - MOST} more of step {found[0]['step']}: name one with --episode")


def _of_samples(run: Path, step: int | None, episode: str) -> list[Row]:
    rows: Sequence[Row] = jsonl.read_rows(run / "samples.jsonl")
    wanted = step if step is not None or episode else max((row["step"] for row in rows), default=0)
    return [r for r in rows if (wanted is None or r["step"] == wanted) and r["prompt_id"].startswith(episode)]


def _of_files(run: Path, step: int | None, episode: str, folder: str) -> list[Row]:
    """From the recorded trajectories, if there are any."""
    from skyasync.rollout.trajectory_files import files_of, read

    files = files_of(run / folder)
    if step is not None:
        files = [file for file in files if int(file.stem.removeprefix("step_")) == step]
    elif not episode:
        files = files[-1:]
    if not files:
        return []
    decode, found = _decoder(run), list[Row]()
    for file in files:
        recorded = read(file)
        theirs = iter(recorded.trainer_logprobs)
        for group in recorded.groups:
            for trajectory in group.trajectories:
                of_each = [(segments, next(theirs)) for segments in trajectory.sequences]
                if str(trajectory.id).startswith(episode):
                    found += [_row(recorded.step, group.prompt, trajectory, s, t, decode) for s, t in of_each]
    return found


def _row(step: int, prompt: Any, trajectory: Any, segments: Any, trained: Any, decode: Callable[..., str]) -> Row:  # noqa: ANN401
    from skyasync.rollout.metrics import token_columns

    return {
        "step": step,
        "prompt_id": str(trajectory.id),
        "prompt": prompt.messages[-1]["content"],
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "tokens": token_columns(segments, decode, trained, most=None),
    }


def _decoder(run: Path) -> Callable[..., str]:
    """The model's tokenizer, if it is still there; else tokens are their numbers."""
    path = str(settings.read(run / "config.yaml").get(settings.MODEL, ""))
    if path and (not path.startswith("/") or Path(path).is_dir()):
        from skyasync.rollout.tokenizer import load_tokenizer

        return load_tokenizer(path).decode
    return lambda tokens: f"<{tokens[0]}>"


def _print(row: Row, console: Console, *, tokens: bool) -> None:
    sample = samples.sample(row)
    versions = sorted({token.version for token in sample.tokens if token.version >= 0})
    head = f"{sample.name}  step {row['step']}  reward {sample.reward:.3g}  {sample.ended}  versions "
    line = Text(head, style="bold")
    for version in versions:
        line.append(f" {version} ", style=_colour(version))
    console.print(line)
    console.print(Text(sample.prompt, style="dim"))
    if tokens:
        console.print(_table(sample))
        return
    text = Text()
    for token in sample.tokens:
        text.append(token.text, style=_FAINT if token.version < 0 else _colour(token.version))
    console.print(text if sample.tokens else Text(sample.response))
    console.print()


def _table(sample: samples.PageSample) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "version", "engine", "trainer", "gap"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for place, token in enumerate(sample.tokens):
        version = "" if token.version < 0 else str(token.version)
        figures = ["" if value is None else f"{value:.4f}" for value in (token.engine, token.trainer, token.gap)]
        style = _FAINT if token.version < 0 else ""
        gap = Text(figures[2], style="bold red" if token.strength > 0.3 else "")
        table.add_row(str(place), Text(repr(token.text), style=style), version, figures[0], figures[1], gap)
    return table


def _colour(version: int) -> str:
    return f"white on {COLOURS[version % len(COLOURS)]}"
