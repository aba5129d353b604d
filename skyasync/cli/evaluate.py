"""``skyasync evaluate``: rewards and pass@k of a model or a checkpoint on the held-out prompts."""

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
    ks = []
    if options.get("--k"):
        ks = [whole_number(part, "--k") for part in options["--k"].split(",")]
    passing_reward = None
    try:
        if options.get("--passing"):
            passing_reward = float(options["--passing"])
    except ValueError:
        raise UserError(f"--passing {options['--passing_reward']}: not a reward") from None
    with ExitStack() as stack:  # ends the folder of an exported model, and the file of --out
        settings = _settings_of(options.get("--of", ""), stack, best="--best" in options)
        overridden = {argument.partition("=")[0] for argument in rest}
        settings = [item for item in settings if item.partition("=")[0] not in overridden]
        # Imported here, so that wrong options are errors at once.
        from skyasync.cli.rollout_experiment import RolloutExperiment
        from skyasync.cli.train import configuration, run_or_exit
        from skyasync.config.schema.data import most_samples

        cfg: Config = configuration([*settings, *rest])
        if passing_reward is not None:
            cfg.trainer.eval_passing = passing_reward
        for k in ks:
            if k > most_samples(cfg):  # of any evaluation set
                raise UserError(
                    f"--k {k} needs as many samples: set generator.eval_n_samples_per_prompt={k} (with "
                    f"generator.eval_sampling_params.temperature=null, that of training)"
                )
        if ks:
            cfg.trainer.eval_k = ks
        experiment = RolloutExperiment(cfg, evaluation=True)
        prompt_limit = 0
        if "--prompts" in options:
            prompt_limit = whole_number(options["--prompts"], "--prompts")
        out = None
        if options.get("--out"):
            out = stack.enter_context(_opened(options["--out"]))
        metrics = run_or_exit(experiment, lambda: measure(experiment, prompt_limit, out))
    if "--json" in options:
        print(json.dumps(metrics, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for name, value in metrics.items():
        if name.endswith("/score_error"):  # in the line of its score
            continue
        standard_error = metrics.get(f"{name}_error")
        error = "" if standard_error is None else f" ± {standard_error:.4f}"
        console.print(f"{name:<32} {figure(value)}{error}")


def figure(value: float) -> str:
    """A metric's value as text, counts without decimals; a metric of the user's may be NaN."""
    if value.is_integer():
        return f"{value:g}"
    return f"{value:.4f}"


def _opened(path: str) -> TextIO:
    """The file of ``--out``, opened before the evaluation, which may take hours."""
    try:
        return Path(path).expanduser().open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror or error}") from error


def measure(
    experiment: RolloutExperiment,
    prompt_limit: int = 0,
    out: TextIO | None = None,
) -> dict[str, float]:
    """The ``scores`` of an experiment's held-out prompts.

    Args:
        prompt_limit: evaluate so many prompts; 0 is all.
        out: receives each episode as a line.

    Raises:
        UserError: for rewards that are not finite.
    """
    from skyasync.rollout.evaluation import Scoring
    from skyasync.trainer.extensions.divergence_guard import bad_rewards, describe

    groups = experiment.play(experiment.prompts(prompt_limit))
    scoring = Scoring.of(experiment.cfg)
    tokenizer = experiment.get_tokenizer()
    if out:
        _write_episodes(out, groups, tokenizer)
    # After the file is written: it shows the episodes with these rewards.
    problem = describe(bad_rewards(groups))
    if problem:
        raise UserError(problem)
    return scores(groups, [scoring.sampled(group, tokenizer) for group in groups])


def _write_episodes(out: TextIO, groups: Sequence[Group], tokenizer: Tokenizer) -> None:
    """Write the episodes; a full disk is only a warning, so that the metrics are printed."""
    from skyasync.cli.rollout import record

    try:
        with out:
            for group in groups:
                for trajectory in group.trajectories:
                    line = json.dumps(record(group, trajectory, tokenizer), default=str)
                    print(line, file=out)
    except OSError as error:
        print(
            f"warning: --out {out.name} is incomplete: {error.strerror or error}", file=sys.stderr
        )


def scores(groups: Sequence[Group], numbers: Sequence[PromptScores]) -> dict[str, float]:
    """The metrics that a run would log, and of each set its size and the score's standard error."""
    from skyasync.rollout.evaluation import eval_metrics

    metrics = eval_metrics(groups, numbers)
    means: dict[str, list[float]] = {"": []}  # set -> mean rewards of its prompts; "" is all sets
    for group in groups:
        for name in {"", group.prompt.eval_set}:
            set_means = means.setdefault(name, [])
            if group.rewards:
                set_means.append(fmean(group.rewards))
    for name, set_means in means.items():
        prefix = f"eval/{name}/" if name else "eval/"
        metrics[f"{prefix}prompts"] = float(len(set_means))
        if len(set_means) > 1:  # one prompt has no deviation
            metrics[f"{prefix}score_error"] = stdev(set_means) / sqrt(len(set_means))
    return metrics


def _settings_of(name: str, stack: ExitStack, *, best: bool) -> list[str]:
    """Settings with which the run's engine has the weights of ``--of``."""
    from skyasync.observability.report.settings import MODEL, read

    if not name:
        if best:
            raise UserError("--best needs the run whose best checkpoint is meant: --of runs/NAME")
        return []
    path = Path(name).expanduser()
    # Else it may be a model of the hub.
    if not path.exists() and ":" not in name and (path.parts[0] == "runs" or path.parent.is_dir()):
        entries = [entry.name for entry in path.parent.glob("*")]
        similar_names = nearest(path.name, entries, count=1)
        hint = f": did you mean {path.parent / similar_names[0]}?" if similar_names else ""
        raise UserError(f"--of {name}: there is no such run, checkpoint or model folder{hint}")
    is_run = (path / "checkpoints").is_dir()
    if (path / "config.yaml").is_file() and not (path / CONFIG).is_file():
        is_run = True  # its checkpoints may be in another folder
    if not is_run and not (path / STATE).is_file():
        if best:
            raise UserError(f"--best chooses among the checkpoints of a run, and {name} is a model")
        return [f"{MODEL}={name}"]
    from skyasync.cli.export import find_checkpoint, write

    # An engine loads a model's folder, not the shards of a checkpoint.
    checkpoint = find_checkpoint(name, best=best)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write(checkpoint, folder / "model")
    arguments = list[str]()
    run = path if is_run else checkpoint.parent.parent
    config = run / "config.yaml"
    if config.is_file():
        arguments += ["--config", str(config)]
        # The run has written its model for each role that shares it: these roles get the new one.
        settings = read(config)
        for key, value in settings.items():
            if key.endswith(".model.path") and key != MODEL and value == settings.get(MODEL):
                arguments.append(f'{key}=""')
    arguments.append(f"{MODEL}={folder / 'model'}")
    # Nothing is trained: the run's checkpoints are not resumed.
    arguments += ["trainer.resume_mode=none", 'trainer.ckpt_path=""']
    return arguments
