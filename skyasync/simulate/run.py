"""One plan, simulated: from settings to a row of the table."""

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
    """Seconds per step that a batch keeps all engines, and the trainer, busy if nothing ever
    waits."""

    generation_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """No plan is faster than this."""
        return max(self.generation_s, self.training_s)


@dataclass(frozen=True)
class Outcome:
    """What one plan did, over the steps between its start and its end.

    ``generate_s`` is the time from a batch's (or a group's, where they stream) first request to its
    last token.
    """

    plan: str
    step_s: float
    samples_per_s: float
    idle_trainer: float
    idle_engines: float
    generate_s: float
    staleness: Counter[int]  # tokens by the staleness at which these steps trained them

    @property
    def staleness_mean(self) -> float:
        return sum(versions * count for versions, count in self.staleness.items()) / max(
            self.staleness.total(), 1
        )


class _Steps(RunExtension):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.staleness: list[Counter[int]] = []  # of each step

    def on_step_end(self, trainer: Simulated, metrics: dict[str, float]) -> None:  # type: ignore[override]
        names = ("idle/trainer", "idle/engines", "time/generate_s", "time/step_s")
        self.rows.append({name: metrics[name] for name in names})
        self.staleness.append(trainer.staleness)
        trainer.staleness = Counter()


def work(cfg: SimulationConfig) -> Work:
    """What a batch costs on average."""
    return Work(_generation_s(cfg), _tokens(cfg) * train_s_per_token(cfg))


def simulate(cfg: SimulationConfig, plan: str) -> Outcome:
    """Run ``trainer.max_training_steps`` steps of a plan in simulation.

    Averages are over the middle: neither the first steps, which fill the pipeline, nor those that
    empty it.

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
    if not steps.rows[middle]:
        middle = slice(count)
    span = steps.rows[middle]
    seconds = sum(row["time/step_s"] for row in span)
    samples = len(span) * cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    return Outcome(
        plan,
        step_s=seconds / len(span),
        samples_per_s=samples / seconds,
        idle_trainer=sum(row["idle/trainer"] * row["time/step_s"] for row in span) / seconds,
        idle_engines=sum(row["idle/engines"] * row["time/step_s"] for row in span) / seconds,
        generate_s=sum(row["time/generate_s"] for row in span) / len(span),
        staleness=sum(steps.staleness[middle], Counter()),
    )


def make_trainer(cfg: SimulationConfig, plan: type[RayPPOTrainer]) -> Simulated:
    """The plan with all its parts, on the running (virtual) event loop. Changes ``cfg``, which then
    belongs to it.

    Raises:
        UserError: for a setting that decides by rewards or times of samples that are not simulated,
            or that the plan cannot have.
    """
    settings = cfg.simulate
    generator = cfg.generator
    for key, given in (
        (
            "trainer.algorithm.dynamic_sampling.type",
            cfg.trainer.algorithm.dynamic_sampling.type != "none",
        ),
        ("generator.oversample_per_prompt", generator.oversample_per_prompt),
        ("data.replay_groups", cfg.data.replay_groups),
    ):
        if given:
            raise UserError(
                f"{key} changes what a step trains, which is not simulated: leave it at its default"
            )
    if (
        plan.shares_devices == "all" and cfg.trainer.sync_interval > 1
    ):  # a real run has this error from check_plan
        raise UserError(
            f"trainer.sync_interval={cfg.trainer.sync_interval} leaves the engines asleep after most steps of a plan "
            f"that shares all devices: leave it at its default, or that plan out of simulate.plans"
        )
    cfg.trainer.step_timeout_s = FOREVER_S
    cfg.trainer.allow_uncorrected = True
    cfg.trainer.save_samples = 0
    cfg.trainer.resume_mode = "none"
    cfg.trainer.ckpt_interval = 0
    cfg.trainer.ckpt_on_exit = False
    cfg.trainer.ckpt_minutes = 0.0
    cfg.trainer.ckpt_best_metric = ""
    cfg.trainer.export_interval = 0
    cfg.trainer.dump_trajectories = False
    cfg.trainer.profile_steps = []
    cfg.trainer.update_epochs_per_batch = 1  # the costs are those of all passes
    cfg.trainer.placement.colocate_all = (
        False  # it does not say which virtual devices are shared: the plan does
    )
    trainers = cfg.trainer.placement.policy_ranks
    own = generator.num_inference_engines
    shares = plan.shares_devices
    # with one engine on each device that is shared, or as many as generator.hybrid_engines
    on_shared = {
        "all": trainers,
        "hybrid": min(generator.hybrid_engines or trainers, trainers),
        "": 0,
    }[shares]
    engines = range(own + on_shared)
    shared = {"all": engines, "hybrid": engines[own:], "": range(0)}[shares]
    client = VirtualClient(
        [VirtualEngine(_costs(cfg)) for _ in engines], engines[own:] if shares == "hybrid" else ()
    )
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
    trainer.context.phases.stall_s = math.inf  # a Deadlock names who waits
    timeline = Timeline(None, clock=asyncio.get_running_loop().time, memory=64)
    workers = VirtualWorkers(
        train_s_per_token(cfg) * (trainers / len(engines) if shares == "all" else 1.0)
    )
    sync = VirtualSync(client, settings.sync_s)
    colocation = VirtualColocation(client, shared, settings)
    if shares == "all":
        sync.colocation = colocation
    trainer.attach(workers, sync, timeline=timeline, colocation=colocation if shared else None)  # type: ignore[arg-type]
    return trainer


def _costs(cfg: SimulationConfig) -> DecodeCosts:
    settings = cfg.simulate
    return DecodeCosts(
        settings.slots, settings.token_s, settings.token_s_per_sequence, settings.prefill
    )


def train_s_per_token(cfg: SimulationConfig) -> float:
    """Wall seconds of training per token, with all trainer devices."""
    if cfg.simulate.train_s_per_token:
        return cfg.simulate.train_s_per_token / cfg.trainer.placement.policy_ranks
    return _generation_s(cfg) / _tokens(cfg)


def _generation_s(cfg: SimulationConfig) -> float:
    settings = cfg.simulate
    generator = cfg.generator
    samples = cfg.trainer.train_batch_size * generator.n_samples_per_prompt
    decode_steps = _tokens(cfg) + samples * settings.prefill * settings.prompt_length
    return (
        decode_steps
        * _costs(cfg).step_s(settings.slots)
        / (settings.slots * generator.num_inference_engines)
    )


def _tokens(cfg: SimulationConfig) -> float:
    """Of a batch, on average."""
    mean = float(draw_lengths(cfg.simulate, cfg.trainer.seed).mean())
    return cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt * mean
