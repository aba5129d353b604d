"""The verbs of ``skyasync``: what each is called, what it does, and where it lives.

Invariant: importing this imports nothing else of the library, so that ``--help`` is there at once; a verb's own module
is imported when the verb is carried out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module

Arguments = Sequence[str]


@dataclass(frozen=True)
class Verb:
    """One verb.

    Args:
        home: ``module:function``, called with the arguments behind the verb; what it returns is the exit status.
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
        """Import the verb's module and do it; the exit status, None for 0."""
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

VERBS: dict[str, Verb] = {
    "train": Verb("skyasync.tools.ways:train", "train; the verb may be left out", (*_SETTINGS, "--dry-run")),
    "plan": Verb("skyasync.tools.ways:plan", "say what a run would need, and whether it fits", (*_SETTINGS, *_PLAN)),
    "simulate": Verb("skyasync.tools.ways:simulate", "run the plans on virtual time, with your costs", _SETTINGS),
    "translate": Verb(
        "skyasync.tools.ways:translate",
        "write another system's recipe as ours",
        ("--from", "--help"),
        settings=False,
        runs=True,
    ),
    "rollout": Verb(
        "skyasync.tools.rollout:rollout",
        "play some prompts, and show what came out",
        (*_SETTINGS, "--prompts", "--samples", "--held-out", "--show-prompts", "--json"),
    ),
    "evaluate": Verb(
        "skyasync.tools.evaluate:evaluate",
        "score a model or a checkpoint on the held-out prompts",
        (*_SETTINGS, "--of", "--best", "--k", "--passing", "--prompts", "--json"),
        needs=True,
    ),
    "export": Verb(
        "skyasync.tools.export:export",
        "make a Hugging Face folder of a checkpoint",
        ("--best", "--out", "--dtype", "--model", "--help"),
        settings=False,
        runs=True,
        needs=True,
    ),
    "report": Verb(
        "skyasync.observe.report.command:report",
        "make a run's page, or one that compares runs",
        ("--out", "--every", "--help"),
        settings=False,
        runs=True,
        needs=True,
    ),
    "replay": Verb(
        "skyasync.tools.replay:replay",
        "train on recorded rollouts without engines, or show them token by token",
        (*_SETTINGS, "--show", "--step", "--episode", "--tokens", "--nonfinite"),
        runs=True,
        needs=True,
    ),
    "runs": Verb(
        "skyasync.tools.runs:runs",
        "list the runs of a folder",
        ("--sort", "--json", "--help"),
        settings=False,
        runs=True,
    ),
    "engines": Verb(
        "skyasync.tools.engines:engines",
        "let engines join a run, or leave it",
        _HELP,
        settings=False,
        runs=True,
        needs=True,
    ),
    "serve": Verb(
        "skyasync.tools.serve:serve", "start a vLLM server for generator.engines", _HELP, settings=False, needs=True
    ),
    "completion": Verb(
        "skyasync.tools.completion:completion",
        "print the completion for bash, zsh or fish",
        _HELP,
        settings=False,
    ),
    "complete": Verb("skyasync.tools.completion:complete", "what completion asks", settings=False, listed=False),
}
"""By name, in the order of the help. A verb is one word; settings are key=value."""

LISTED = [name for name, verb in VERBS.items() if verb.listed]


def usage() -> str:
    """What ``--help`` prints."""
    width = max(map(len, LISTED))
    verbs = "\n".join(f"  {name:<{width}}  {VERBS[name].does}" for name in LISTED)
    return f"""\
usage: skyasync [VERB] [--config FILE.yaml ...] [key=value ...]

{verbs}

skyasync VERB --help says more of a verb, skyasync --help GROUP of a group of settings (trainer, generator,
environment, data, ray) or of one key, and skyasync train --help lists all settings. python -m skyasync is the same
command. Completion: source <(skyasync completion bash)
"""
