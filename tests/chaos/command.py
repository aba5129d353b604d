"""The command line: faults in a real run, or in simulated runs.

Invariant: a mistake in the command line gives one line before anything starts; the status is 0 only without complaints.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from skyasync.config.load import exit_with
from skyasync.config.resume import keeps_checkpoints
from skyasync.config.schema import Config
from skyasync.errors import UserError
from tests.chaos.events import KINDS, endless, weights_of

#: Settings that a run with fault injection gets by default.
SETTINGS = {
    "trainer.ckpt_interval": 5,
    "trainer.ckpt_keep": 3,
    "trainer.max_restarts": 1000,
    "trainer.heartbeat_timeout_s": 20,
    "trainer.terminal": "lines",
    "generator.max_engine_restarts": 1000,
    "generator.engine_start_timeout_s": 120,
    "generator.heartbeat_s": 1,
    "generator.heartbeat_timeout_s": 20,
    "environment.step_timeout_s": 20,
}


def main(argv: Sequence[str] | None = None) -> None:
    """End the program: with 0 without complaints, with 1 with complaints, with 2 on a user's mistake."""
    ours, theirs = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(ours)
    try:
        weights = chosen(options.only, options.without)
        raise SystemExit(_virtual(options) if options.virtual else _real(options, theirs, weights))
    except UserError as error:
        exit_with(error)


def chosen(only: Sequence[str], without: Sequence[str]) -> dict[str, float]:
    """Kinds with weights from ``kind`` or ``kind=weight``.

    Raises:
        UserError: for an unknown kind.
    """
    asked = {}
    for each in only or KINDS:
        name, _, weight = each.partition("=")
        try:
            asked[name] = float(weight) if weight else getattr(KINDS.get(name), "weight", 1.0)
        except ValueError:
            raise UserError(
                f"{each}: the weight of a kind of event is a number, as in kill-engine=2"
            ) from None
    weights_of(dict.fromkeys(without, 1.0) or None)
    return weights_of({name: weight for name, weight in asked.items() if name not in without})


def run_name(seed: int) -> str:
    return f"chaos-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def added(cfg: Config, name: str, given: Sequence[str] = ()) -> list[str]:
    """The ``SETTINGS`` that are neither ``given`` nor set by the run's own configuration."""
    keys = {argument.partition("=")[0] for argument in given}
    missing = [
        f"{key}={value}"
        for key, value in SETTINGS.items()
        if key not in keys and _value(cfg, key) == _value(Config(), key)
    ]
    return missing + ([] if cfg.trainer.run_name else [f"trainer.run_name={name}"])


def _real(options: argparse.Namespace, theirs: list[str], weights: dict[str, float]) -> int:
    from skyasync.cli.train import configuration
    from tests.chaos.channel import VARIABLE
    from tests.chaos.driver import Command, FaultDriver, scratch_folder
    from tests.chaos.leaks import clean_up, leftovers
    from tests.chaos.report import SUMMARY, complaints, summary, write

    own = options.program != ""
    cfg: Config = configuration(theirs)
    arguments = [*theirs, *added(cfg, run_name(options.seed), theirs)]
    cfg = configuration(arguments)
    if not keeps_checkpoints(cfg.trainer) or cfg.ray.address:
        raise UserError(
            "chaos needs a run that keeps checkpoints (trainer.ckpt_interval) and starts its own Ray"
        )
    if own:
        weights = weights_of(
            {name: 0.0 if KINDS[name].inside else weight for name, weight in weights.items()}
        )
    folder = Path(cfg.trainer.runs_dir).expanduser().resolve() / cfg.trainer.run_name
    scratch = scratch_folder()
    program = [options.program] if own else ["-m", "tests.chaos.program"]
    command = Command([sys.executable, *program, *arguments], folder, scratch)
    print("added:", *arguments[len(theirs) :], flush=True)
    events = endless(options.seed, options.every, weights)
    driver = FaultDriver(command, events, 60 * options.minutes, 60 * options.grace, say=_say)
    signal.signal(signal.SIGTERM, _stop)
    try:
        seen = driver.run()
        seen.left = leftovers(driver.known.values(), f"{VARIABLE}={scratch}", scratch)
    finally:
        clean_up(driver.known.values(), f"{VARIABLE}={scratch}")
        shutil.rmtree(scratch, ignore_errors=True)
    folder = driver.folder
    wrong = complaints(seen, folder)
    lines = summary(seen, folder, wrong)
    write(seen, folder, lines, wrong)
    print("\n".join(["", *lines, "", f"written to {folder / SUMMARY}"]))
    return 1 if wrong else 0


def _virtual(options: argparse.Namespace) -> int:
    from tests.chaos.simulation import play_all

    return play_all(options.schedules, options.seed, _say)


def _stop(number: int, frame: FrameType | None) -> None:
    """On a scheduler's SIGTERM: end the run and its remaining processes first."""
    raise SystemExit(143)


def _say(line: str) -> None:
    print(f"chaos: {line}", flush=True)


def _value(cfg: Config, key: str) -> Any:
    found: Any = cfg
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        usage="%(prog)s [options] -- key=value ...",
        description="Train with the settings after --, and inject faults into the run at random moments.",
        epilog=f"kinds of events: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--every", type=float, default=30.0, metavar="S", help="seconds between events, on average"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="how long there are events, starts of the command included",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="M",
        help="minutes that the run then has to end",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="KIND",
        help="these alone; KIND=2: with that weight",
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="KIND", help="all but these")
    parser.add_argument(
        "--program", default="", metavar="FILE", help="a training program of your own, from outside"
    )
    parser.add_argument("--virtual", action="store_true", help="all plans in simulation instead")
    parser.add_argument(
        "--schedules", type=int, default=1000, metavar="N", help="so many of them, with --virtual"
    )
    return parser
