"""A simulation's batch, devices and costs from the files of a finished synchronous run."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median

from skyasync.config.load import load_config, origins
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.observability.report.settings import read as read_settings
from skyasync.simulate.settings import SimulationConfig, draw_lengths
from skyasync.simulate.theory import draw_batches
from skyasync.trainer.plans import PLANS

BATCHES = 100  # sampled to compare the costs with
# Settings of the run that the simulation has too.
_RUN_KEYS = (
    "trainer.train_batch_size",
    "trainer.seed",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "generator.n_samples_per_prompt",
    "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size",
    "generator.max_num_seqs",
)


def _read_keys() -> tuple[str, ...]:
    keys: set[str] = set()
    for plan in PLANS.builtins().values():
        keys.update(plan.can["reads"])
    return tuple(sorted(keys))


class ComparedPlans:
    """Stands for all plans when the settings are checked: they may set the keys of any plan."""

    asynchronous = True
    reads = _read_keys()


def configuration_of(run: Path, overrides: Sequence[str]) -> SimulationConfig:
    """The configuration of a run's batch, devices and costs.

    Args:
        overrides: further settings, ``key=value``, which have precedence.

    Raises:
        UserError: if the folder has no settings of a run, or as ``read_run_costs``.
    """
    values = read_settings(run / "config.yaml")
    if not values:
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    argv = [f"{key}={written(values[key])}" for key in _RUN_KEYS if values.get(key) is not None]
    run_cfg = load_config(argv, schema=SimulationConfig, plan=ComparedPlans)
    read_run_costs(run_cfg, run)
    cfg = load_config([*argv, *overrides], schema=SimulationConfig, plan=ComparedPlans)
    for name, value in vars(run_cfg.simulate).items():
        if f"simulate.{name}" not in origins(cfg):
            setattr(cfg.simulate, name, value)
    return cfg


def read_run_costs(cfg: SimulationConfig, run: Path) -> None:
    """Put the costs of a run into ``cfg``, for lengths that vary and batches of any size.

    Lengths are log-normal, with the smallest sigma at which the longest of a batch is as long as
    the measured one. The seconds of a decode step are those that make the generation of such
    batches as long as it was.

    Raises:
        UserError: if the run is not one of the sync plan.
    """
    read_costs(cfg, run)
    settings = cfg.simulate
    rows = []
    for row in read_rows(run / "metrics.jsonl"):
        if row.get("response/length_mean") is not None:
            rows.append(row)
    mean = median(row["response/length_mean"] for row in rows)
    longest = settings.length_mean
    generate_s = settings.token_s * longest
    settings.slots = min(settings.slots, cfg.generator.max_num_seqs)
    settings.lengths = "lognormal"
    settings.length_mean = mean
    settings.token_s = 1.0  # times are lengths, while the lengths are fitted
    settings.length_max = int(max(row["response/length_max"] for row in rows))
    # With a sigma of 3 nearly all tokens are those of the longest responses.
    low = 0.0
    high = 3.0
    while high - low > 0.01:
        settings.length_sigma = (low + high) / 2
        if _longest(cfg) >= longest - 0.5:  # half a token: lengths are rounded
            high = settings.length_sigma
        else:
            low = settings.length_sigma
    settings.token_s = generate_s / float(draw_batches(cfg, BATCHES).generation_s.mean())
    # ``read_costs`` has divided the training by the longest length.
    settings.train_s_per_token *= longest / float(draw_lengths(settings, cfg.trainer.seed).mean())


def _longest(cfg: SimulationConfig) -> float:
    """The longest response of a batch on average, by its time with a slot for each sequence."""
    cfg = deepcopy(cfg)
    cfg.simulate.slots = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    return float(draw_batches(cfg, BATCHES).generation_s.mean())


def read_costs(cfg: SimulationConfig, run: Path) -> None:
    """Put a finished synchronous run's lengths, and times of its phases, into ``cfg``.

    ``cfg`` has the run's batch and devices. The batch is assumed to fit its engines' slots, so a
    decode step is a batch's generation time by its longest response.

    Raises:
        UserError: if there is no such file, or its steps lack a metric.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"costs are read from the metrics of a run: there is no {metrics}")
    rows = read_rows(metrics)
    required_metrics = (
        "time/generate_s",
        "time/train_s",
        "time/sync_s",
        "response/length_mean",
        "response/length_max",
    )
    # The first step has start-up costs.
    rows = [row for row in rows if row.keys() >= set(required_metrics)][1:]
    if not rows:
        raise UserError(
            f"costs are read from the metrics of a run: {metrics} has no two steps with {', '.join(required_metrics)}"
        )
    if any(row.get("staleness/max", 0) for row in rows):
        raise UserError(
            f"costs are read from a run of the sync plan, whose phases do not overlap: {run} is of another"
        )
    settings = cfg.simulate
    samples = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    settings.lengths = "constant"
    settings.length_max = 0
    settings.prefill = 0.0
    settings.length_mean = median(row["response/length_max"] for row in rows)
    settings.slots = -(-samples // cfg.generator.num_inference_engines)  # rounded up
    settings.token_s = median(row["time/generate_s"] / row["response/length_max"] for row in rows)
    train_s = median(row["time/train_s"] for row in rows)
    settings.train_s_per_token = (
        train_s * cfg.trainer.placement.policy_ranks / (samples * settings.length_mean)
    )
    settings.sync_s = median(row["time/sync_s"] for row in rows)
