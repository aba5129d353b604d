"""``skyasync replay``: training on recorded rollouts, without engines, or a look at them token by token.

Invariant: on the recorded rollouts, with the recorded settings and the same model, the updates are those of the run
that recorded them; a difference comes from the user's changes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.errors import UserError

HELP = """\
usage: skyasync replay RUN [key=value ...]
       skyasync replay RUN --nonfinite [key=value ...]
       skyasync replay RUN --show [--nonfinite] [--step N] [--episode ID] [--tokens]

Trains on the trajectories that a run has recorded (trainer.dump_trajectories=true), step by step, with the run's
settings and without engines: another loss, learning rate or correction on the very same samples. key=value changes a
setting; the new run's folder is RUN-replay, in the same place.

--nonfinite trains on the batches alone that the run could not learn from (RUN/nonfinite), on the model that
trainer.policy.model.path names: an export of the steps before them, say.

--show prints episodes instead, coloured by policy version: those of a step (the last), or the one whose id begins so;
--tokens lists each token with its version and its log-probabilities in engine and trainer. Without recorded
trajectories it shows samples.jsonl.
"""


def replay(argv: Arguments) -> None:
    """Train, or show."""
    options, rest = take_options(
        argv, {"--step": "3", "--episode": "e0-i17"}, ("--show", "--tokens", "--nonfinite"), settings=True
    )
    names = [argument for argument in rest if "=" not in argument and not argument.startswith("-")]
    if not names or rest[0] != names[0]:
        raise UserError("skyasync replay needs the folder of a run first: skyasync replay runs/NAME")
    run = Path(names[0])
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run's folder: it has no config.yaml")
    nonfinite = "--nonfinite" in options
    if "--show" in options:
        from skyasync.cli.episodes import show

        step = whole_number(options["--step"], "--step") if "--step" in options else None
        show(run, step, options.get("--episode", ""), tokens="--tokens" in options, nonfinite=nonfinite)
    elif given := [name for name in ("--step", "--episode", "--tokens") if name in options]:
        raise UserError(f"{given[0]} is read with --show")
    else:
        _train(run, rest[1:], nonfinite=nonfinite)


def _train(run: Path, settings: Sequence[str], *, nonfinite: bool = False) -> None:
    from skyasync.cli.train import main
    from skyasync.observability.report.settings import read
    from skyasync.rollout.trajectory_files import NONFINITE, files_of, need_pyarrow

    need_pyarrow()
    files = files_of(run / NONFINITE if nonfinite else run)
    if not files and nonfinite:
        raise UserError(f"{run} recorded no batch with a non-finite value ({run / NONFINITE} does not exist)")
    if not files:
        raise UserError(f"{run} has no recorded trajectories: a run with trainer.dump_trajectories=true writes them")
    given = {argument.partition("=")[0] for argument in settings}
    own = {
        "trainer.run_name": f"{run.resolve().name}-replay",
        "trainer.runs_dir": str(run.resolve().parent),
        "trainer.resume_mode": "none",
        "trainer.dump_trajectories": "false",
        "trainer.export_path": '""',  # the recording run's is not written over
        "trainer.ckpt_path": '""',
    }
    from skyasync.cli.replay_experiment import ReplayExperiment

    more = [f"{key}={value}" for key, value in own.items() if key not in given]
    ReplayExperiment.recorded, ReplayExperiment.independent = tuple(file.resolve() for file in files), nonfinite
    plan = str(read(run / "config.yaml").get("trainer.plan", "sync"))  # its settings stay as they are
    main(ReplayExperiment, ["--config", str(run / "config.yaml"), *settings, *more], plan=plan)
