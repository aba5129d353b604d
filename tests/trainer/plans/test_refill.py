"""Groups that dynamic sampling rejects are replaced by the next prompts, in every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.trainer.plans.parts import BOUNDED, PLANS, Run, make_run, stream

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
ALL_RIGHT = frozenset({0, 3, 4, 5, 11, 17, 18, 22})


def refilling(
    plan: type[RayPPOTrainer],
    all_right: frozenset[int] = ALL_RIGHT,
    *,
    prompts: int = 30,
    **settings: Any,
) -> Run:
    sampling = {"type": "variance", "mode": "refill"} | settings.pop("sampling", {})
    settings |= {
        f"trainer__algorithm__dynamic_sampling__{name}": value for name, value in sampling.items()
    }
    run = make_run(plan, prompts=prompts, **settings)
    run.generator.all_right = all_right
    return run


def sizes(run: Run) -> list[int]:
    return [len(update) for update in run.dispatch.trained]


@every_plan
def test_every_batch_is_full_and_every_prompt_is_trained_or_rejected_once(
    plan: type[RayPPOTrainer],
) -> None:
    run = refilling(plan, generating=[1.0, 5.0, 2.0]).train()
    kept = [identity for identity in stream(30) if identity.row not in ALL_RIGHT]
    assert sizes(run) == [4, 4, 4, 4, 4, 2]
    assert sorted(run.trained) == sorted(kept)
    assert sorted(run.generator.asked) == sorted(stream(30)), "each prompt is generated once"
    if plan in (RayPPOTrainer, AsyncRayPPOTrainer):
        assert run.trained == kept, "in the order of the stream"


@every_plan
def test_groups_that_a_generator_leaves_out_are_replaced_too(plan: type[RayPPOTrainer]) -> None:
    class Yields(plan):  # type: ignore[misc, valid-type]
        def filter_groups(self, groups: Any) -> Any:
            yield from super().filter_groups(groups)

    run = refilling(Yields).train()
    kept = [identity for identity in stream(30) if identity.row not in ALL_RIGHT]
    assert sizes(run) == [4, 4, 4, 4, 4, 2] and sorted(run.trained) == sorted(kept)


@every_plan
def test_what_was_sampled_and_rejected_is_logged_and_the_reward_is_that_of_all_samples(
    plan: type[RayPPOTrainer],
) -> None:
    run = refilling(plan).train()
    rejected, sampled = (
        run.tracker.of("dynamic_sampling/rejected"),
        run.tracker.of("dynamic_sampling/sampled"),
    )
    assert sum(rejected.values()) == len(ALL_RIGHT) and sum(sampled.values()) == 30
    for step, reward in run.tracker.of("reward/mean").items():
        assert reward == pytest.approx(0.5 + 0.5 * rejected[step] / sampled[step])


@every_plan
def test_the_number_of_steps_asked_for_is_trained_and_nothing_is_generated_in_vain(
    plan: type[RayPPOTrainer],
) -> None:
    run = refilling(plan, trainer__max_training_steps=3, trainer__epochs=5).train()
    assert sizes(run) == [4, 4, 4]
    kept = [identity for identity in run.generator.asked if identity.row not in ALL_RIGHT]
    assert sorted(kept) == sorted(run.trained)
    assert run.tracker.rows[-1][0] == run.trainer.total_steps == 3


@every_plan
def test_a_step_makes_do_with_what_it_has_when_too_much_is_rejected(
    plan: type[RayPPOTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    good = stream(24)[1].row
    run = refilling(
        plan,
        frozenset(range(24)) - {good},
        prompts=24,
        sampling={"max_sample_batches": 2},
        trainer__ckpt_interval=0,
    ).train()
    assert [identity.row for identity in run.trained] == [good]
    limits = run.tracker.of("dynamic_sampling/limit_reached")
    assert limits and set(limits.values()) == {1.0}
    assert sorted(run.generator.asked) == sorted(stream(24))
    assert (
        "max_sample_batches=2 is reached: the step trains on 1 groups instead of 4" in caplog.text
    )


@every_plan
def test_a_limit_of_one_batch_replaces_nothing(plan: type[RayPPOTrainer]) -> None:
    run = refilling(
        plan, prompts=16, sampling={"max_sample_batches": 1}, trainer__max_staleness=0
    ).train()
    assert sorted(run.trained) == sorted(i for i in stream(16) if i.row not in ALL_RIGHT)
    if plan not in BOUNDED:
        assert (
            sum(run.tracker.of("dynamic_sampling/sampled").values()) == 16
            and len(run.tracker.rows) == 4
        )


@every_plan
def test_a_stream_that_ends_in_rejected_prompts_ends_the_run_with_its_last_evaluation(
    plan: type[RayPPOTrainer],
) -> None:
    last = frozenset(identity.row for identity in stream(14)[-2:])
    run = refilling(plan, last, prompts=14, eval_prompts=2, trainer__eval_interval=0).train()
    assert sorted(run.trained) == sorted(stream(14)[:12])
    final = run.tracker.rows[-1]
    assert "eval/score" in final[1] and final[0] == run.trainer.total_steps


@every_plan
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_resumed_run_trains_what_is_left_once(
    plan: type[RayPPOTrainer], first: int, tmp_path: Path
) -> None:
    shared = {"trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    before = refilling(plan, trainer__max_training_steps=first, **shared).train()
    after = refilling(plan, trainer__resume_mode="latest", **shared).train()
    kept = [identity for identity in stream(30) if identity.row not in ALL_RIGHT]
    assert sorted(before.trained + after.trained) == sorted(kept)


@every_plan
def test_the_learning_rate_ends_with_the_run_however_many_prompts_are_rejected(
    plan: type[RayPPOTrainer],
) -> None:
    by_data = refilling(plan, trainer__policy_mini_batch_size=2).train()
    scheduled = by_data.dispatch.scheduled
    assert scheduled == sorted(scheduled) and scheduled[0] == 0
    assert 12 <= scheduled[-1] < 16, "30 prompts make 8 steps of 2 updates"
    by_steps = refilling(
        plan, trainer__max_training_steps=3, trainer__epochs=9, trainer__policy_mini_batch_size=2
    )
    assert by_steps.train().dispatch.scheduled == [0, 1, 2, 3, 4, 5]


@every_plan
def test_filtered_groups_leave_the_learning_rates_schedule_as_it_was_planned(
    plan: type[RayPPOTrainer],
) -> None:
    run = refilling(
        plan, prompts=16, sampling={"mode": "filter"}, trainer__policy_mini_batch_size=1
    ).train()
    assert len(run.trained) == 16 - len([row for row in ALL_RIGHT if row < 16])
    starts = {update - update % 4 for update in run.dispatch.scheduled}
    assert starts <= {0, 4, 8, 12}
    assert sum(run.tracker.of("dynamic_sampling/rejected").values()) == 16 - len(run.trained)


@every_plan
def test_an_interpolated_proximal_policy_needs_no_forward_pass_and_is_exact_in_the_first_update(
    plan: type[RayPPOTrainer],
) -> None:
    run = make_run(
        plan,
        prompts=8,
        trainer__policy_mini_batch_size=2,
        trainer__algorithm__proximal_logprobs="loglinear",
    )
    batches = run.train().dispatch.batches
    assert [batch.approximated_version for batch in batches] == [None, 1, None, 2]
    assert (
        all(batch.proximal_logprobs is None for batch in batches)
        and run.faults.calls["logprobs"] == 0
    )


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_one_step_off_ends_although_there_are_fewer_batches_than_planned(depth: int) -> None:
    all_right = frozenset(identity.row for identity in stream(20)[4:])
    run = refilling(
        AsyncRayPPOTrainer, all_right, prompts=20, trainer__async_queue_size=depth
    ).train()
    assert run.trained == stream(20)[:4]


@pytest.mark.parametrize("plan", BOUNDED)
def test_the_limit_of_rejected_prompts_holds_per_step_also_with_few_syncs(
    plan: type[RayPPOTrainer],
) -> None:
    """Between two syncs nothing else frees a slot for the batch that follows one with too many rejected prompts."""
    all_right = frozenset(identity.row for identity in stream(60)[2:50])
    run = refilling(
        plan, all_right, prompts=60, trainer__sync_interval=2, trainer__max_staleness=1
    ).train()
    assert sorted(run.trained) == sorted(i for i in stream(60) if i.row not in all_right)


@pytest.mark.parametrize("plan", BOUNDED)
@pytest.mark.parametrize("concurrent", [1, 2])
def test_batches_that_make_do_leave_prompts_for_more_steps_than_were_planned(
    plan: type[RayPPOTrainer], concurrent: int
) -> None:
    run = refilling(
        plan, frozenset(identity.row for identity in stream(24)[::3]), prompts=24, trainer__max_staleness=1,
        sampling={"max_sample_batches": 1}, generator__max_concurrent_rollouts=concurrent,
    ).train()  # fmt: skip
    assert sorted(run.trained) == sorted(identity for k, identity in enumerate(stream(24)) if k % 3)


def test_without_staleness_the_streaming_plan_trains_the_synchronous_plans_batches() -> None:
    streaming = refilling(
        FullyAsyncRayPPOTrainer, trainer__max_staleness=0, generating=[1.0, 3.0, 2.0]
    ).train()
    assert streaming.dispatch.trained == refilling(RayPPOTrainer).train().dispatch.trained


def test_a_hook_sees_each_group_once_before_it_is_rejected() -> None:
    seen = []

    class Counting(RayPPOTrainer):
        def postprocess_generator_output(self, groups):  # type: ignore[no-untyped-def]
            seen.extend(group.prompt.id for group in groups)
            return groups

    refilling(Counting).train()
    assert seen == stream(30)
