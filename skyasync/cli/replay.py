"""``skyasync replay``: train a run again on its recorded samples, or print them.

Invariant: with the recorded settings and the same model, the updates are those of the run that is
replayed, bitwise; a difference comes from the user's changes alone, and the first one is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyasync.cli.commands import Arguments, is_path, take_options, visible, whole_number
from skyasync.errors import UserError
from skyasync.observability import jsonl
from skyasync.observability.report.page import sample_of
from skyasync.observability.report.settings import MODEL
from skyasync.observability.report.settings import read as read_settings
from skyasync.rollout.trajectory_files import NONFINITE

Row = Mapping[str, Any]
COLOURS = ("blue", "dark_orange3", "green4", "magenta", "gold3", "deep_sky_blue3")
_FAINT = "dim italic"
MOST = 20  # episodes that are printed if none is named

HELP = """\
usage: skyasync replay RUN [--step N] [--from N] [key=value ...]
       skyasync replay RUN --nonfinite [key=value ...]
       skyasync replay RUN --show [--nonfinite] [--step N] [--episode ID] [--tokens]

Trains the steps of a run again, with its recorded samples, settings and plan, into the folder RUN-replay, without
engines. The run must have trainer.dump_trajectories=true. key=value changes a setting, such as the loss or the learning
rate.

--step N     end after step N, with a checkpoint
--from N     begin with the run's checkpoint of step N
--nonfinite  train only the batches with non-finite values (RUN/nonfinite), on trainer.policy.model.path
--show       print episodes, coloured by policy version, instead of training: those of --step (by default the last step)
--episode ID print only the episode whose id begins with ID
--tokens     list each token with its version and its log-probabilities in engine and trainer

Without recorded trajectories --show prints samples.jsonl.
"""


def replay(argv: Arguments) -> None:
    """Train, or show."""
    options, rest = take_options(
        argv,
        {"--step": "3", "--from": "2", "--episode": "e0-i17"},
        ("--show", "--tokens", "--nonfinite"),
        settings=True,
    )
    if not rest or not is_path(rest[0]):
        raise UserError(
            "skyasync replay needs the folder of a run first: skyasync replay runs/NAME"
        )
    run = Path(rest[0])
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    nonfinite = "--nonfinite" in options
    settings = rest[1:]
    if "--step" in options:
        step = whole_number(options["--step"], "--step")
    else:
        step = None
    if "--show" in options:
        show(
            run,
            step,
            options.get("--episode", ""),
            tokens="--tokens" in options,
            nonfinite=nonfinite,
        )
    elif given := [name for name in ("--episode", "--tokens") if name in options]:
        raise UserError(f"{given[0]} is read with --show")
    else:
        if "--from" in options:
            first = whole_number(options["--from"], "--from")
            if step is not None and step <= first:
                raise UserError(
                    f"--step {step}: a replay from the checkpoint of step {first} begins with step {first + 1}"
                )
            settings = [*settings, f"trainer.resume_mode={_checkpoint(run, first)}"]
        _train(run, settings, last=step or 0, nonfinite=nonfinite)


def _checkpoint(run: Path, step: int) -> Path:
    """Raises ``UserError``, with the steps that there are, if the run has no such checkpoint."""
    from skyasync.cli.export import checkpoints_of_run

    home = checkpoints_of_run(run)
    folder = home / f"step_{step:06d}"
    if not folder.is_dir():
        steps = sorted(
            int(path.name[5:]) for path in home.glob("step_*") if path.name[5:].isdecimal()
        )
        raise UserError(
            f"--from {step}: {run} has checkpoints of the steps {', '.join(map(str, steps)) or '(none)'}"
        )
    return folder.resolve()


def _train(run: Path, settings: Sequence[str], *, last: int, nonfinite: bool) -> None:
    from skyasync.cli.train import main
    from skyasync.rollout.trajectory_files import files_of, need_pyarrow

    files = files_of(run / NONFINITE if nonfinite else run)
    if not files and nonfinite:
        raise UserError(
            f"{run} recorded no batch with a non-finite value ({run / NONFINITE} does not exist)"
        )
    if not files:
        raise UserError(f"{run} has recorded no trajectories (trainer.dump_trajectories=true)")
    given = {argument.partition("=")[0] for argument in settings if "=" in argument}
    own = {
        "trainer.run_name": f"{run.resolve().name}-replay",
        "trainer.runs_dir": str(run.resolve().parent),
        "trainer.resume_mode": "none",
        "trainer.dump_trajectories": "false",
        "trainer.export_path": '""',  # the recording run's are not written over
        "trainer.critic.export_path": '""',
        "trainer.ckpt_path": '""',
        "trainer.ckpt_on_exit": str(bool(last)).lower(),
    }
    from skyasync.cli.replay_experiment import ReplayExperiment

    more = [f"{key}={value}" for key, value in own.items() if key not in given]
    changed = sorted(given - own.keys())
    if changed:
        print(
            f"changed: {', '.join(changed)}; the replay may differ from its first update on",
            file=sys.stderr,
        )
    need_pyarrow()
    ReplayExperiment.files = tuple(file.resolve() for file in files)
    ReplayExperiment.independent = nonfinite
    ReplayExperiment.recorded = run.resolve()
    ReplayExperiment.final_step = last
    plan = str(
        read_settings(run / "config.yaml").get("trainer.plan", "sync")
    )  # its settings stay as they are
    main(ReplayExperiment, ["--config", str(run / "config.yaml"), *settings, *more], plan=plan)


def show(run: Path, step: int | None, episode: str, *, tokens: bool, nonfinite: bool) -> None:
    """Print the episodes of a step (by default the last), or the one whose id begins with
    ``episode``.

    Args:
        nonfinite: of the batches that were not trained on because of non-finite values.

    Raises:
        UserError: if there are none.
    """
    console = Console(highlight=False)
    rows = _recorded(run, step, episode, NONFINITE if nonfinite else "")
    if not rows and not nonfinite:
        samples_of_run: Sequence[Row] = jsonl.read_rows(run / "samples.jsonl")
        if step is None and not episode:
            step = max((row["step"] for row in samples_of_run), default=0)
        rows = [
            row
            for row in samples_of_run
            if step in (None, row["step"]) and row["prompt_id"].startswith(episode)
        ]
    if not rows:
        if episode:
            what = f"episode {episode}"
        elif step:
            what = f"episodes of step {step}"
        else:
            what = "episodes"
        bad = " with a non-finite value" if nonfinite else ""
        raise UserError(f"{run} has recorded no {what}{bad}")
    for row in rows[:MOST]:
        _print(row, console, tokens=tokens)
    if len(rows) > MOST:
        console.print(
            f"and {len(rows) - MOST} more of step {rows[0]['step']}: name one with --episode"
        )


def _recorded(run: Path, step: int | None, episode: str, folder: str) -> list[Row]:
    """The rows of recorded episodes; empty if none were recorded."""
    from skyasync.rollout.metrics import token_columns
    from skyasync.rollout.trajectory_files import files_of, read

    files = files_of(run / folder)
    if step is not None:
        files = [file for file in files if int(file.stem.removeprefix("step_")) == step]
    elif not episode:
        files = files[-1:]
    if not files:
        return []
    model = str(read_settings(run / "config.yaml").get(MODEL, ""))
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
    sample = sample_of(row)
    versions = sorted({token.version for token in sample.tokens if token.version >= 0})
    head = (
        f"{sample.name}  step {row['step']}  reward {sample.reward:.3g}  {sample.ended}  versions "
    )
    line = Text(head, style="bold")
    for version in versions:
        line.append(f" {version} ", style=_colour(version))
    console.print(line)
    console.print(Text(visible(sample.prompt), style="dim"))
    if not tokens:
        text = Text()
        for token in sample.tokens:
            text.append(
                visible(token.text), style=_FAINT if token.version < 0 else _colour(token.version)
            )
        console.print(text if sample.tokens else Text(visible(sample.response)))
        console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "version", "engine", "trainer", "gap"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for place, token in enumerate(sample.tokens):
        figures = [
            "" if value is None else f"{value:.4f}"
            for value in (token.engine, token.trainer, token.gap)
        ]
        gap = Text(figures[2], style="bold red" if token.strength > 0.3 else "")
        shown = Text(repr(token.text), style=_FAINT if token.version < 0 else "")
        table.add_row(
            str(place),
            shown,
            "" if token.version < 0 else str(token.version),
            figures[0],
            figures[1],
            gap,
        )
    console.print(table)


def _colour(version: int) -> str:
    return f"white on {COLOURS[version % len(COLOURS)]}"
