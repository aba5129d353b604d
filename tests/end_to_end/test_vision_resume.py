"""Runs with images: one resumes from a checkpoint, one has a critic."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyasync import BasePPOExp
from skyasync.examples.vision.discs import ENV_CLASS
from skyasync.examples.vision.model import build
from skyasync.models.images import ImageTokens
from skyasync.rollout import partial_rollouts as saved
from skyasync.rollout.types import Prompt, images_in
from skyasync.weight_sync.sync import Destination, Source, WeightSync
from tests.end_to_end.runs import Train, Trained, read_lines, train_in

pytestmark = pytest.mark.slow

SETTINGS = (
    "data.train_data=tests.end_to_end.parts:disc_prompts", f"environment.env_class={ENV_CLASS}",
    "trainer.max_training_steps=4",
    "trainer.ckpt_interval=2", "trainer.max_prompt_length=32", "generator.sampling_params.max_generate_length=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def train_vision(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Train:
    return train_in(tmp_path_factory.mktemp("vision"), build())


def resumed(train: Train, run: Trained, *settings: str) -> Trained:
    """A separate run that resumes from step 2 of a run."""
    checkpoint = run.folder / "checkpoints" / "step_000002"
    return train(
        *SETTINGS,
        *settings,
        f"trainer.resume_mode={checkpoint}",
        f"trainer.run_name={run.folder.name}_again",
    )


@pytest.mark.matrix
def test_sync_goes_on_bit_for_bit(train_vision: Train) -> None:
    run = train_vision(*SETTINGS, "trainer.run_name=sync")
    again = resumed(train_vision, run)
    assert any(run.series("reward/mean"))
    for name in (
        "step",
        "policy/loss",
        "policy/grad_norm",
        "policy/tokens",
        "reward/mean",
        "sync/logprob_gap",
    ):
        assert again.series(name) == run.series(name)[2:]
    before, after = trained_state(run), trained_state(again)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


def trained_state(run: Trained) -> dict[str, Tensor]:
    """Weights and optimizer state after the last step."""
    folder = run.folder / "checkpoints" / "step_000004" / "policy"
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.matrix
def test_one_step_off_on_two_ranks_goes_on_with_the_right_prompts_and_fresh_samples(
    train_vision: Train,
) -> None:
    two_ranks = "trainer.placement.policy_num_gpus_per_node=2"
    plan = ("trainer.plan=one_step_off", "trainer.ckpt_rollouts=false", two_ranks)
    run = train_vision(*SETTINGS, *plan, "trainer.run_name=one_step_off")
    again = resumed(train_vision, run, *plan)
    assert again.prompts == run.prompts[2:]
    assert again.versions == [
        (3, {2}),
        (4, {2}),
    ]  # the first step after a start is on fresh samples
    assert all(gap < 1e-5 for gap in again.series("sync/logprob_gap"))


@pytest.mark.matrix
def test_fully_async_trains_the_finished_groups_of_the_checkpoint_as_they_are(
    train_vision: Train,
) -> None:
    plan = ("trainer.plan=fully_async", "trainer.max_staleness=2")
    run = train_vision(*SETTINGS, *plan, "trainer.run_name=fully_async")
    file = run.folder / "checkpoints" / "step_000002" / saved.FILE
    state = saved.read(file, lambda identity: Prompt(identity, [], ""))
    kept = {str(t.id): t for group in state.groups for t in group.trajectories}
    images = {image for trajectory in kept.values() for image in images_in(trajectory.segments)}
    assert images
    assert all(file.read_bytes().count(image.data) == 1 for image in images)
    assert all(len(images_in(trajectory.segments)) == 1 for trajectory in kept.values())
    again = resumed(train_vision, run, *plan)
    rows = {row["prompt_id"]: row for row in read_lines(again.folder / "samples.jsonl")}
    assert len(rows) == 16  # of two steps, the first sample of each prompt
    assert any(row["prompt"] == "<image>How many discs?" for row in rows.values())
    both = kept.keys() & rows.keys()
    assert both
    for name in both:
        (action,) = kept[name].actions
        assert rows[name]["tokens"]["versions"] == action.versions.tolist()
        assert rows[name]["tokens"]["logprobs"] == pytest.approx(
            action.logprobs.tolist(), abs=1e-4
        )  # as written


@pytest.mark.matrix
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_sees_the_images_of_the_policys_samples(
    train_vision: Train, backbone: str
) -> None:
    ppo = (
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.backbone={backbone}",
        "trainer.eval_interval=0",
    )

    class ShownImages(BasePPOExp):  # perhaps in another process
        def get_weight_sync(
            self,
            dispatch: Source,
            inference_engine_client: Destination,
            probe: Sequence[Sequence[int]],
        ) -> WeightSync:
            assert probe and all(len(ImageTokens.images_of(tokens)) == 1 for tokens in probe)
            return super().get_weight_sync(dispatch, inference_engine_client, probe)

    name = f"trainer.run_name=critic_{backbone}"
    run = train_vision(
        *SETTINGS, *ppo, name, "trainer.max_training_steps=2", experiment=ShownImages
    )
    losses = run.series("critic/loss")
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert all(gap < 1e-5 for gap in run.series("sync/logprob_gap"))
