"""The subcommands of ``skyasync``: what each is called, what it does, and where it lives.

Importing this imports nothing else of the library, so that ``--help`` is quick; a subcommand's own module is imported
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module

Arguments = Sequence[str]


@dataclass(frozen=True)
class Subcommand:
    """One subcommand.

    Args:
        home: ``module:function``, called with the arguments after the subcommand; it returns the exit status.
        does: one line of the help.
        options: those that it takes besides settings, for completion.
        settings: it takes ``key=value``.
        runs: it takes folders of runs, or files.
        listed: it stands in the help.
        needs: it takes arguments, without which its help is an error.
    """

    home: str
    does: str
    options: tuple[str, ...] = ()
    settings: bool = True
    runs: bool = False
    listed: bool = True
    needs: bool = False

    def carry_out(self, argv: Arguments) -> int | None:
        """Import the subcommand's module and do it; the exit status, None for 0."""
        module, _, name = self.home.partition(":")
        function: Callable[[Arguments], object] = getattr(import_module(module), name)
        if self.needs and not argv:
            with redirect_stdout(sys.stderr):
                function(["--help"])
            return 2
        status = function(argv)
        return status if isinstance(status, int) else None


_HELP = ("--help",)
_SETTINGS = ("--config", "--help")
_PLAN = ("--gpus", "--gpu-memory", "--host-memory", "--json")

SUBCOMMANDS: dict[str, Subcommand] = {
    "train": Subcommand("skyasync.cli.commands:train", "train (the default)", (*_SETTINGS, "--dry-run")),
    "plan": Subcommand(
        "skyasync.cli.commands:plan", "say what a run would need, and whether it fits", (*_SETTINGS, *_PLAN)
    ),
    "simulate": Subcommand(
        "skyasync.cli.commands:simulate", "run the plans on virtual time, with your costs", _SETTINGS
    ),
    "translate": Subcommand(
        "skyasync.cli.commands:translate",
        "write another system's recipe as ours",
        ("--from", "--help"),
        settings=False,
        runs=True,
    ),
    "rollout": Subcommand(
        "skyasync.cli.rollout:rollout",
        "play some prompts, and show what came out",
        (*_SETTINGS, "--prompts", "--samples", "--held-out", "--show-prompts", "--json"),
    ),
    "evaluate": Subcommand(
        "skyasync.cli.evaluate:evaluate",
        "score a model or a checkpoint on the held-out prompts",
        (*_SETTINGS, "--of", "--best", "--k", "--passing", "--prompts", "--json"),
        needs=True,
    ),
    "export": Subcommand(
        "skyasync.cli.export:export",
        "make a Hugging Face folder of a checkpoint",
        ("--best", "--out", "--dtype", "--model", "--help"),
        settings=False,
        runs=True,
        needs=True,
    ),
    "report": Subcommand(
        "skyasync.cli.report:report",
        "make a run's page, or one that compares runs",
        ("--out", "--every", "--help"),
        settings=False,
        runs=True,
        needs=True,
    ),
    "replay": Subcommand(
        "skyasync.cli.replay:replay",
        "train on recorded rollouts without engines, or show them token by token",
        (*_SETTINGS, "--show", "--step", "--episode", "--tokens", "--nonfinite"),
        runs=True,
        needs=True,
    ),
    "runs": Subcommand(
        "skyasync.cli.runs:runs",
        "list the runs of a folder",
        ("--sort", "--json", "--help"),
        settings=False,
        runs=True,
    ),
    "engines": Subcommand(
        "skyasync.cli.engines:engines",
        "let engines join a run, or leave it",
        _HELP,
        settings=False,
        runs=True,
        needs=True,
    ),
    "serve": Subcommand(
        "skyasync.cli.serve:serve", "start a vLLM server for generator.engines", _HELP, settings=False, needs=True
    ),
    "completion": Subcommand(
        "skyasync.cli.completion:completion",
        "print the completion for bash, zsh or fish",
        _HELP,
        settings=False,
    ),
    "complete": Subcommand("skyasync.cli.completion:complete", "what completion asks", settings=False, listed=False),
}
"""By name, in the order of the help. A subcommand is one word; settings are key=value."""

LISTED = [name for name, subcommand in SUBCOMMANDS.items() if subcommand.listed]


def usage() -> str:
    """What ``--help`` prints."""
    width = max(map(len, LISTED))
    subcommands = "\n".join(f"  {name:<{width}}  {SUBCOMMANDS[name].does}" for name in LISTED)
    return f"""\
usage: skyasync [COMMAND] [--config FILE.yaml ...] [key=value ...]

{subcommands}

skyasync COMMAND --help says more of a subcommand, skyasync --help GROUP of a group of settings (trainer, generator,
environment, data, ray) or of one key, and skyasync train --help lists all settings. python -m skyasync is the same
command. Completion: source <(skyasync completion bash)
"""


def train(argv: Arguments) -> None:
    """See ``skyasync.cli.train``."""
    from skyasync.cli.train import main

    main(argv=argv)


def plan(argv: Arguments) -> None:
    """What a run would need; see ``skyasync.planning.command``."""
    from skyasync.cli.train import DRY_RUN, main

    main(argv=[DRY_RUN, *argv])


def simulate(argv: Arguments) -> None:
    """See ``skyasync.simulate``."""
    from skyasync.simulate.__main__ import main

    main(argv)


def translate(argv: Arguments) -> None:
    """Another framework's recipe as our configuration; see ``skyasync.interop``."""
    from skyasync.other_frameworks import other_frameworks

    other_frameworks().translate(argv)
