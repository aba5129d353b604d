"""From a command line to a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.load import exit_with, load_config
from skyasync.config.schema import Config
from skyasync.errors import UserError

if TYPE_CHECKING:
    from skyasync.experiment import BasePPOExp

#: The laptop-sized run: what trains when the command line names neither a model nor a configuration.
TINY_CONFIG = Path(__file__).parent.parent / "examples" / "tiny" / "config.yaml"


def main(
    experiment_class: type[BasePPOExp] | None = None,
    argv: Sequence[str] | None = None,
    *,
    schema: type[Any] = Config,
    plan: str | None = None,
) -> dict[str, float] | None:
    """Load the configuration and run the experiment; ends the program with one line on a user's error.

    Args:
        experiment_class: ``BasePPOExp`` by default.
        argv: ``key=value`` arguments; those of the process by default.
        schema: the configuration's dataclass, if it has keys of its own.
        plan: the plan that the experiment fixes, if it does.
    """
    try:
        default = TINY_CONFIG if TINY_CONFIG.is_file() else None
        cfg = load_config(sys.argv[1:] if argv is None else argv, schema=schema, default_config=default, plan=plan)
        if plan:
            cfg.trainer.plan = plan
        return _experiment(experiment_class)(cfg).run()
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


def _experiment(experiment_class: type[BasePPOExp] | None) -> type[BasePPOExp]:
    if experiment_class is not None:
        return experiment_class
    from skyasync.experiment import BasePPOExp

    return BasePPOExp
