"""The command line of a run, or of a plan of it (``--dry-run``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skyasync.callbacks import RunExtension
from skyasync.config.load import exit_with, load_config
from skyasync.config.schema import Config
from skyasync.errors import RayEndedError, Terminated, UserError, headline
from skyasync.observability.run_dir import shown

if TYPE_CHECKING:
    from skyasync.run.experiment import BasePPOExp

#: The laptop-sized run, for a command line that names neither a model nor a configuration.
TINY_CONFIG = Path(__file__).parents[1] / "examples" / "tiny" / "config.yaml"

C = TypeVar("C", bound=Config)
T = TypeVar("T")

DRY_RUN = "--dry-run"
REHEARSE = "--rehearse"


def main(
    experiment_class: type[BasePPOExp] | None = None,
    argv: Sequence[str] | None = None,
    *,
    schema: type[Config] = Config,
    plan: str | None = None,
    callbacks: Sequence[RunExtension] = (),
) -> dict[str, float] | None:
    """Load the configuration and run the experiment.

    A user's error ends the program with one line.

    Args:
        experiment_class: ``BasePPOExp`` by default.
        argv: ``key=value`` arguments; those of the process by default. With ``--dry-run`` nothing
            starts: the resources that the run would need are printed, and the program ends with
            status 0 if the machine has them, 1 if not. With ``--rehearse`` the run is made small
            (``skyasync.planning.rehearsal``).
        schema: the configuration's dataclass, if it has keys of its own.
        plan: the plan that the experiment fixes, if it does.
        callbacks: accompany the run (``skyasync.callbacks``), in addition to those of the
            experiment.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        fixed_plan = _plan_of(experiment_class, plan)
        mode = ""
        if DRY_RUN in arguments:
            mode = DRY_RUN
        elif REHEARSE in arguments:
            mode = REHEARSE
        if mode:
            from skyasync.planning import command, rehearsal

            arguments = [argument for argument in arguments if argument != mode]
            options, arguments = command.split_options(arguments)
            if arguments in (["--help"], ["-h"]):
                print(command.HELP if mode == DRY_RUN else rehearsal.HELP, end="")
                raise SystemExit(0)
        cfg = configuration(arguments, schema, fixed_plan)
        if mode == DRY_RUN:
            raise SystemExit(0 if command.show_plan(cfg, options) else 1)
        if experiment_class is None:
            # After the configuration: a wrong setting is an error before this long import.
            from skyasync.run.experiment import BasePPOExp

            experiment_class = BasePPOExp

        def run(experiment: BasePPOExp) -> dict[str, float] | None:
            if callbacks:
                from skyasync.preflight.parts import checked_callbacks

                experiment.callbacks = checked_callbacks(callbacks)
            return run_or_exit(experiment, experiment.run)

        if mode == REHEARSE:
            works = rehearsal.rehearse(cfg, experiment_class, options, run)
            raise SystemExit(0 if works else 1)
        return run(experiment_class(cfg))
    except UserError as error:
        exit_with(error)
    except Terminated as end:
        print(f"terminated by SIGTERM{end}", file=sys.stderr)
        raise SystemExit(143) from None  # 128 + SIGTERM
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None  # 128 + SIGINT


def configuration(
    arguments: Sequence[str],
    schema: type[C] = Config,  # type: ignore[assignment]
    plan: str | type | None = None,
) -> C:
    """The configuration of these arguments.

    It is the laptop-sized run if they name neither a model nor a configuration.
    """
    cfg = load_config(arguments, schema=schema, default_config=TINY_CONFIG, plan=plan)
    if isinstance(plan, str) and plan:
        cfg.trainer.plan = plan
    return cfg


def run_or_exit(experiment: BasePPOExp, run: Callable[[], T]) -> T:
    """Call ``run``; an error that ends a started run is printed in one line, and ends the program.

    The line names the files of the traceback and of the processes' logs.
    """
    try:
        return run()
    except Exception as error:
        folder = experiment.run_dir
        if folder is None or not folder.error.is_file():  # the run has not been started
            raise
        message = folder.secrets.hide_all(headline(error))
        logs = f"; logs: {shown(folder.logs)}" if folder.logs.is_dir() else ""
        print(f"error: {message} (the traceback: {shown(folder.error)}{logs})", file=sys.stderr)
        if isinstance(error, RayEndedError):
            # A usual exit would end by SIGSEGV, in threads that Ray has left in this process.
            sys.stdout.flush()
            os._exit(1)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


def _plan_of(experiment_class: type[BasePPOExp] | None, plan: str | None) -> str | type | None:
    """The plan that the program fixes; "" if the experiment's ``get_trainer`` makes another one."""
    if plan or experiment_class is None:
        return plan
    from skyasync.run.experiment import BasePPOExp

    if experiment_class.get_trainer is BasePPOExp.get_trainer:
        return None
    return ""
