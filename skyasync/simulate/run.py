"""The simulation of one plan: from settings to a row of the table."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from skyasync.callbacks import RunExtension
from skyasync.data.prompts import CountedPrompts
from skyasync.errors import UserError
from skyasync.observability.timeline import Timeline
from skyasync.simulate.clock import run_virtual
from skyasync.simulate.engines import DecodeCosts, VirtualClient, VirtualEngine
from skyasync.simulate.parts import (
    NoTracker,
    Simulated,
    VirtualColocation,
    VirtualGenerator,
    VirtualSync,
    VirtualWorkers,
)
from skyasync.simulate.settings import SimulationConfig, draw_lengths
from skyasync.trainer import RayPPOTrainer

FOREVER_S = 1e12  # virtual time has no wall clock to protect


@dataclass(frozen=True)
class Work:
    """Seconds per step in which a batch occupies all engines, and the trainer, without waits."""

    generation_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """No plan is faster than this."""
        return max(self.generation_s, self.training_s)


@dataclass(frozen=True)
class Outcome:
    """The figures of one plan, over the steps between its start and its end.

    Attributes:
        idle_trainer, idle_engines: fractions of the time.
        generate_s: from a batch's first request to its last token; a group's in plans that stream.
        staleness: trained tokens by their staleness.
    """

    plan: str
    step_s: float
    samples_per_s: float
    idle_trainer: float
    idle_engines: float
    generate_s: float
    staleness: Counter[int]

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the trained tokens, in versions."""
        total = sum(versions * tokens for versions, tokens in self.staleness.items())
        return total / max(self.staleness.total(), 1)


class _Steps(RunExtension):
    """Records the steps of a run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.staleness: list[Counter[int]] = []

    def on_step_end(self, trainer: Simulated, metrics: dict[str, float]) -> None:  # type: ignore[override]
        names = ("idle/trainer", "idle/engines", "time/generate_s", "time/step_s")
        self.rows.append({name: metrics[name] for name in names})
        self.staleness.append(trainer.staleness)
        trainer.staleness = Counter()


def work(cfg: SimulationConfig) -> Work:
    """The work of a batch on average."""
    return Work(_generation_s(cfg), _tokens(cfg) * train_s_per_token(cfg))


def simulate(cfg: SimulationConfig, plan: str) -> Outcome:
    """Run ``trainer.max_training_steps`` steps of a plan in simulation.

    Averages are over the middle, without the first steps, which fill the pipeline, and the last
    steps, which empty it.

    Raises:
        Deadlock: if nothing can happen any more; its message says which task waits where.
    """
    from skyasync.trainer.plans import PLANS

    cfg = deepcopy(cfg)
    steps = _Steps()

    async def train() -> None:
        trainer = make_trainer(cfg, PLANS.find(plan))
        trainer.callbacks.append(steps)
        await trainer.run()

    run_virtual(train())
    count = len(steps.rows)
    middle = slice(1 + count // 10, max(count - 1 - cfg.trainer.max_staleness, 0))
    if not steps.rows[middle]:  # a short run
        middle = slice(count)
    rows = steps.rows[middle]
    seconds = sum(row["time/step_s"] for row in rows)
    idle_trainer_s = sum(row["idle/trainer"] * row["time/step_s"] for row in rows)
    idle_engines_s = sum(row["idle/engines"] * row["time/step_s"] for row in rows)
    samples = len(rows) * cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    return Outcome(
        plan,
        step_s=seconds / len(rows),
        samples_per_s=samples / seconds,
        idle_trainer=idle_trainer_s / seconds,
        idle_engines=idle_engines_s / seconds,
        generate_s=sum(row["time/generate_s"] for row in rows) / len(rows),
        staleness=sum(steps.staleness[middle], Counter()),
    )


def make_trainer(cfg: SimulationConfig, plan: type[RayPPOTrainer]) -> Simulated:
    """Make a plan with all its components, on the running (virtual) event loop.

    Changes ``cfg``, which then belongs to the trainer.

    Raises:
        UserError: for a setting that decides by rewards or times of samples that are not simulated,
            or that the plan cannot have.
    """
    _check_settings(cfg, plan)
    _switch_off(cfg)
    settings = cfg.simulate
    trainers = cfg.trainer.placement.policy_ranks
    separate = cfg.generator.num_inference_engines
    engines = range(separate)
    shared = asleep = range(0)
    # One engine on each device that is shared, or as many as generator.hybrid_engines.
    if plan.shares_devices == "all":
        engines = range(separate + trainers)
        shared = engines
    elif plan.shares_devices == "hybrid":
        engines = range(separate + min(cfg.generator.hybrid_engines or trainers, trainers))
        shared = asleep = engines[separate:]
    client = VirtualClient([VirtualEngine(_costs(cfg)) for _ in engines], asleep)
    lengths = draw_lengths(settings, cfg.trainer.seed)
    simulated: type[Any] = type(f"Simulated{plan.__name__}", (Simulated, plan), {})
    trainer: Simulated = simulated.get_trainer(
        cfg=cfg,
        tracker=NoTracker(),
        tokenizer=None,
        train_dataset=CountedPrompts(cfg.trainer.max_training_steps * cfg.trainer.train_batch_size),
        inference_engine_client=client,
        generator=VirtualGenerator(client, lengths, settings.prompt_length),
    )
    trainer.staleness = Counter()
    trainer.context.phases.stall_s = math.inf  # a Deadlock names the waiting tasks
    timeline = Timeline(None, clock=asyncio.get_running_loop().time, memory=64)
    seconds_per_token = train_s_per_token(cfg)
    if plan.shares_devices == "all":  # training has the devices of all engines
        seconds_per_token *= trainers / len(engines)
    workers = VirtualWorkers(seconds_per_token)
    sync = VirtualSync(client, settings.sync_s)
    colocation = VirtualColocation(client, shared, settings) if shared else None
    if plan.shares_devices == "all":
        sync.colocation = colocation
    trainer.attach(workers, sync, timeline=timeline, colocation=colocation)  # type: ignore[arg-type]
    return trainer


def _check_settings(cfg: SimulationConfig, plan: type[RayPPOTrainer]) -> None:
    sampling = cfg.trainer.algorithm.dynamic_sampling
    not_simulated = {
        "trainer.algorithm.dynamic_sampling.type": sampling.type != "none",
        "generator.oversample_per_prompt": cfg.generator.oversample_per_prompt,
        "data.replay_groups": cfg.data.replay_groups,
    }
    for key, is_set in not_simulated.items():
        if is_set:
            raise UserError(
                f"{key} changes what a step trains, which is not simulated: leave it at its default"
            )
    # A real run has this error from check_plan.
    if plan.shares_devices == "all" and cfg.trainer.sync_interval > 1:
        raise UserError(
            f"trainer.sync_interval={cfg.trainer.sync_interval} leaves the engines asleep after most steps of a plan "
            f"that shares all devices: leave it at its default, or that plan out of simulate.plans"
        )


def _switch_off(cfg: SimulationConfig) -> None:
    """Switch off files, checkpoints, time limits and checks that a simulation does not need."""
    trainer = cfg.trainer
    trainer.step_timeout_s = FOREVER_S
    trainer.allow_uncorrected = True
    trainer.save_samples = 0
    trainer.resume_mode = "none"
    trainer.ckpt_interval = 0
    trainer.ckpt_on_exit = False
    trainer.ckpt_minutes = 0.0
    trainer.ckpt_best_metric = ""
    trainer.export_interval = 0
    trainer.dump_trajectories = False
    trainer.profile_steps = []
    trainer.update_epochs_per_batch = 1  # the costs are those of all epochs
    # The plan says which virtual devices are shared.
    trainer.placement.colocate_all = False


def _costs(cfg: SimulationConfig) -> DecodeCosts:
    settings = cfg.simulate
    return DecodeCosts(
        settings.slots, settings.token_s, settings.token_s_per_sequence, settings.prefill
    )


def train_s_per_token(cfg: SimulationConfig) -> float:
    """Wall seconds of training per response token, with all trainer devices."""
    if cfg.simulate.train_s_per_token:
        return cfg.simulate.train_s_per_token / cfg.trainer.placement.policy_ranks
    return _generation_s(cfg) / _tokens(cfg)  # as long as generation


def _generation_s(cfg: SimulationConfig) -> float:
    """Seconds in which all slots of all engines decode a batch."""
    settings = cfg.simulate
    generator = cfg.generator
    samples = cfg.trainer.train_batch_size * generator.n_samples_per_prompt
    decode_steps = _tokens(cfg) + samples * settings.prefill * settings.prompt_length
    slots = settings.slots * generator.num_inference_engines
    return decode_steps * _costs(cfg).step_s(settings.slots) / slots


def _tokens(cfg: SimulationConfig) -> float:
    """Response tokens of a batch on average."""
    mean = float(draw_lengths(cfg.simulate, cfg.trainer.seed).mean())
    return cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt * mean
