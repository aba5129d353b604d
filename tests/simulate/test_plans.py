"""The unchanged plans in simulation: their throughput, no deadlock, and the staleness bound."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from skyasync.errors import UserError
from skyasync.simulate.clock import Deadlock, run_virtual
from skyasync.simulate.run import Outcome, make_trainer, simulate, train_s_per_token, work
from skyasync.simulate.settings import SimulationConfig, draw_lengths
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import (
    ColocatedAsyncRayPPOTrainer,
    FullyAsyncRayPPOTrainer,
    HybridAsyncRayPPOTrainer,
)
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer

pytestmark = pytest.mark.slow


def config(lengths: str = "constant", steps: int = 60, **settings: Any) -> SimulationConfig:
    """16 prompts of 4 samples on 2 engines of 8 slots: a batch keeps the engines busy for 4 responses' time."""
    cfg = SimulationConfig()
    (
        cfg.trainer.max_training_steps,
        cfg.trainer.train_batch_size,
        cfg.generator.n_samples_per_prompt,
    ) = steps, 16, 4
    cfg.generator.num_inference_engines, cfg.simulate.slots = 2, 8
    cfg.simulate.lengths, cfg.simulate.length_mean, cfg.simulate.length_max = lengths, 100.0, 0
    for name, value in settings.items():
        (owner,) = [
            part for part in (cfg.trainer, cfg.generator, cfg.simulate) if hasattr(part, name)
        ]
        setattr(owner, name, value)
    return cfg


def share(cfg: SimulationConfig, outcome: Outcome) -> float:
    """Relative to the throughput at which the busier side never waits."""
    return work(cfg).step_s / outcome.step_s


# ---------------------------------------------------------------- throughput


@pytest.mark.parametrize("plan", ["one_step_off", "fully_async"])
def test_balanced_and_without_stragglers_overlap_reaches_the_bound(plan: str) -> None:
    cfg = config()
    sync, outcome = simulate(cfg, "sync"), simulate(cfg, plan)
    bound = (sync.generate_s + work(cfg).training_s) / max(sync.generate_s, work(cfg).training_s)
    assert bound == pytest.approx(2.0, rel=0.02)
    assert sync.step_s / outcome.step_s >= 0.97 * bound


def test_synchronous_steps_take_generation_plus_training_plus_sync() -> None:
    cfg = config(sync_s=3.0, train_s_per_token=0.002)
    assert simulate(cfg, "sync").step_s == pytest.approx(8.0 + 0.002 * 6400 + 3.0, rel=0.02)


def test_with_log_normal_tails_streaming_stays_near_the_bound() -> None:
    cfg = config("lognormal", length_max=800)
    assert share(cfg, simulate(cfg, "fully_async")) > 0.9


def test_with_log_normal_tails_one_step_off_falls_to_what_theory_says() -> None:
    """A step takes max(G, T), where G, with a slot per sample, is the longest response of the batch."""
    cfg = config("lognormal", steps=300, slots=32)
    lengths = draw_lengths(cfg.simulate, seed=99)
    longest = np.random.default_rng(1).choice(lengths, (20_000, 64)).max(1) * cfg.simulate.token_s
    expected = work(cfg).step_s / np.maximum(longest, work(cfg).training_s).mean()
    assert share(cfg, simulate(cfg, "one_step_off")) == pytest.approx(expected, rel=0.1)
    assert expected < 0.2


def test_waiting_for_rollouts_at_a_weight_update_costs_what_partial_rollouts_save() -> None:
    keep, recompute, wait = (
        share(cfg, simulate(cfg, "fully_async"))
        for cfg in (
            config("lognormal", length_max=800, partial_rollout=p)
            for p in ("keep", "recompute", "wait")
        )
    )
    assert keep > 0.9 and recompute > 0.85
    assert wait < 0.7


def shared(ratio: float, plan: str, steps: int = 50, **settings: Any) -> float:
    """Seconds of a step on two engines' and two trainers' devices; training takes ``ratio`` times the generation."""
    cfg = config("lognormal", steps=steps, length_max=800, max_staleness=4, **settings)
    cfg.trainer.placement.policy_num_gpus_per_node = 2
    cfg.simulate.train_s_per_token = ratio * 2 * train_s_per_token(cfg)
    return simulate(cfg, plan).step_s


@pytest.mark.parametrize(
    "plan", [pytest.param("colocated_async", marks=pytest.mark.matrix), "hybrid_async"]
)
def test_where_the_trainer_waits_plans_that_share_devices_are_faster_on_the_same_devices(
    plan: str,
) -> None:
    changes = {"sync_s": 0.2, "switch_s": 0.2}  # of 8 seconds
    separate = min(shared(0.5, other, **changes) for other in ("one_step_off", "fully_async"))
    assert separate > 1.12 * shared(0.5, plan, **changes)


@pytest.mark.parametrize("plan", ["colocated_async", "hybrid_async"])
@pytest.mark.parametrize("ratio", [pytest.param(0.9, marks=pytest.mark.matrix), 1.0, 1.1, 2.0])
def test_plans_that_share_devices_are_not_slower_if_the_devices_change_in_no_time(
    ratio: float, plan: str
) -> None:
    separate = min(shared(ratio, other) for other in ("one_step_off", "fully_async"))
    assert shared(ratio, plan) < 1.02 * separate


@pytest.mark.parametrize("ratio", [0.9, 1.0])
def test_a_change_of_devices_costs_hybrid_engines_nothing_where_the_split_is_right(
    ratio: float,
) -> None:
    changes = {"sync_s": 0.2, "switch_s": 0.2}
    separate = min(shared(ratio, other, **changes) for other in ("one_step_off", "fully_async"))
    assert shared(ratio, "hybrid_async", **changes) < 1.02 * separate


def test_engines_on_shared_devices_are_not_left_asleep_by_a_sync_interval() -> None:
    with pytest.raises(UserError, match=r"sync_interval=2 leaves the engines asleep"):
        simulate(config(sync_interval=2), "colocated_async")


def test_as_many_engines_as_the_settings_say_are_on_the_policys_devices() -> None:
    def engines(hybrid: int) -> int:
        async def run() -> int:
            cfg = config(hybrid_engines=hybrid)
            cfg.trainer.placement.policy_num_gpus_per_node = 4
            return len(make_trainer(cfg, HybridAsyncRayPPOTrainer).context.client.engines)  # type: ignore[attr-defined]

        return run_virtual(run())

    assert [engines(hybrid) for hybrid in (0, 1, 4)] == [6, 3, 6]


@pytest.mark.parametrize("setting", ["dynamic_sampling", "oversample_per_prompt", "replay_groups"])
def test_a_setting_that_is_not_simulated_is_an_error_that_names_it(setting: str) -> None:
    cfg = config(steps=4)
    cfg.trainer.algorithm.dynamic_sampling.type = (
        "variance" if setting == "dynamic_sampling" else "none"
    )
    cfg.generator.oversample_per_prompt = int(setting == "oversample_per_prompt")
    cfg.data.replay_groups = int(setting == "replay_groups")
    with pytest.raises(
        UserError, match=rf"{setting}(\.type)? changes what a step trains, which is not simulated"
    ):
        simulate(cfg, "sync")


# ---------------------------------------------------------------- guarantees


KEPT = [(FullyAsyncRayPPOTrainer, way) for way in ("keep", "recompute", "wait")]
SHARING = [(ColocatedAsyncRayPPOTrainer, "keep"), (HybridAsyncRayPPOTrainer, "keep")]


@pytest.mark.parametrize("lengths", ["lognormal", "bimodal"])
@pytest.mark.parametrize("plan, partial_rollout", [*KEPT, *SHARING])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_token_is_older_than_the_bound_and_none_is_lost(
    lengths: str, plan: type[RayPPOTrainer], partial_rollout: str, staleness: int
) -> None:
    cfg = config(
        lengths,
        steps=20,
        max_staleness=staleness,
        partial_rollout=partial_rollout,
        sync_s=0.3,
        switch_s=0.2,
    )
    cfg.simulate.train_s_per_token = 0.0003
    trained: list[Any] = []

    class Noting(plan):  # type: ignore[misc, valid-type]
        async def train_on(self, rollout: Any) -> dict[str, float]:
            trained.extend(group.prompt.id for group in rollout.groups)
            return await super().train_on(rollout)

    async def run() -> Any:
        trainer = make_trainer(cfg, Noting)
        await trainer.run()
        return trainer

    trainer = run_virtual(run())
    assert max(trainer.staleness) <= staleness
    assert len(trained) == len(set(trained)) == 20 * 16
    assert trainer.staleness.total() == trainer.generator.generated > 0, (
        "every generated token was trained, once"
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_the_staleness_of_a_plan_is_the_one_after_its_first_steps(depth: int) -> None:
    assert set(simulate(config(steps=20, async_queue_size=depth), "one_step_off").staleness) == {
        depth
    }


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_that_is_all_start_and_end_has_the_averages_of_all_its_steps(steps: int) -> None:
    outcome = simulate(config(steps=steps), "sync")
    assert outcome.step_s == pytest.approx(16.0, rel=0.02)
    assert outcome.staleness.total() == steps * 64 * 100


def test_without_staleness_every_step_is_the_synchronous_one() -> None:
    cfg = config("lognormal", steps=20, max_staleness=0)
    assert simulate(cfg, "fully_async").step_s == pytest.approx(
        simulate(cfg, "sync").step_s, rel=1e-6
    )


def test_fewer_prompts_in_flight_give_the_same_throughput_with_younger_samples() -> None:
    everything = config("lognormal", length_max=800, max_staleness=4)
    three_batches = config("lognormal", length_max=800, max_staleness=4, generate_batch_size=48)
    old, young = simulate(everything, "fully_async"), simulate(three_batches, "fully_async")
    assert young.samples_per_s > 0.97 * old.samples_per_s
    assert young.staleness_mean < 0.75 * old.staleness_mean


def test_the_plans_run_unmodified() -> None:
    from skyasync.simulate.parts import Simulated

    async def run() -> None:
        for plan in (RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer):
            assert type(make_trainer(config(steps=4), plan)).__bases__ == (Simulated, plan)

    run_virtual(run())
    assert {name for name in vars(Simulated) if not name.startswith("_")} == {
        "prepare",
        "forward_backward",
        "optimizer_step",
    }


# ---------------------------------------------------------------- failures


def test_a_plan_that_jams_is_an_error_that_says_who_waits() -> None:
    class Forgetful(FullyAsyncRayPPOTrainer):
        def _release(self) -> None:
            """Frees no slot."""

    async def run() -> None:
        await make_trainer(config(steps=20), Forgetful).run()

    with pytest.raises(Deadlock) as deadlock:
        run_virtual(run())
    assert "_run_generation" in str(deadlock.value) and "_train_batches" in str(deadlock.value)


@pytest.mark.parametrize(
    "plan", [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, *(p for p, _ in SHARING)]
)
@pytest.mark.parametrize("part", ["generator.generate", "dispatch.train", "weight_sync.sync"])
def test_an_error_in_any_part_ends_every_plan_with_that_error(
    plan: type[RayPPOTrainer], part: str
) -> None:
    async def run() -> None:
        trainer = make_trainer(config("lognormal", steps=20), plan)
        owner_name, method = part.split(".")
        owner = getattr(trainer, owner_name)
        works, calls = getattr(owner, method), []

        async def fails(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 7:
                raise OSError(f"{part} broke")
            return await works(*args)

        setattr(owner, method, fails)
        try:
            await trainer.run()
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"

    with pytest.raises(OSError, match=f"{part} broke"):
        run_virtual(run())


class Twice(RayPPOTrainer):
    """Trains every batch twice."""

    async def train(self) -> None:
        for prompts in self.remaining_prompts():
            rollout = await self.generate(prompts)
            await self.learn_from(rollout.groups)
            status = await self.train_on(rollout)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)


def test_a_plan_may_train_a_batch_twice() -> None:
    async def run() -> float:
        trainer = make_trainer(config(steps=4), Twice)
        await trainer.run()
        return float(trainer.staleness.total())

    assert run_virtual(run()) == 2 * 4 * 16 * 4 * 100
