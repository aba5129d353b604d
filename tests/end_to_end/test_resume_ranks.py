"""Two ranks that resume from a checkpoint in the middle of a run are bitwise identical to the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import Train

pytestmark = [pytest.mark.slow, pytest.mark.fault]

STEPS = 4
STOP = 2  # the end of an epoch


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed"])
def test_two_ranks_resume_bit_for_bit(plan: str, train: Train, tmp_path: Path) -> None:
    """Groups that were finished or in flight after step 2, a whole batch in ``one_step_off``, come from the checkpoint.

    ``streamed`` adds gradients in the order of the prompts, so that the sum does not depend on the engines' clocks.
    """
    settings = (
        f"trainer.plan={plan}", f"trainer.max_training_steps={STEPS}", "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.ckpt_interval=1", "trainer.ckpt_keep=0", "generator.sampling_params.seed=3",
        "generator.num_inference_engines=2", *(["trainer.stream_groups=1"] if plan == "streamed" else []),
    )  # fmt: skip
    whole = train(*settings, f"trainer.export_path={tmp_path / 'whole'}")
    middle = whole.folder / "checkpoints" / f"step_{STOP:06d}"
    rest = train(
        *settings,
        "trainer.run_name=rest",
        f"trainer.resume_mode={middle}",
        f"trainer.export_path={tmp_path / 'rest'}",
    )
    assert rest.folder != whole.folder
    assert rest.series("step") == list(range(STOP + 1, STEPS + 1))
    for name in ("policy/loss", "policy/grad_norm", "reward/mean", "staleness/max"):
        assert rest.series(name) == whole.series(name)[STOP:], name
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("rest", "whole"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
