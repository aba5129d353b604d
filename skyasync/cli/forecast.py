"""``skyasync forecast RUN RUN ... --target 0.8``: minutes to a target reward, by plan, staleness bound and split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite, nan
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.config.load import load_config, origins
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.observability.report import settings
from skyasync.simulate.__main__ import Compared
from skyasync.simulate.forecast import INTERVAL, Forecast, candidates, choose, forecast, read_run_costs
from skyasync.simulate.learning import fit, read_pilot, resampled
from skyasync.simulate.settings import SimulationConfig

HELP = """\
usage: skyasync forecast RUN RUN ... --target REWARD [--metric NAME] [--ceiling REWARD] [--bounds 1,2,4,8] [--json]
                         [key=value ...]

Forecasts the minutes to a target reward for plans, staleness bounds and splits of the devices, with an interval of 90%,
and what one more engine or trainer device would bring. It simulates the plans' speed and staleness, and fits on pilot
runs how the task is learned and what staleness costs it.

RUN are folders of short runs of the task: one of the sync plan, whose costs are taken, and one with stale samples at the
same settings, such as trainer.plan=fully_async trainer.max_staleness=4.

--target   the reward to reach
--metric   of metrics.jsonl (reward/mean); eval/score needs many evaluations
--ceiling  the largest possible reward (1)
--bounds   values of trainer.max_staleness (1,2,4,8)
--json     for programs

Settings are those of skyasync simulate: simulate.plans, simulate.length_mean and others that the target run will have.
"""
LAWS = 200  # resampled
_NAMES = {"engines": "engines", "trainers": "trainer devices"}
_FROM_PILOT = (
    "trainer.train_batch_size", "trainer.seed", "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node", "generator.n_samples_per_prompt", "generator.num_inference_engines",
    "generator.max_num_seqs",
)  # fmt: skip


def run(argv: Arguments) -> None:
    """Print the table and the choice."""
    values = {"--target": "0.8", "--metric": "reward/mean", "--ceiling": "1", "--bounds": "1,2,4,8"}
    options, rest = take_options(argv, values, ("--json",), settings=True)
    folders = [Path(word) for place, word in enumerate(rest) if _is_run(rest, place)]
    if "--target" not in options:
        raise UserError("skyasync forecast needs the reward to reach: --target 0.8")
    if not folders:
        raise UserError("skyasync forecast needs folders of pilot runs: one of the sync plan, and a stale one")
    metric, target, ceiling = options.get("--metric", "reward/mean"), _number(options, "--target"), 1.0
    if "--ceiling" in options:
        ceiling = _number(options, "--ceiling")
    bounds = [whole_number(text, "--bounds") for text in options.get("--bounds", "1,2,4,8").split(",")]
    pilots = {folder: read_pilot(read_rows(folder / "metrics.jsonl"), metric, str(folder)) for folder in folders}
    highest = max(float(pilot.rewards.max()) for pilot in pilots.values())
    if max(highest, target) > ceiling or target == ceiling:
        raise UserError(
            f"--ceiling {ceiling:g} is the largest possible reward: the target is {target:g}, and {metric} of the pilot "
            f"runs reaches {highest:.3g}"
        )
    law = fit(list(pilots.values()), ceiling)
    laws = resampled(list(pilots.values()), law, LAWS)
    synchronous = min(pilots, key=lambda folder: pilots[folder].mean_staleness)
    cfg = _configuration(synchronous, [word for place, word in enumerate(rest) if not _is_run(rest, place)])
    rows = forecast(cfg, candidates(cfg, bounds), law, laws, target)
    best = choose(rows)
    larger = {
        name: replace(best.candidate, **{name: getattr(best.candidate, name) + 1}) for name in ("engines", "trainers")
    }
    more = {name: forecast(cfg, [candidate], law, laws, target)[0] for name, candidate in larger.items()}
    if "--json" in options:
        found = {"law": asdict(law), "forecasts": [asdict(row) for row in rows], "choice": asdict(best)}
        print(json.dumps(found | {f"one_more_of_{name}": asdict(row) for name, row in more.items()}, indent=1))
        return
    costs = np.quantile([one.cost for one in laws], INTERVAL)
    stalest = max(pilot.mean_staleness for pilot in pilots.values())
    print(f"pilot: {len(pilots)} runs, mean staleness up to {stalest:.1f}, {metric} up to {highest:.3g}")
    print(
        f"law: {metric} = {ceiling:g} - {ceiling - law.start:.3g} exp(-{law.rate:.3g} p); a step of staleness s adds "
        f"1 / (1 + ({law.cost:.3g} s)^{law.power:.2g}) to p (cost {costs[0]:.2g} to {costs[1]:.2g})"
    )
    Console().print(_table(rows))
    print(f"take {_settings(best)}: {_minutes(best)} minutes")
    for name, row in more.items():
        print(f"one more of the {_NAMES[name]}: {_minutes(row)} minutes ({row.minutes / best.minutes - 1:+.0%})")
    if best.staleness > 1.5 * stalest:
        print(f"its staleness {best.staleness:.1f} is beyond the pilot's {stalest:.1f}: run another pilot with it")


def _is_run(words: Sequence[str], place: int) -> bool:
    word, before = words[place], words[place - 1] if place else ""
    return "=" not in word and not word.startswith("-") and not before.startswith("-")


def _number(options: dict[str, str], name: str) -> float:
    try:
        number = float(options[name])
    except ValueError:
        number = nan
    if not isfinite(number):
        raise UserError(f"{name} {options[name]}: not a number")
    return number


def _configuration(run: Path, given: Sequence[str]) -> SimulationConfig:
    """The pilot's batch and devices, its costs, and the settings that are given, which come before both."""
    values = settings.read(run / "config.yaml")
    argv = [f"{key}={written(values[key])}" for key in _FROM_PILOT if values.get(key) is not None]
    pilot = load_config(argv, schema=SimulationConfig, plan=Compared)
    read_run_costs(pilot, run)
    cfg = load_config([*argv, *given], schema=SimulationConfig, plan=Compared)
    for name, value in vars(pilot.simulate).items():
        if f"simulate.{name}" not in origins(cfg):
            setattr(cfg.simulate, name, value)
    return cfg


def _table(rows: Sequence[Forecast]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for name in ("bound", "engines", "trainers", "s/step", "staleness", "steps", "minutes (90%)", "fastest in"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        one = row.candidate
        table.add_row(
            one.plan.rpartition(":")[2], "-" if one.bound is None else str(one.bound), str(one.engines), str(one.trainers),
            f"{row.step_s:.3g}", f"{row.staleness:.2f}", f"{row.steps:.0f}", _minutes(row), f"{row.fastest:.0%}",
        )  # fmt: skip
    return table


def _minutes(row: Forecast) -> str:
    return f"{row.minutes:.3g} ({row.low:.3g} to {row.high:.3g})"


def _settings(row: Forecast) -> str:
    one = row.candidate
    bound = "" if one.bound is None else f" trainer.max_staleness={one.bound}"
    return (
        f"trainer.plan={one.plan}{bound} generator.num_inference_engines={one.engines} "
        f"trainer.placement.policy_num_gpus_per_node={one.trainers}"
    )
