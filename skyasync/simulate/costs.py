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

BATCHES = 100  # drawn to compare the costs with
_OF_RUN = (
    "trainer.train_batch_size",
    "trainer.seed",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "generator.n_samples_per_prompt",
    "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size",
    "generator.max_num_seqs",
)


class Compared:
    """What the compared plans are, taken together."""

    asynchronous = True
    reads = tuple(
        sorted({path for about in PLANS.builtins().values() for path in about.can["reads"]})
    )


def configuration_of(run: Path, given: Sequence[str]) -> SimulationConfig:
    """The run's batch, devices and costs; ``given`` settings override them.

    Raises:
        UserError: if the folder has no settings of a run, or as ``read_run_costs``.
    """
    values = read_settings(run / "config.yaml")
    if not values:
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    argv = [f"{key}={written(values[key])}" for key in _OF_RUN if values.get(key) is not None]
    measured = load_config(argv, schema=SimulationConfig, plan=Compared)
    read_run_costs(measured, run)
    cfg = load_config([*argv, *given], schema=SimulationConfig, plan=Compared)
    for name, value in vars(measured.simulate).items():
        if f"simulate.{name}" not in origins(cfg):
            setattr(cfg.simulate, name, value)
    return cfg


def read_run_costs(cfg: SimulationConfig, run: Path) -> None:
    """Costs as ``read_costs`` has them, for lengths that vary and for engines that a batch fills
    more than once.

    Lengths are log-normal, with the least sigma at which the longest of a batch is the one
    measured. A decode step takes what makes the generation of such batches as long as it was.

    Raises:
        UserError: if the run is not one of the sync plan.
    """
    read_costs(cfg, run)
    settings = cfg.simulate
    rows = [
        row
        for row in read_rows(run / "metrics.jsonl")
        if row.get("response/length_mean") is not None
    ]
    mean = median(row["response/length_mean"] for row in rows)
    longest = settings.length_mean
    generate_s = settings.token_s * longest
    settings.slots = min(settings.slots, cfg.generator.max_num_seqs)
    settings.lengths = "lognormal"
    settings.length_mean = mean
    settings.token_s = 1.0
    settings.length_max = int(max(row["response/length_max"] for row in rows))
    low = 0.0
    high = 3.0
    while high - low > 0.01:
        settings.length_sigma = (low + high) / 2
        low, high = (
            (low, settings.length_sigma)
            if _longest(cfg) >= longest - 0.5
            else (settings.length_sigma, high)
        )
    settings.token_s = generate_s / float(draw_batches(cfg, BATCHES).complete_s[:, -1].mean())
    settings.train_s_per_token *= longest / float(draw_lengths(settings, cfg.trainer.seed).mean())


def _longest(cfg: SimulationConfig) -> float:
    """Of a batch that has a slot for each sequence, on average."""
    cfg = deepcopy(cfg)
    cfg.simulate.slots = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    return float(draw_batches(cfg, BATCHES).complete_s[:, -1].mean())


def read_costs(cfg: SimulationConfig, run: Path) -> None:
    """Put what a finished synchronous run measured into ``cfg``: lengths, decoding, training,
    weight sync.

    ``cfg`` has the run's batch and devices. The batch is taken to fit its engines' slots, so a
    decode step is a batch's generation time by its longest response.

    Raises:
        UserError: if there is no such file or its steps lack what is needed.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"costs are read from the metrics of a run: there is no {metrics}")
    rows = read_rows(metrics)
    needed = (
        "time/generate_s",
        "time/train_s",
        "time/sync_s",
        "response/length_mean",
        "response/length_max",
    )
    rows = [row for row in rows if all(name in row for name in needed)][1:]
    if not rows:
        raise UserError(
            f"costs are read from the metrics of a run: {metrics} has no two steps with {', '.join(needed)}"
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
    settings.slots = -(-samples // cfg.generator.num_inference_engines)
    settings.token_s = median(row["time/generate_s"] / row["response/length_max"] for row in rows)
    train_s = median(row["time/train_s"] for row in rows)
    settings.train_s_per_token = (
        train_s * cfg.trainer.placement.policy_ranks / (samples * settings.length_mean)
    )
    settings.sync_s = median(row["time/sync_s"] for row in rows)
