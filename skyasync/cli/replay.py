"""``skyasync replay``: a run again, on its recorded samples or on samples that are generated again; or a look at them.

Invariant: with the recorded settings and the same model, the updates are those of the run that is replayed, bitwise; a
difference comes from the user's changes alone, and the first one is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.errors import UserError

HELP = """\
usage: skyasync replay RUN [--step N] [--from N] [key=value ...]
       skyasync replay RUN --nonfinite [key=value ...]
       skyasync replay RUN --show [--nonfinite] [--step N] [--episode ID] [--tokens]

Trains again on what a run was trained on, step by step, with its settings and its plan. If the run has recorded its
trajectories (trainer.dump_trajectories=true), on these, without engines. Else the embedded engine generates them again
by the run's schedule (schedule.jsonl): each token by weights of the same version, bitwise. key=value changes a
setting: another loss, learning rate or correction. The new run's folder is RUN-replay, in the same place.

--step N ends the replay after step N, with a checkpoint. --from N begins with the run's checkpoint of step N.

--nonfinite trains on the batches alone that the run could not learn from (RUN/nonfinite), on the model that
trainer.policy.model.path names: an export of the steps before them, say.

--show prints episodes instead, coloured by policy version: those of a step (the last), or the one whose id begins so;
--tokens lists each token with its version and its log-probabilities in engine and trainer. Without recorded
trajectories it shows samples.jsonl.
"""


def replay(argv: Arguments) -> None:
    """Train, or show."""
    options, rest = take_options(
        argv,
        {"--step": "3", "--from": "2", "--episode": "e0-i17"},
        ("--show", "--tokens", "--nonfinite"),
        settings=True,
    )
    names = [argument for argument in rest if "=" not in argument and not argument.startswith("-")]
    if not names or rest[0] != names[0]:
        raise UserError("skyasync replay needs the folder of a run first: skyasync replay runs/NAME")
    run = Path(names[0])
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run's folder: it has no config.yaml")
    nonfinite, settings = "--nonfinite" in options, rest[1:]
    step = whole_number(options["--step"], "--step") if "--step" in options else None
    if "--show" in options:
        from skyasync.cli.episodes import show

        show(run, step, options.get("--episode", ""), tokens="--tokens" in options, nonfinite=nonfinite)
    elif given := [name for name in ("--episode", "--tokens") if name in options]:
        raise UserError(f"{given[0]} is read with --show")
    else:
        if "--from" in options:
            first = whole_number(options["--from"], "--from")
            settings = [*settings, f"trainer.resume_mode={_checkpoint(run, first)}"]
        _train(run, settings, last=step or 0, nonfinite=nonfinite)


def _checkpoint(run: Path, step: int) -> Path:
    """Raises ``UserError``, with the steps that there are, if the run has no such checkpoint."""
    from skyasync.observability.report.settings import read

    home = Path(str(read(run / "config.yaml").get("trainer.ckpt_path") or run / "checkpoints"))
    folder = home / f"step_{step:06d}"
    if not folder.is_dir():
        steps = sorted(int(path.name[5:]) for path in home.glob("step_*") if path.name[5:].isdecimal())
        raise UserError(f"--from {step}: {run} has checkpoints of the steps {', '.join(map(str, steps)) or '(none)'}")
    return folder.resolve()


def _train(run: Path, settings: Sequence[str], *, last: int, nonfinite: bool) -> None:
    from skyasync.cli.train import main
    from skyasync.observability.report.settings import read
    from skyasync.rollout import schedule
    from skyasync.rollout.trajectory_files import NONFINITE, files_of, need_pyarrow

    files = files_of(run / NONFINITE if nonfinite else run)
    if not files and nonfinite:
        raise UserError(f"{run} recorded no batch with a non-finite value ({run / NONFINITE} does not exist)")
    if not files and not (run / schedule.FILE).is_file():
        raise UserError(
            f"{run} has neither a schedule ({schedule.FILE}) nor recorded trajectories (trainer.dump_trajectories=true)"
        )
    given = {argument.partition("=")[0] for argument in settings if "=" in argument}
    own = {
        "trainer.run_name": f"{run.resolve().name}-replay",
        "trainer.runs_dir": str(run.resolve().parent),
        "trainer.resume_mode": "none",
        "trainer.dump_trajectories": "false",
        "trainer.export_path": '""',  # the recording run's is not written over
        "trainer.ckpt_path": '""',
        "trainer.ckpt_on_exit": str(bool(last)).lower(),
    }
    from skyasync.cli.replay_experiment import ReenactmentExperiment, ReplayExperiment

    more = [f"{key}={value}" for key, value in own.items() if key not in given]
    if changed := sorted(given - own.keys()):
        print(f"changed: {', '.join(changed)}; the replay may differ from its first update on", file=sys.stderr)
    if files:
        need_pyarrow()
        ReplayExperiment.files, ReplayExperiment.independent = tuple(file.resolve() for file in files), nonfinite
    experiment = ReplayExperiment if files else ReenactmentExperiment
    experiment.recorded, experiment.last = run.resolve(), last
    plan = str(read(run / "config.yaml").get("trainer.plan", "sync"))  # its settings stay as they are
    main(experiment, ["--config", str(run / "config.yaml"), *settings, *more], plan=plan)
