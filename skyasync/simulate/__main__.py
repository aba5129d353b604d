"""``python -m skyasync.simulate key=value ...``: a table of plans, and what to choose."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from skyasync.config.load import exit_with, load_config
from skyasync.errors import UserError
from skyasync.simulate.advice import advise
from skyasync.simulate.costs import ComparedPlans, configuration_of
from skyasync.simulate.run import simulate, work
from skyasync.simulate.settings import SimulationConfig
from skyasync.simulate.theory import expected_step_s

_COLUMNS = "plan            samples/s  speed-up  of the bound  theory  idle trainer  idle engines  staleness: mean, by age"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; a user's error ends the program with one line."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        cfg = load_config(argv, schema=SimulationConfig, plan=ComparedPlans)
        if cfg.simulate.from_run:
            cfg = configuration_of(Path(cfg.simulate.from_run), argv)
        if not cfg.trainer.max_training_steps:
            raise UserError(
                "trainer.max_training_steps=0 would never end here: set the steps to be simulated"
            )
        print("\n".join(report(cfg)))
    except UserError as error:
        exit_with(error)


def report(cfg: SimulationConfig) -> list[str]:
    """The lines of the report: the work of a step, a row for each plan, and the advice."""
    demand = work(cfg)
    rows = [simulate(cfg, plan) for plan in cfg.simulate.plans]
    sync = next((row for row in rows if row.plan == "sync"), None)
    lines = [
        f"work of a step: generation {demand.generation_s:.4g} s, training {demand.training_s:.4g} s"
    ]
    if sync is not None:
        long = max(sync.generate_s, demand.training_s)
        short = min(sync.generate_s, demand.training_s)
        lines += [
            f"taking turns: generation with its tail G = {sync.generate_s:.4g} s, training T = "
            f"{demand.training_s:.4g} s",
            f"overlapping whole batches gains at most (G+T)/max(G,T) = {1 + short / long:.3g}",
        ]
    lines += ["", _COLUMNS]
    for row in rows:
        speedup = f"{sync.step_s / row.step_s:8.2f}" if sync else " " * 8
        expected = expected_step_s(cfg, row.plan)
        theory = f"{demand.step_s / expected:.3f}" if expected else "-"
        # A plan of the user is named by its module and class.
        name = row.plan.rpartition(":")[2]
        lines.append(
            f"{name:<15} {row.samples_per_s:9.4g}  {speedup}  {demand.step_s / row.step_s:12.3f}"
            f"  {theory:>6}  {row.idle_trainer:12.0%}  {row.idle_engines:12.0%}"
            f"  {row.staleness_mean:.2f}, {histogram(row.staleness)}"
        )
    if cfg.simulate.advise:
        advice = advise(cfg)
        lines += [
            "",
            f"recommended: trainer.plan=fully_async trainer.max_staleness={advice.max_staleness} with {advice.engines} "
            f"engines and {advice.trainers} trainer devices: {advice.outcome.samples_per_s:.4g} samples/s, "
            f"mean staleness {advice.outcome.staleness_mean:.2f}",
        ]
    return lines


def histogram(staleness: Counter[int]) -> str:
    """The fraction of the tokens at each staleness, without those that would be shown as 0%."""
    total = max(staleness.total(), 1)
    columns = []
    for versions, tokens in sorted(staleness.items()):
        if tokens / total >= 0.005:
            columns.append(f"{versions}:{tokens / total:.0%}")
    return " ".join(columns)


if __name__ == "__main__":
    main()
