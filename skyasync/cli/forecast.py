"""``skyasync forecast RUN RUN ... --target 0.8``: minutes to a target reward, by plan, staleness bound and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from skyasync.cli.commands import Arguments, is_path, take_options, whole_number
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.simulate.forecast import INTERVAL, Forecast, candidates, choose, configuration_of, forecast
from skyasync.simulate.learning import fit, read_pilot, resampled, tells_power

HELP = """\
usage: skyasync forecast RUN RUN ... --target REWARD [--metric NAME] [--ceiling REWARD] [--bounds 1,2,4,8]
                         [key=value ...]

Forecasts the minutes to a target reward by plan, staleness bound and split of the devices, with a 90% interval, and the
effect of one more engine or trainer device. The speed and staleness of plans are simulated. The learning curve and the
cost of staleness are fitted to pilot runs.

Each RUN is the folder of a short run of the task, with equal settings: one with the plan sync, which gives the times,
and one or two with stale samples, such as trainer.plan=one_step_off, or fully_async with trainer.max_staleness=4.

--target   the reward to reach
--metric   of metrics.jsonl (reward/mean); eval/score needs many evaluations
--ceiling  the largest possible reward (1)
--bounds   values of trainer.max_staleness (1,2,4,8)

Settings are those of skyasync simulate, such as simulate.plans or simulate.length_mean.
"""
LAWS = 200  # resampled
USUAL_POWER = 2.0  # of the law, between tuned and constant learning rates, if the pilot runs do not tell it


def run(argv: Arguments) -> None:
    """Print the table and the choice."""
    values = {"--target": "0.8", "--metric": "reward/mean", "--ceiling": "1", "--bounds": "1,2,4,8"}
    options, rest = take_options(argv, values, settings=True)
    folders = [Path(word) for place, word in enumerate(rest) if _is_run(rest, place)]
    if "--target" not in options:
        raise UserError("skyasync forecast needs the reward to reach: --target 0.8")
    if not folders:
        raise UserError("skyasync forecast needs folders of pilot runs: one of the sync plan, and a stale one")
    metric = options.get("--metric", "reward/mean")
    target, ceiling = _number(options["--target"], "--target"), _number(options.get("--ceiling", "1"), "--ceiling")
    bounds = [whole_number(text, "--bounds") for text in options.get("--bounds", "1,2,4,8").split(",")]
    pilots = {folder: read_pilot(read_rows(folder / "metrics.jsonl"), metric, str(folder)) for folder in folders}
    highest = max(float(pilot.rewards.max()) for pilot in pilots.values())
    if max(highest, target) > ceiling or target == ceiling:
        raise UserError(
            f"--ceiling {ceiling:g} is the largest possible reward: the target is {target:g}, and {metric} of the "
            f"pilot runs reaches {highest:.3g}"
        )
    runs = list(pilots.values())
    law = fit(runs, ceiling, None if tells_power(runs) else USUAL_POWER)
    if target <= law.start:
        raise UserError(f"--target {target:g}: by the fitted curve the task starts with {metric} {law.start:.3g}")
    laws = resampled(runs, law, LAWS)
    synchronous = min(pilots, key=lambda folder: pilots[folder].mean_staleness)
    given = [word for place, word in enumerate(rest) if not _is_run(rest, place)]
    cfg = configuration_of(synchronous, given)
    rows = forecast(cfg, candidates(cfg, bounds), law, laws, target)
    best, stalest = choose(rows), max(pilot.mean_staleness for pilot in runs)
    rising = [one.cost for one in laws if one.rate]
    costs = np.quantile(rising or [law.cost], INTERVAL)
    print(f"pilot: {len(runs)} runs, mean staleness up to {stalest:.1f}, {metric} up to {highest:.3g}")
    print(f"law: {metric} = {ceiling:g} - {ceiling - law.start:.3g} exp(-{law.rate:.3g} p); a step of staleness s")
    print(f"     adds 1 / (1 + ({law.cost:.3g} s)^{law.power:.2g}) to p; the cost is {costs[0]:.2g} to {costs[1]:.2g}")
    print("\nplan            bound  engines + trainers  s/step  staleness  steps  minutes (90%)             fastest")
    for row in rows:
        one = row.candidate
        print(
            f"{one.plan.rpartition(':')[2]:<15} {one.bound or '-':>5}  {f'{one.engines} + {one.trainers}':>18}  "
            f"{row.step_s:6.3g}  {row.staleness:9.2f}  {row.steps:5.0f}  {_minutes(row):<24}  {row.fastest:7.0%}"
        )
    one = best.candidate
    bound = f" trainer.max_staleness={one.bound}" if one.bound else ""
    print(
        f"\nrecommended: trainer.plan={one.plan}{bound} with {one.engines} engines and {one.trainers} trainer devices: "
        f"{_minutes(best)} minutes"
    )
    if best.high == inf:
        flat = 1 - len(rising) / len(laws)
        print(f"inf: in {flat:.0%} of the resampled fits the reward does not rise: make the pilot runs longer")
    if best.staleness > 1.5 * stalest:
        print(f"its staleness of {best.staleness:.1f} is beyond the pilot's {stalest:.1f}: add a pilot run with it")
    for name, what in (("engines", "engine"), ("trainers", "trainer device")):
        (row,) = forecast(cfg, [replace(one, **{name: vars(one)[name] + 1})], law, laws, target)
        print(f"one more {what}: {_minutes(row)} minutes, {row.minutes / best.minutes - 1:+.0%}")


def _is_run(words: Sequence[str], place: int) -> bool:
    word, before = words[place], words[place - 1] if place else ""
    return is_path(word) and not before.startswith("-")


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} {text}: not a number") from None


def _minutes(row: Forecast) -> str:
    return f"{row.minutes:.3g} ({row.low:.3g} to {row.high:.3g})"
