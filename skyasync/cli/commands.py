"""The subcommands of ``skyasync``, and the parser of their options.

Importing this imports nothing else of the library but its errors, so that ``--help`` is quick. A
subcommand's own module is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from skyasync.errors import UserError, nearest

Arguments = Sequence[str]


@dataclass(frozen=True)
class Subcommand:
    """One subcommand.

    Args:
        home: ``module:function``, called with the arguments after the subcommand.
        does: one line of the help.
        settings: it takes ``key=value``.
        runs: it takes folders of runs, or files.
        needs: it needs arguments; without any, its help is an error.
        passes_on: it passes its arguments on to another program.

    A module's ``HELP`` is printed for ``--help``. The loader of settings, or another program, has a
    help too: then ``--help`` must be the only argument.
    """

    home: str
    does: str
    settings: bool = True
    runs: bool = False
    needs: bool = False
    passes_on: bool = False

    def carry_out(self, argv: Arguments) -> int:
        """Import the subcommand's module and run the subcommand; returns the exit status."""
        home, _, name = self.home.partition(":")
        module = vars(import_module(home))
        if self.settings or self.passes_on:
            wants_help = list(argv) in (["--help"], ["-h"])
        else:
            wants_help = "--help" in argv or "-h" in argv
        if "HELP" in module and wants_help:
            print(module["HELP"], end="")
        elif self.needs and not argv:  # an error, so not on standard output
            print(module["HELP"], end="", file=sys.stderr)
            return 2  # the usual status of wrong arguments
        else:
            module[name](argv)
        return 0


_LOADER_OPTIONS = ("--config", "--help", "-h")  # of the configuration's loader; they have values

#: By name, in the order of the help. A subcommand is one word; settings are key=value.
SUBCOMMANDS: dict[str, Subcommand] = {
    "train": Subcommand("skyasync.cli.commands:train", "train (the default)"),
    "sft": Subcommand("skyasync.cli.sft:sft", "train on given responses (supervised fine-tuning)"),
    "plan": Subcommand("skyasync.cli.commands:plan", "estimate memory and devices of a run"),
    "rehearse": Subcommand(
        "skyasync.cli.commands:rehearse", "run three steps of a recipe with a small model"
    ),
    "simulate": Subcommand("skyasync.simulate.__main__:main", "simulate the plans with your costs"),
    "translate": Subcommand(
        "skyasync.cli.commands:translate",
        "convert a recipe of another framework",
        settings=False,
        runs=True,
    ),
    "rollout": Subcommand(
        "skyasync.cli.rollout:rollout", "generate some episodes without training, and print them"
    ),
    "evaluate": Subcommand(
        "skyasync.cli.evaluate:evaluate",
        "evaluate a model or a checkpoint on held-out prompts",
        needs=True,
    ),
    "export": Subcommand(
        "skyasync.cli.export:export",
        "convert a checkpoint to a Hugging Face folder",
        settings=False,
        needs=True,
        runs=True,
    ),
    "report": Subcommand(
        "skyasync.cli.report:report",
        "write the report of a run, or compare runs",
        settings=False,
        needs=True,
        runs=True,
    ),
    "replay": Subcommand(
        "skyasync.cli.replay:replay",
        "train a run again on its own samples, or print them token by token",
        needs=True,
        runs=True,
    ),
    "runs": Subcommand(
        "skyasync.cli.runs:runs",
        "list the runs of a folder",
        settings=False,
        runs=True,
    ),
    "engines": Subcommand(
        "skyasync.cli.engines:engines",
        "add or remove engines of a running run",
        settings=False,
        needs=True,
        runs=True,
    ),
    "serve": Subcommand(
        "skyasync.cli.serve:serve",
        "start a vLLM server for generator.engines",
        settings=False,
        needs=True,
        passes_on=True,
    ),
    "tinker": Subcommand(
        "skyasync.cli.tinker:tinker",
        "serve the Tinker API: programs of its SDK train and sample here",
    ),
}


def usage() -> str:
    """The text of ``--help``."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {command.does}" for name, command in SUBCOMMANDS.items()]
    subcommands = "\n".join(lines)
    return f"""\
usage: skyasync [COMMAND] [--config FILE.yaml ...] [key=value ...]

{subcommands}

skyasync COMMAND --help     options of a command
skyasync --help GROUP       a group of settings (trainer, generator, environment, data, ray), or one setting
skyasync train --help       all settings

python -m skyasync is the same command.
"""


def train(argv: Arguments) -> None:
    """Train a run; see ``skyasync.cli.train``."""
    from skyasync.cli.train import main

    main(argv=argv)


def plan(argv: Arguments) -> None:
    """Estimate the resources of a run; see ``skyasync.planning.command``."""
    from skyasync.cli.train import DRY_RUN, main

    main(argv=[DRY_RUN, *argv])  # the same as the option of a user's own program


def rehearse(argv: Arguments) -> None:
    """Run a few steps with a small model; see ``skyasync.planning.rehearsal``."""
    from skyasync.cli.train import REHEARSE, main

    main(argv=[REHEARSE, *argv])


def translate(argv: Arguments) -> None:
    """Convert another framework's recipe to our configuration; see ``skyasync.interop``."""
    from skyasync.other_frameworks import other_frameworks

    other_frameworks().translate(argv)


def take_options(
    argv: Sequence[str],
    values: Mapping[str, str],
    flags: Collection[str] = (),
    *,
    settings: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """The options by their names, and the other arguments, in order.

    Options are ``--name value``, ``--name=value`` and ``--flag``, whose value is "".

    Args:
        values: options that have a value, each with an example of one.
        settings: the other arguments are for the configuration's loader, with its options.

    Raises:
        UserError: for an unknown option, with the nearest one, or for one without its value.
    """
    options: dict[str, str] = {}
    rest = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if name in values:
            if not equals and not arguments:
                raise UserError(f"{name} needs a value: {name} {values[name]}")
            options[name] = value if equals else arguments.pop(0)
        elif name in flags and not equals:
            options[name] = ""
        elif settings and name in _LOADER_OPTIONS:
            rest.append(argument)
            if not equals and arguments:  # its value, which may begin with a dash
                rest.append(arguments.pop(0))
        elif name.startswith("-"):
            names = [*values, *flags]
            similar_names = nearest(name, names, count=1)
            hint = f"did you mean {similar_names[0]}?" if similar_names else ", ".join(names)
            raise UserError(f"unknown option {name}: {hint}")
        else:
            rest.append(argument)
    return options, rest


def is_path(argument: str) -> bool:
    """Whether an argument among settings is a path. The name of a folder may have a ``=``."""
    return not argument.startswith("-") and ("=" not in argument or Path(argument).is_dir())


def whole_number(text: str, option: str, minimum: int = 1) -> int:
    """Raises ``UserError`` unless the text is a whole number of at least ``minimum``."""
    # 18 digits fit 64 bits; Python rejects conversions of some thousands of digits.
    if not text.isdecimal() or len(text) > 18 or int(text) < minimum:
        digits = " with up to 18 digits" if len(text) > 18 else ""
        raise UserError(f"{option} {text[:40]}: not a whole number of at least {minimum}{digits}")
    return int(text)


# Control characters except tab and line feed: C0, delete, C1.
_CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160))
_VISIBLE = dict.fromkeys(_CONTROL_CODES, "\N{REPLACEMENT CHARACTER}")


def visible(text: str) -> str:
    """A model's or a dataset's text for a terminal, which would execute control characters."""
    return text.translate(_VISIBLE)
