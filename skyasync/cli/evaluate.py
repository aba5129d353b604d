"""``skyasync evaluate``: rewards and pass@k of a model or a checkpoint on the held-out prompts,
without workers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TextIO

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.config.model_files import CONFIG
from skyasync.config.resume import STATE
from skyasync.errors import UserError, nearest

if TYPE_CHECKING:
    from skyasync.cli.rollout_experiment import RolloutExperiment
    from skyasync.config.schema import Config
    from skyasync.rollout.evaluation import PromptScores
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.rollout.types import Group

HELP = """\
usage: skyasync evaluate [--of MODEL|CHECKPOINT|RUN] [--best] [--k 1,4,16] [--passing REWARD] [--prompts N]
                         [--out FILE] [--json] [key=value ...]

Evaluates a model on data.val_data and data.val_sets with the run's engine and environments, without training. The
metrics of a named set are eval/<set>/....

--of       a Hugging Face folder or name, a checkpoint, or a run: its newest checkpoint, with the settings of the run
--best     the best checkpoint of the run instead of the newest
--k        values of k for pass@k; by default 1, 2, 4, ... up to generator.eval_n_samples_per_prompt
--passing  the minimum reward of a correct sample (trainer.eval_passing, 1)
--prompts  evaluate only the first N prompts
--out      write the episodes to this file, one per line as JSON: messages, texts, reward
--json     print the metrics as JSON

pass@k is the probability that at least one of k samples is correct (unbiased estimate of Chen et al. 2021), maj@n
whether the most frequent answer of a prompt's n samples is correct (trainer.eval_answer). key=value overrides settings.
"""


def evaluate(argv: Arguments) -> None:
    """Play all held-out prompts, and print the scores."""
    values = {
        "--of": "runs/NAME",
        "--k": "1,4,16",
        "--passing": "1",
        "--prompts": "100",
        "--out": "samples.jsonl",
    }
    options, rest = take_options(argv, values, ("--json", "--best"), settings=True)
    if options.get("--k"):
        ks = [whole_number(part, "--k") for part in options["--k"].split(",")]
    else:
        ks = []
    try:
        if options.get("--passing"):
            passing = float(options["--passing"])
        else:
            passing = None
    except ValueError:
        raise UserError(f"--passing {options['--passing']}: not a reward") from None
    with ExitStack() as stack:
        settings = _settings_of(options.get("--of", ""), stack, best="--best" in options)
        given = {argument.partition("=")[0] for argument in rest}
        rest = [*(setting for setting in settings if setting.partition("=")[0] not in given), *rest]
        from skyasync.cli.rollout_experiment import RolloutExperiment
        from skyasync.cli.train import configuration, run_or_exit
        from skyasync.config.schema.data import most_samples

        cfg: Config = configuration(rest)
        if passing is None:
            cfg.trainer.eval_passing = cfg.trainer.eval_passing
        else:
            cfg.trainer.eval_passing = passing
        too_many = [k for k in ks if k > most_samples(cfg)]
        if too_many:
            raise UserError(
                f"--k {too_many[0]} needs as many samples: set generator.eval_n_samples_per_prompt={too_many[0]} (with "
                f"generator.eval_sampling_params.temperature=null, that of training)"
            )
        cfg.trainer.eval_k = ks or cfg.trainer.eval_k
        experiment = RolloutExperiment(cfg, evaluation=True)
        if "--prompts" in options:
            most = whole_number(options["--prompts"], "--prompts")
        else:
            most = 0
        if options.get("--out"):
            out = stack.enter_context(_opened(options["--out"]))
        else:
            out = None
        metrics = run_or_exit(experiment, lambda: measure(experiment, most, out))
    if "--json" in options:
        print(json.dumps(metrics, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for name, value in metrics.items():
        standard_error = metrics.get(f"{name}_error")
        if standard_error is None:
            error = ""
        else:
            error = f" ± {standard_error:.4f}"
        if not name.endswith("/score_error"):
            console.print(f"{name:<32} {figure(value)}{error}")


def figure(value: float) -> str:
    """Counts without decimals; a metric of the user's may be NaN."""
    if value.is_integer():
        return f"{value:g}"
    return f"{value:.4f}"


def _opened(path: str) -> TextIO:
    """Before anything starts: an evaluation may take hours."""
    try:
        return Path(path).expanduser().open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror or error}") from error


def measure(
    experiment: RolloutExperiment, most: int = 0, out: TextIO | None = None
) -> dict[str, float]:
    """The ``scores`` of an experiment's held-out prompts, or of the first ``most`` of them.

    Args:
        out: gets each episode as a line.
    """
    from skyasync.rollout.evaluation import Scoring
    from skyasync.trainer.extensions.divergence_guard import bad_rewards, describe

    groups = experiment.play(experiment.prompts(most))
    scoring = Scoring.of(experiment.cfg)
    tokenizer = experiment.get_tokenizer()
    if out:
        _write_episodes(out, groups, tokenizer)
    problem = describe(bad_rewards(groups))
    if problem:
        raise UserError(problem)
    return scores(groups, [scoring.sampled(group, tokenizer) for group in groups])


def _write_episodes(out: TextIO, groups: Sequence[Group], tokenizer: Tokenizer) -> None:
    """A full disk is only a warning, so that the metrics are printed."""
    from skyasync.cli.rollout import record

    try:
        with out:
            for group in groups:
                for trajectory in group.trajectories:
                    print(json.dumps(record(group, trajectory, tokenizer), default=str), file=out)
    except OSError as error:
        print(
            f"warning: --out {out.name} is incomplete: {error.strerror or error}", file=sys.stderr
        )


def scores(groups: Sequence[Group], numbers: Sequence[PromptScores]) -> dict[str, float]:
    """The metrics that a run would log, with the number of prompts and the standard error of the
    score, by set."""
    from skyasync.rollout.evaluation import eval_metrics

    metrics = eval_metrics(groups, numbers)
    for name in dict.fromkeys(["", *(group.prompt.eval_set for group in groups)]):
        prefix = f"eval/{name}/" if name else "eval/"
        own = [group for group in groups if group.rewards and name in ("", group.prompt.eval_set)]
        metrics[f"{prefix}prompts"] = float(len(own))
        if len(own) > 1:
            metrics[f"{prefix}score_error"] = stdev(fmean(group.rewards) for group in own) / sqrt(
                len(own)
            )
    return metrics


def _settings_of(name: str, stack: ExitStack, *, best: bool) -> list[str]:
    """Settings with which the run's engine has the weights of ``--of``."""
    from skyasync.observability.report.settings import MODEL, read

    if not name:
        if best:
            raise UserError("--best needs the run whose best checkpoint is meant: --of runs/NAME")
        return []
    path = Path(name).expanduser()
    if not path.exists() and ":" not in name and (path.parts[0] == "runs" or path.parent.is_dir()):
        close = nearest(path.name, (each.name for each in path.parent.glob("*")), count=1)
        if close:
            hint = f": did you mean {path.parent / close[0]}?"
        else:
            hint = ""
        raise UserError(f"--of {name}: there is no such run, checkpoint or model folder{hint}")
    of_run = (path / "config.yaml").is_file() and not (
        path / CONFIG
    ).is_file()  # checkpoints may be in another folder
    of_run = of_run or (path / "checkpoints").is_dir()
    if not of_run and not (path / STATE).is_file():
        if best:
            raise UserError(f"--best chooses among the checkpoints of a run, and {name} is a model")
        return [f"{MODEL}={name}"]
    from skyasync.cli.export import find_checkpoint, write

    checkpoint = find_checkpoint(name, best=best)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write(checkpoint, folder / "model")
    config = list[str]()
    run = (path if of_run else checkpoint.parent.parent) / "config.yaml"
    if run.is_file():
        # The run has written its model for each role that shares it; these settings name no model
        # of their own.
        settings = read(run)
        shared = [
            key
            for key, value in settings.items()
            if key.endswith(".model.path") and key != MODEL and value == settings.get(MODEL)
        ]
        config = ["--config", str(run), *(f'{key}=""' for key in shared)]
    return [
        *config,
        f"{MODEL}={folder / 'model'}",
        "trainer.resume_mode=none",
        'trainer.ckpt_path=""',
    ]
