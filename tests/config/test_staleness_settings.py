"""Settings of the fully asynchronous plan that contradict each other or the plan."""

from __future__ import annotations

import pytest

from skyasync.config import ConfigError, load_config
from skyasync.config.check import check_config
from skyasync.config.schema import Config


def problems(
    plan: str, *, fixed: str | None = None, batch: int = 64, **settings: object
) -> list[str]:
    cfg = Config()
    cfg.trainer.plan, cfg.trainer.train_batch_size = plan, batch
    for name, value in settings.items():
        owner = cfg.generator if hasattr(cfg.generator, name) else cfg.trainer
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return check_config(cfg, plan=fixed)


@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
@pytest.mark.parametrize("partial_rollout", ["recompute", "wait"])
def test_partial_rollout_needs_a_plan_with_requests_in_flight(
    plan: str, partial_rollout: str
) -> None:
    (problem,) = problems(plan, partial_rollout=partial_rollout)
    assert (
        f"trainer.partial_rollout={partial_rollout}" in problem
        and f"trainer.plan={plan}" in problem
    )
    assert "set trainer.plan=fully_async" in problem
    assert problems("fully_async", partial_rollout=partial_rollout) == []


def test_the_generation_ratio_needs_the_staleness_that_it_causes() -> None:
    (problem,) = problems("fully_async", async_generation_ratio=2.5, max_staleness=2)
    assert "raise trainer.max_staleness to 3" in problem
    assert problems("fully_async", async_generation_ratio=2.5, max_staleness=3) == []


@pytest.mark.parametrize(
    ("size", "way_out"),
    [(63, "is not between trainer.train_batch_size=64"), (193, "trainer.max_staleness to 3")],
)
def test_prompts_in_flight_are_a_batch_at_least_and_what_staleness_allows_at_most(
    size: int, way_out: str
) -> None:
    (problem,) = problems(
        "fully_async", generate_batch_size=size, max_staleness=2 if size > 64 else 1
    )
    assert f"generator.generate_batch_size={size}" in problem and way_out in problem


def test_whole_numbers_of_batches_in_flight_are_right() -> None:
    assert problems("fully_async", generate_batch_size=128, max_staleness=1) == []


def test_without_staleness_no_correction_is_needed() -> None:
    cfg = Config()
    cfg.trainer.plan, cfg.trainer.algorithm.off_policy_correction = "fully_async", "none"
    assert "trainer.allow_uncorrected=true" in check_config(cfg)[0]
    cfg.trainer.max_staleness = 0
    assert check_config(cfg) == []


def test_plans_that_share_devices_say_which() -> None:
    shared = ["trainer.placement.colocate_all=true"]
    with pytest.raises(
        ConfigError,
        match=r"colocated_async lets policy and engines .* set trainer.placement.colocate_",
    ):
        load_config(["trainer.plan=colocated_async"])
    load_config(["trainer.plan=colocated_async", "trainer.max_staleness=2", *shared])
    with pytest.raises(ConfigError, match=r"trainer.partial_rollout=wait has no effect"):
        load_config(["trainer.plan=colocated_async", "trainer.partial_rollout=wait", *shared])
    load_config(
        ["trainer.plan=hybrid_async", "generator.hybrid_engines=1", "trainer.max_staleness=2"]
    )
    for count in (0, 2):
        with pytest.raises(
            ConfigError, match=f"generator.hybrid_engines={count}: set it to 1, for the one rank"
        ):
            load_config(["trainer.plan=hybrid_async", f"generator.hybrid_engines={count}"])
    with pytest.raises(
        ConfigError, match=r"generator.hybrid_engines=1 has no effect .* trainer.plan=hybrid_async"
    ):
        load_config(["trainer.plan=fully_async", "generator.hybrid_engines=1"])
    with pytest.raises(
        ConfigError, match=r"generator.hybrid_engines=1 sleep then: use .*=shared_memory"
    ):
        load_config(
            ["trainer.plan=hybrid_async", "generator.hybrid_engines=1", "generator.backend=vllm",
             "generator.weight_sync_backend=nccl"]
        )  # fmt: skip


def test_a_plan_that_the_experiment_fixes_is_the_one_that_counts() -> None:
    assert problems("sync", fixed="fully_async", partial_rollout="wait") == []
    assert problems("fully_async", fixed="sync", partial_rollout="wait") != []
