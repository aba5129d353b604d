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
from skyasync.observability.report.page import PageSample, sample_of
from skyasync.observability.report.settings import MODEL
from skyasync.observability.report.settings import read as read_settings
from skyasync.rollout.trajectory_files import NONFINITE

Row = Mapping[str, Any]
COLOURS = ("blue", "dark_orange3", "green4", "magenta", "gold3", "deep_sky_blue3")  # of versions
_FAINT = "dim italic"  # for tokens that the policy has not sampled
MOST = 20  # episodes that are printed if none is named
LARGE_DIFFERENCE = 0.3  # ``Token.strength`` of a log-probability difference that is highlighted

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
    """Train again, or print episodes."""
    values = {"--step": "3", "--from": "2", "--episode": "e0-i17"}
    flags = ("--show", "--tokens", "--nonfinite")
    options, rest = take_options(argv, values, flags, settings=True)
    if not rest or not is_path(rest[0]):
        raise UserError(
            "skyasync replay needs the folder of a run first: skyasync replay runs/NAME"
        )
    run = Path(rest[0])
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    nonfinite = "--nonfinite" in options
    settings = rest[1:]
    step = None
    if "--step" in options:
        step = whole_number(options["--step"], "--step")
    if "--show" in options:
        episode = options.get("--episode", "")
        show(run, step, episode, tokens="--tokens" in options, nonfinite=nonfinite)
        return
    for name in ("--episode", "--tokens"):
        if name in options:
            raise UserError(f"{name} is read with --show")
    if "--from" in options:
        start_step = whole_number(options["--from"], "--from")
        if step is not None and step <= start_step:
            raise UserError(
                f"--step {step}: a replay from the checkpoint of step {start_step} begins with step {start_step + 1}"
            )
        settings.append(f"trainer.resume_mode={_checkpoint(run, start_step)}")
    _train(run, settings, final_step=step or 0, nonfinite=nonfinite)


def _checkpoint(run: Path, step: int) -> Path:
    """Raises ``UserError``, with the steps that there are, if the run has no such checkpoint."""
    from skyasync.cli.export import checkpoints_of_run

    home = checkpoints_of_run(run)
    folder = home / f"step_{step:06d}"
    if not folder.is_dir():
        numbers = [path.name.removeprefix("step_") for path in home.glob("step_*")]
        steps = sorted(int(number) for number in numbers if number.isdecimal())
        raise UserError(
            f"--from {step}: {run} has checkpoints of the steps {', '.join(map(str, steps)) or '(none)'}"
        )
    return folder.resolve()


def _train(run: Path, settings: Sequence[str], *, final_step: int, nonfinite: bool) -> None:
    """Train a run again.

    Args:
        settings: ``key=value``, and options of the configuration's loader.
        final_step: after which the replay ends; 0 is the run's last.
        nonfinite: train on the batches with non-finite values.
    """
    from skyasync.cli.train import main
    from skyasync.rollout.trajectory_files import files_of, need_pyarrow

    files = files_of(run / NONFINITE if nonfinite else run)
    if not files and nonfinite:
        raise UserError(
            f"{run} recorded no batch with a non-finite value ({run / NONFINITE} does not exist)"
        )
    if not files:
        raise UserError(f"{run} has recorded no trajectories (trainer.dump_trajectories=true)")
    from skyasync.cli.replay_experiment import ReplayExperiment

    user_keys = {argument.partition("=")[0] for argument in settings if "=" in argument}
    recorded_run = run.resolve()
    replay_settings = {
        "trainer.run_name": f"{recorded_run.name}-replay",
        "trainer.runs_dir": str(recorded_run.parent),
        "trainer.resume_mode": "none",
        "trainer.dump_trajectories": "false",
        # Files of the recorded run are not overwritten.
        "trainer.export_path": '""',
        "trainer.critic.export_path": '""',
        "trainer.ckpt_path": '""',
        "trainer.ckpt_on_exit": str(bool(final_step)).lower(),
    }
    arguments = ["--config", str(run / "config.yaml"), *settings]
    for key, value in replay_settings.items():
        if key not in user_keys:
            arguments.append(f"{key}={value}")
    changed_keys = sorted(user_keys - replay_settings.keys())
    if changed_keys:  # the comparison with the run may then fail at once
        print(
            f"changed: {', '.join(changed_keys)}; the replay may differ from its first update on",
            file=sys.stderr,
        )
    need_pyarrow()
    # The command makes the experiment, from the configuration alone.
    ReplayExperiment.files = tuple(file.resolve() for file in files)
    ReplayExperiment.independent = nonfinite
    ReplayExperiment.recorded = recorded_run
    ReplayExperiment.final_step = final_step
    # As an argument, so that the plan's settings stay as they are.
    plan = str(read_settings(run / "config.yaml").get("trainer.plan", "sync"))
    main(ReplayExperiment, arguments, plan=plan)


def show(run: Path, step: int | None, episode: str, *, tokens: bool, nonfinite: bool) -> None:
    """Print the episodes of a step, or the ones whose id begins with ``episode``.

    Args:
        step: by default the last.
        tokens: print a line for each token.
        nonfinite: episodes of batches that were not trained on because of non-finite values.

    Raises:
        UserError: if there are none.
    """
    console = Console(highlight=False)
    rows = _recorded(run, step, episode, NONFINITE if nonfinite else "")
    if not rows and not nonfinite:  # a run without recorded trajectories has some samples
        samples_of_run: Sequence[Row] = jsonl.read_rows(run / "samples.jsonl")
        if step is None and not episode:
            step = max((row["step"] for row in samples_of_run), default=0)
        for row in samples_of_run:
            if step in (None, row["step"]) and row["prompt_id"].startswith(episode):
                rows.append(row)
    if not rows:
        if episode:
            selection = f"episode {episode}"
        elif step:
            selection = f"episodes of step {step}"
        else:
            selection = "episodes"
        condition = " with a non-finite value" if nonfinite else ""
        raise UserError(f"{run} has recorded no {selection}{condition}")
    for row in rows[:MOST]:
        _print(row, console, tokens=tokens)
    if len(rows) > MOST:  # more would scroll the first ones out of sight
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
    elif not episode:  # the last step
        files = files[-1:]
    if not files:
        return []
    model = str(read_settings(run / "config.yaml").get(MODEL, ""))
    # A name without a slash in front is a model of the hub, in the cache.
    if model and (not model.startswith("/") or Path(model).is_dir()):
        from skyasync.rollout.tokenizer import load_tokenizer

        decode: Callable[..., str] = load_tokenizer(model).decode
    else:  # the tokenizer is gone: tokens are numbers

        def decode(tokens: Sequence[int]) -> str:
            return f"<{tokens[0]}>"

    rows = list[Row]()
    for file in files:
        recorded_step = read(file)
        logprobs = iter(recorded_step.trainer_logprobs)  # of each sequence of the step, in order
        for group in recorded_step.groups:
            prompt = group.prompt.messages[-1]["content"]
            for trajectory in group.trajectories:
                prompt_id = str(trajectory.id)
                for segments in trajectory.sequences:
                    trainer_logprobs = next(logprobs)  # also of other episodes
                    if not prompt_id.startswith(episode):
                        continue
                    columns = token_columns(segments, decode, trainer_logprobs, max_tokens=None)
                    rows.append(
                        {
                            "step": recorded_step.step,
                            "prompt_id": prompt_id,
                            "prompt": prompt,
                            "reward": trajectory.reward,
                            "stop_reason": trajectory.stop_reason,
                            "tokens": columns,
                        }
                    )
    return rows


def _print(row: Row, console: Console, *, tokens: bool) -> None:
    """Print an episode, as text or as a table of its tokens."""
    sample = sample_of(row)
    head = (
        f"{sample.name}  step {row['step']}  reward {sample.reward:.3g}  {sample.ended}  versions "
    )
    line = Text(head, style="bold")
    versions = {token.version for token in sample.tokens}
    for version in sorted(versions):
        if version >= 0:  # else no policy has sampled the token
            line.append(f" {version} ", style=_colour(version))
    console.print(line)
    console.print(Text(visible(sample.prompt), style="dim"))
    if tokens:
        console.print(_token_table(sample))
        return
    text = Text()
    for token in sample.tokens:
        text.append(visible(token.text), style=_colour(token.version))
    console.print(text if sample.tokens else Text(visible(sample.response)))
    console.print()


def _token_table(sample: PageSample) -> Table:
    """A row per token, with its log-probabilities in engine and trainer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "version", "engine", "trainer", "gap"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for position, token in enumerate(sample.tokens):
        is_sampled = token.version >= 0
        table.add_row(
            str(position),
            Text(repr(token.text), style="" if is_sampled else _FAINT),
            str(token.version) if is_sampled else "",
            _figure(token.engine),
            _figure(token.trainer),
            Text(_figure(token.gap), style="bold red" if token.strength > LARGE_DIFFERENCE else ""),
        )
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _colour(version: int) -> str:
    if version < 0:
        return _FAINT
    return f"white on {COLOURS[version % len(COLOURS)]}"
