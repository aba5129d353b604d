"""Rules for all plans: order, metrics, resuming, errors, endings, and algorithms by inheritance."""

import asyncio
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.callbacks import TrainerCallback
from skyasync.errors import UserError
from skyasync.rollout.types import PromptId
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.trainer.plans.parts import BOUNDED, PLANS, make_run, stream

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


class Broken(Exception):
    pass


async def within(coroutine, *, seconds):
    """Fails if it takes longer."""
    try:
        return await coroutine
    finally:
        assert asyncio.get_running_loop().time() <= seconds


class Recorder(TrainerCallback):
    """Events with their steps; raises an error at one of them on request."""

    def __init__(self, event="", step=0, error=None):
        self.events, self._fault = [], (event, step, error)

    def _seen(self, event, trainer):
        self.events.append((event, trainer.global_step))
        if self._fault[:2] == (event, trainer.global_step):
            raise self._fault[2]

    def on_start(self, trainer):
        self._seen("begin", trainer)

    def on_step_end(self, trainer, metrics):
        metrics["mine"] = float(trainer.global_step)
        self._seen("step", trainer)

    def on_evaluate(self, trainer, metrics):
        self._seen("evaluate", trainer)

    def on_checkpoint(self, trainer, folder):
        assert (folder / "state.json").is_file()
        self._seen("checkpoint", trainer)

    def on_end(self, trainer):
        self._seen("end", trainer)


# ---------------------------------------------------------------- order


@every_plan
def test_every_prompt_is_trained_exactly_once_per_epoch_in_the_order_of_the_stream(plan):
    run = make_run(plan, prompts=10, trainer__epochs=3).train()
    assert run.trained == stream(10, epochs=3)
    for epoch in range(3):
        assert sorted(i.row for i in run.trained if i.epoch == epoch) == list(range(10))


@every_plan
def test_the_last_batch_may_be_smaller_and_is_trained(plan):
    run = make_run(plan, prompts=10).train()
    assert [len(update) for update in run.dispatch.trained] == [4, 4, 2]
    assert sorted(run.tracker.of("reward/mean")) == [1, 2, 3]


@every_plan
def test_max_training_steps_decide_unless_epochs_are_set(plan, caplog):
    assert (
        make_run(plan, prompts=40, trainer__max_training_steps=2).train().trained == stream(40)[:8]
    )
    assert (
        make_run(plan, prompts=8, trainer__max_training_steps=5).train().trained
        == stream(8, epochs=3)[:20]
    )
    assert "the data has ended" not in caplog.text
    assert make_run(
        plan, prompts=8, trainer__max_training_steps=99, trainer__epochs=1
    ).train().trained == stream(8)
    assert "the data has ended with step 2 of trainer.max_training_steps=99" in caplog.text


@every_plan
def test_mini_batches_and_passes_update_the_policy_as_often_as_total_updates_says(plan):
    passes = 1 if plan is StreamedRayPPOTrainer else 3  # which has but one
    run = make_run(
        plan, prompts=8, trainer__policy_mini_batch_size=2, trainer__update_epochs_per_batch=passes
    ).train()
    assert run.dispatch.weights == run.trainer.context.length.updates == 2 * 2 * passes
    first_pass = [i for update in run.dispatch.trained[:2] for i in update]
    assert first_pass == stream(8)[:4]
    assert all(batch.proximal_logprobs is not None for batch in run.dispatch.batches)


@every_plan
@pytest.mark.parametrize("interval", [2, 3])
def test_weights_are_handed_over_every_nth_step_and_after_the_last(plan, interval):
    run = make_run(
        plan, prompts=28, eval_prompts=2, generating=[1.0, 4.0], trainer__eval_interval=2,
        trainer__sync_interval=interval, trainer__max_staleness=3,
    ).train()  # fmt: skip
    sync_steps = [step for step in range(1, 8) if step % interval == 0 or step == 7]
    assert run.sync.versions == [0, *sync_steps]
    assert sorted(run.trained) == sorted(stream(28))
    depth = 3 - (interval - 1) if plan in BOUNDED else int(plan is AsyncRayPPOTrainer)
    assert max(run.tracker.of("staleness/max").values()) <= depth + interval - 1
    versions = {
        step: max(version for version in [0, *sync_steps] if version <= step)
        for step in range(1, 8)
    }
    assert run.tracker.of("eval/version") == {step: versions[step] for step in (2, 4, 6, 7)}


def test_an_on_policy_plan_that_skips_syncs_needs_a_correction():
    with pytest.raises(
        UserError, match=r"correction=none leaves .* since trainer\.sync_interval=2 is asynchronous"
    ):
        make_run(
            RayPPOTrainer,
            trainer__sync_interval=2,
            trainer__algorithm__off_policy_correction="none",
        )


# ---------------------------------------------------------------- metrics


@every_plan
def test_metrics_of_a_step_are_logged_at_that_step_once_and_in_order(plan):
    recorder = Recorder()
    run = make_run(
        plan, prompts=12, callbacks=[recorder], eval_prompts=3, trainer__eval_interval=2
    ).train()
    assert [step for step, _ in run.tracker.rows] == [1, 2, 3]
    for name in ("policy/loss", "mine"):
        assert run.tracker.of(name) == {1: 1, 2: 2, 3: 3}
    for name in (
        "time/generate_s",
        "time/train_s",
        "time/sync_s",
        "sync/logprob_gap",
        "reward/mean",
        "idle/engines",
    ):
        assert sorted(run.tracker.of(name)) == [1, 2, 3], name


@every_plan
def test_an_evaluation_belongs_to_the_step_after_which_it_ran_and_to_that_policy(plan):
    run = make_run(
        plan, prompts=20, eval_prompts=3, trainer__eval_interval=2, trainer__eval_before_train=True
    ).train()
    assert run.tracker.of("eval/version") == {0: 0, 2: 2, 4: 4, 5: 5}
    assert sorted(run.tracker.of("eval/score")) == [0, 2, 4, 5]


@every_plan
def test_an_evaluation_at_the_end_runs_once_even_if_it_is_scheduled_anyway(plan):
    run = make_run(plan, prompts=8, eval_prompts=3, trainer__eval_interval=1).train()
    assert run.faults.calls["evaluate"] == 2
    assert run.trainer.last_metrics["eval/version"] == 2


@every_plan
def test_held_out_prompts_are_evaluated_in_pieces_and_weigh_alike(plan):
    run = make_run(plan, prompts=4, eval_prompts=7, trainer__eval_batch_size=3,
                   generator__eval_n_samples_per_prompt=2).train()  # fmt: skip
    assert run.faults.calls["evaluate"] == 3
    assert run.tracker.of("eval/score") == {1: 0.5}


@every_plan
def test_what_a_step_returns_may_be_a_copy_and_loses_nothing(plan):
    class Copying(plan):
        async def end_step(self, status):
            await super().end_step({**status, "copied": 1.0})

    run = make_run(Copying, prompts=8).train()
    assert sorted(run.tracker.of("copied")) == sorted(run.tracker.of("time/sync_s")) == [1, 2]


@pytest.mark.parametrize("plan", [RayPPOTrainer, AsyncRayPPOTrainer])
def test_a_generators_span_on_the_timeline_bears_the_step_that_trains_it(plan):
    run = make_run(plan, prompts=16).train()
    assert [s.step for s in run.timeline.spans() if s.name == "generate"] == [1, 2, 3, 4]


@every_plan
def test_without_stamps_the_version_at_the_start_of_generation_counts(plan):
    class InFlight(plan):
        """Weights arrive in the middle of every generation."""

        async def generate(self, prompts):
            before = self.policy_version
            task = asyncio.create_task(super().generate(prompts))
            await asyncio.sleep(0.5)
            self.context.progress.version = before + 5
            rollout = await task
            self.context.progress.version = before
            assert all(group.oldest_version == before for group in rollout.groups)
            return rollout

    run = make_run(InFlight, prompts=4)
    run.generator.stamps = False
    run.train()


# ---------------------------------------------------------------- checkpoints and resuming


@every_plan
@pytest.mark.parametrize("saved", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_resumed_run_goes_on_with_the_right_prompts_in_the_middle_of_an_epoch_and_at_its_end(
    plan, saved, tmp_path
):
    """10 prompts in batches of 4: epochs end after steps 2.5, 5 and 7.5."""
    shared = {
        "prompts": 10,
        "trainer__epochs": 3,
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 1,
    }
    first = make_run(plan, **shared)
    first.faults["update", saved + 1] = Broken()
    if saved < 8:
        with pytest.raises(Broken):
            first.train()
    else:
        first.train()
    second = make_run(plan, **shared, trainer__resume_mode="latest").train()
    assert first.trained[: 4 * saved] + second.trained == stream(10, epochs=3)
    assert [step for step, _ in second.tracker.rows] == list(range(saved + 1, 9))
    assert second.sync.versions == list(range(saved, 9))
    assert second.dispatch.weights == 8
    stale = plan in (AsyncRayPPOTrainer, *BOUNDED)  # the checkpoint's generated groups
    assert second.tracker.of("staleness/max").get(saved + 1, stale) == stale


@every_plan
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 3), (5, 4)])
def test_a_resumed_run_may_have_another_batch_size(plan, before, after, tmp_path):
    shared = {
        "prompts": 16,
        "trainer__epochs": 2,
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 1,
    }
    first = make_run(plan, **shared, trainer__train_batch_size=before)
    first.faults["update", 3] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(
        plan, **shared, trainer__train_batch_size=after, trainer__resume_mode="latest"
    ).train()
    assert first.trained + second.trained == stream(16, epochs=2)
    steps = -(-(32 - 2 * before) // after)
    assert [step for step, _ in second.tracker.rows] == list(range(3, 3 + steps))
    assert (tmp_path / f"step_{2 + steps:06d}").is_dir()


@every_plan
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_a_resumed_run_of_another_batch_size_ends_after_the_steps_that_are_set(
    plan, before, after, tmp_path
):
    shared = {"prompts": 16, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    make_run(
        plan, **shared, trainer__train_batch_size=before, trainer__max_training_steps=3
    ).train()
    more = {
        "trainer__train_batch_size": after,
        "trainer__max_training_steps": 5,
        "trainer__resume_mode": "latest",
    }
    second = make_run(plan, **shared, **more).train()
    assert [step for step, _ in second.tracker.rows] == [4, 5]
    assert len(second.trained) == 2 * after


@every_plan
def test_resuming_a_finished_run_trains_nothing_and_ends_well(plan, tmp_path):
    shared = {"prompts": 8, "trainer__ckpt_path": str(tmp_path / "c"), "trainer__ckpt_interval": 1}
    make_run(plan, **shared).train()
    again = make_run(
        plan, **shared, trainer__resume_mode="latest", trainer__export_path=str(tmp_path / "e")
    ).train()
    assert not again.trained
    assert not again.generator.asked
    assert again.dispatch.exported == [tmp_path / "e"]
    longer = make_run(plan, **shared, trainer__resume_mode="latest", trainer__epochs=2).train()
    assert longer.trained == stream(8, epochs=2)[8:]


@every_plan
def test_the_last_checkpoint_is_numbered_with_the_last_step(plan, tmp_path):
    recorder = Recorder()
    make_run(
        plan,
        prompts=14,
        callbacks=[recorder],
        trainer__ckpt_path=str(tmp_path),
        trainer__ckpt_interval=3,
    ).train()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    assert [e for e in recorder.events if e[0] == "checkpoint"] == [
        ("checkpoint", 3),
        ("checkpoint", 4),
    ]


@every_plan
def test_the_time_of_a_checkpoint_is_logged_at_its_step(plan, tmp_path):
    run = make_run(
        plan, prompts=16, trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=2
    ).train()
    assert sorted(run.tracker.of("time/checkpoint_s")) == [2, 4]


@every_plan
def test_no_checkpoint_is_written_unless_asked_for(plan, tmp_path):
    make_run(plan, prompts=8, trainer__ckpt_path=str(tmp_path)).train()
    assert not list(tmp_path.iterdir())


@every_plan
def test_resuming_without_a_checkpoint_starts_from_scratch(plan, tmp_path):
    run = make_run(
        plan, prompts=8, trainer__ckpt_path=str(tmp_path), trainer__resume_mode="latest"
    ).train()
    assert run.trained == stream(8)


@every_plan
def test_other_data_than_the_checkpoints_is_refused_and_the_tracker_closed(plan, tmp_path):
    shared = {"trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    make_run(plan, prompts=8, **shared).train()
    run = make_run(plan, prompts=9, **shared, trainer__resume_mode="latest")
    with pytest.raises(UserError, match="dataset_size=8, this run has 9"):
        run.train()
    assert run.tracker.closed == run.timeline.closed == 1


# ---------------------------------------------------------------- errors and endings


@every_plan
@settings(max_examples=40, deadline=None)
@given(
    fault=st.one_of(
        st.tuples(st.just("generate"), st.integers(1, 6)),
        st.tuples(st.just("update"), st.integers(1, 6)),
        st.tuples(st.just("sync"), st.integers(1, 7)),
        st.tuples(st.just("evaluate"), st.integers(1, 4)),
        st.tuples(st.just("stats"), st.integers(1, 7)),
        st.tuples(st.just("log"), st.integers(1, 7)),
    ),
    generating=st.sampled_from([0.0, 1.0, 5.0]),
    depth=st.integers(1, 3),
    kind=st.sampled_from([Broken, UserError, TimeoutError, KeyError]),
)
def test_an_error_in_any_part_at_any_step_ends_the_run_with_that_very_error(
    plan, fault, generating, depth, kind
):
    run = make_run(
        plan, prompts=24, eval_prompts=2, generating=[generating], trainer__eval_interval=2,
        trainer__eval_before_train=True, trainer__async_queue_size=depth,
    )  # fmt: skip
    error = run.faults[fault] = kind("boom")
    with pytest.raises(kind) as caught:
        run.train()
    assert caught.value is error
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "pass_or_raise"
    assert "train" in frames
    assert run.tracker.closed == run.timeline.closed == 1
    assert run.engines.generating == 0
    assert not run.engines.paused


@every_plan
@pytest.mark.parametrize("event", ["begin", "step", "evaluate", "checkpoint", "end"])
def test_an_error_in_a_callback_ends_the_run_with_that_very_error(plan, event, tmp_path):
    error = Broken()
    step = 0 if event == "begin" else 2
    run = make_run(
        plan, prompts=8, eval_prompts=2, callbacks=[Recorder(event, step, error)], trainer__eval_interval=2,
        trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=2,
    )  # fmt: skip
    with pytest.raises(Broken) as caught:
        run.train()
    assert caught.value is error
    assert run.tracker.closed == run.timeline.closed == 1


@every_plan
def test_an_error_while_saving_leaves_no_checkpoint_and_is_raised(plan, tmp_path):
    run = make_run(
        plan,
        prompts=12,
        trainer__ckpt_path=str(tmp_path),
        trainer__ckpt_interval=1,
        trainer__ckpt_patience=1,
    )
    error = run.faults["save", 2] = OSError("disk full")
    with pytest.raises(
        UserError, match=r"step 2 could not .*: disk full \(the newest is of step 1\).*patience"
    ) as caught:
        run.train()
    assert caught.value.__cause__ is error
    resumed = make_run(
        plan,
        prompts=12,
        trainer__ckpt_path=str(tmp_path),
        trainer__ckpt_interval=1,
        trainer__resume_mode="latest",
    ).train()
    assert resumed.trained == stream(12)[4:]


@every_plan
def test_an_error_cancels_what_the_other_coroutine_was_doing(plan):
    run = make_run(plan, prompts=24, generating=[1.0, 1000.0], updating=[5.0])
    run.faults["update", 1] = Broken()
    with pytest.raises(Broken):
        run.train()
    assert bool(run.generator.cancelled) == (plan is not RayPPOTrainer)


@every_plan
def test_engines_that_cannot_resume_do_not_hide_why_the_weight_sync_failed(plan):
    run = make_run(plan, prompts=12)
    error = run.faults["sync", 2] = Broken("the engine is gone")
    run.faults["resume", 1] = RuntimeError("so it cannot resume")
    with pytest.raises(Broken) as caught:
        run.train()
    assert caught.value is error


@pytest.mark.parametrize("plan", [AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer])
def test_engines_that_are_stuck_do_not_keep_back_why_the_weight_sync_failed(plan):
    run = make_run(plan, prompts=12)
    error = run.faults["sync", 2] = Broken("the sender is gone")

    async def never():
        await asyncio.sleep(1e9)

    run.engines.resume = never
    with pytest.raises(Broken) as caught:
        run_virtual(within(run.trainer.run(), seconds=60))
    assert caught.value is error
    assert "TimeoutError" in "".join(error.__notes__)


@every_plan
def test_a_tracker_that_cannot_close_hides_no_error_and_the_timeline_is_closed(plan):
    run = make_run(plan, prompts=12)
    error = run.faults["update", 2] = Broken()
    run.faults["close", 1] = RuntimeError("no connection")
    with pytest.raises(Broken) as caught:
        run.train()
    assert caught.value is error
    assert run.timeline.closed == 1


@every_plan
def test_a_tracker_that_cannot_close_is_an_error_if_there_is_no_other(plan):
    run = make_run(plan, prompts=12)
    run.faults["close", 1] = RuntimeError("no connection")
    with pytest.raises(RuntimeError, match="no connection"):
        run.train()
    assert run.timeline.closed == 1


@every_plan
@settings(max_examples=25, deadline=None)
@given(after=st.floats(0.05, 10.0))
def test_ctrl_c_at_any_moment_cancels_both_coroutines_and_closes_what_is_open(plan, after):
    run = make_run(plan, prompts=24, eval_prompts=2, generating=[1.0, 3.0], updating=[2.0])

    async def interrupted():
        task = asyncio.create_task(run.trainer.run())
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    run_virtual(interrupted())
    assert run.tracker.closed == run.timeline.closed == 1
    assert run.engines.generating == 0
    assert not run.engines.paused


@every_plan
def test_a_step_that_takes_too_long_is_an_error_that_names_the_key(plan):
    run = make_run(plan, prompts=12, updating=[1.0, 100.0], trainer__step_timeout_s=50.0)
    with pytest.raises(TimeoutError, match=r"step 2.*50 s.*trainer\.step_timeout_s"):
        run.train()
    run = make_run(plan, prompts=12, syncing=[1.0, 100.0], trainer__step_timeout_s=50.0)
    with pytest.raises(TimeoutError, match=r"trainer\.step_timeout_s"):
        run.train()


@every_plan
def test_callbacks_hear_of_everything_in_order(plan, tmp_path):
    recorder = Recorder()
    make_run(
        plan, prompts=8, eval_prompts=2, callbacks=[recorder], trainer__eval_interval=2,
        trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=1,
    ).train()  # fmt: skip
    assert recorder.events == [
        ("begin", 0), ("step", 1), ("checkpoint", 1), ("evaluate", 2), ("step", 2), ("checkpoint", 2), ("end", 2)
    ]  # fmt: skip


@every_plan
def test_the_policy_is_exported_after_the_last_step(plan, tmp_path):
    run = make_run(plan, prompts=8, trainer__export_path=str(tmp_path)).train()
    assert run.dispatch.exported == [tmp_path]
    assert run.trainer.context.phases.name == "finished"


# ---------------------------------------------------------------- generators of users


@every_plan
def test_a_generator_without_behaviour_logprobs_is_refused_where_the_objective_needs_them(plan):
    run = make_run(plan, prompts=8)
    original = run.generator.generate

    async def without(input_batch):
        output = await original(input_batch)
        del output["rollout_logprobs"]
        return output

    run.generator.generate = without
    with pytest.raises(UserError, match=r"rollout_logprobs.*off_policy_correction"):
        run.train()


@every_plan
@pytest.mark.parametrize("count", [0, 4, 16])
def test_a_generator_that_returns_more_or_fewer_trajectories_than_asked_is_refused(plan, count):
    run = make_run(plan, prompts=8)
    original = run.generator.generate

    async def other(input_batch):
        output = await original(input_batch)
        return {name: (values * 2)[:count] for name, values in output.items()}

    run.generator.generate = other
    with pytest.raises(UserError, match=r"asked for \d trajectories"):
        run.train()


@every_plan
def test_optional_lists_may_be_none_as_well_as_absent(plan):
    run = make_run(plan, prompts=8)
    original = run.generator.generate

    async def with_nones(input_batch):
        return await original(input_batch) | {"rollout_metrics": None, "trajectory_metrics": None}

    run.generator.generate = with_nones
    assert run.train().trained == stream(8)


# ---------------------------------------------------------------- algorithms by inheritance


class DoubledRewards:
    def postprocess_generator_output(self, groups):
        for group in groups:
            for trajectory in group.trajectories:
                for segment in trajectory.segments:
                    segment.reward *= 2
        return groups


class EvenRowsOnly:
    def filter_groups(self, groups):
        return [group for group in groups if group.prompt.id.row % 2 == 0]


class OwnAdvantages:
    def compute_advantages_and_returns(self, batch):
        batch.advantages = torch.full_like(batch.rewards, 3.0)
        return batch


class OwnPenalty:
    def apply_reward_kl_penalty(self, batch):
        batch.rewards = batch.rewards - 1.0
        return batch


@every_plan
def test_a_mixin_of_algorithm_hooks_works_with_the_plan_by_inheritance(plan):
    class Mine(DoubledRewards, EvenRowsOnly, OwnPenalty, OwnAdvantages, plan):
        pass

    run = make_run(Mine, prompts=16).train()
    assert set(run.tracker.of("reward/mean").values()) == {1.0}
    assert run.trained == [i for i in stream(16) if i.row % 2 == 0]
    assert all((batch.advantages == 3.0).all() for batch in run.dispatch.batches)
    assert {float(r) for batch in run.dispatch.batches for r in batch.rewards.flatten()} <= {
        -1.0,
        1.0,
    }


@every_plan
def test_hooks_of_groups_may_be_generators(plan):
    class Yields(plan):
        def postprocess_generator_output(self, groups):
            yield from DoubledRewards.postprocess_generator_output(self, groups)

        def filter_groups(self, groups):
            yield from EvenRowsOnly.filter_groups(self, groups)

    run = make_run(Yields, prompts=16).train()
    assert set(run.tracker.of("reward/mean").values()) == {1.0}
    assert run.trained == [i for i in stream(16) if i.row % 2 == 0]


@every_plan
def test_a_filter_that_leaves_nothing_makes_an_empty_step_and_the_run_goes_on(plan):
    class Nothing(plan):
        def filter_groups(self, groups):
            return groups if self.global_step != 1 else []

    run = make_run(Nothing, prompts=12).train()
    assert [step for step, _ in run.tracker.rows] == [1, 2, 3]
    assert sorted(run.tracker.of("policy/loss")) == [1, 3]
    assert run.sync.versions == [0, 1, 2, 3]


@every_plan
def test_dynamic_sampling_leaves_out_the_groups_that_its_setting_says(plan):
    class OneRowAllRight(plan):
        def postprocess_generator_output(self, groups):
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.segments[-1].reward = (
                        1.0 if group.prompt.id.row == 3 else trajectory.reward
                    )
            return groups

    run = make_run(
        OneRowAllRight, prompts=8, trainer__algorithm__dynamic_sampling__type="variance"
    ).train()
    assert run.trained == [i for i in stream(8) if i != PromptId(0, 3)]


@every_plan
def test_groups_can_be_filtered_by_a_metric_of_their_environment(plan):
    class RowThreeScoresAlike(plan):
        def postprocess_generator_output(self, groups):
            for group in groups:
                for number, trajectory in enumerate(group.trajectories):
                    trajectory.metrics = {
                        "score": 1.0 if group.prompt.id.row == 3 else float(number)
                    }
                    trajectory.segments[-1].reward = float(number)
            return groups

    asked = {"type": "variance", "metric": "score"}
    settings = {
        f"trainer__algorithm__dynamic_sampling__{name}": value for name, value in asked.items()
    }
    run = make_run(RowThreeScoresAlike, prompts=8, **settings).train()
    assert run.trained == [i for i in stream(8) if i != PromptId(0, 3)]


@every_plan
def test_the_kl_penalty_in_the_reward_has_what_it_needs(plan):
    run = make_run(plan, prompts=8, trainer__algorithm__use_kl_in_reward=True).train()
    assert run.tracker.of("reward/kl") == {1: 0.0, 2: 0.0}
    assert all(batch.reference_logprobs is not None for batch in run.dispatch.batches)


def test_groups_that_a_plan_trains_again_count_in_the_staleness():
    class Replays(RayPPOTrainer):
        async def train(self):
            before = None
            for prompts in self.remaining_prompts():
                rollout = await self.generate(prompts)
                if before is not None:
                    await self.learn_from(before.groups)
                status = await self.train_on(rollout)
                await self.sync_policy_weights_to_inference_engines()
                await self.end_step(status)
                before = rollout

    run = make_run(Replays, prompts=12).train()
    assert run.tracker.of("staleness/max") == {1: 0, 2: 1, 3: 1}
    assert run.tracker.of("staleness/mean") == {1: 0.0, 2: 0.5, 3: 0.5}
