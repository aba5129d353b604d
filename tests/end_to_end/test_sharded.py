"""Sharded policies: two ranks and four, in float32 and bfloat16, in both plans, and in two pipeline stages.

All tests use one run: each resumes from the newest checkpoint of the test before, saves a checkpoint after each of its
own steps, and exports.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyasync import load_config
from skyasync.workers.policy import PolicyWorker
from tests.end_to_end.runs import Train, Trained, arguments

pytestmark = pytest.mark.slow

STAGES = [
    (2, "float32", "sync", 2),
    (4, "float32", "one_step_off", 1),
    (4, "bfloat16", "sync", 1),
    (2, "bfloat16", "one_step_off", 2),
    (4, "float32", "sync", 2),
]
STEPS = 2  # of a stage
GAP = {"float32": 1e-4, "bfloat16": 0.2}


@pytest.mark.matrix
def test_a_run_goes_on_with_other_ranks_another_dtype_and_another_plan(
    train: Train, sync_run: Trained, models: dict[str, str], tmp_path: Path
) -> None:
    for number, (ranks, dtype, plan, pipeline) in enumerate(STAGES, start=1):
        run = train(
            f"trainer.max_training_steps={number * STEPS}", f"trainer.plan={plan}", "trainer.resume_mode=latest",
            f"trainer.placement.policy_num_gpus_per_node={ranks}", f"trainer.policy.model.dtype={dtype}",
            "trainer.ckpt_interval=1", "trainer.ckpt_path=" + str(tmp_path / "saved"),
            f"trainer.export_path={tmp_path / 'export'}", f"trainer.parallel.pipeline={pipeline}",
        )  # fmt: skip
        assert run.series("step") == list(range(1, number * STEPS + 1))
        assert max(run.series("sync/logprob_gap")[-STEPS:]) <= GAP[dtype]
        saved = tmp_path / "saved" / f"step_{number * STEPS:06d}" / "policy"
        assert len(list(saved.glob("*.safetensors"))) == ranks
        check_export(tmp_path / "export", saved, models["tied"], getattr(torch, dtype))
    # Where a stage begins its samples are fresh: the plan makes no difference, nor do ranks.
    together = STEPS + 1
    assert run.prompts[:together] == sync_run.prompts[:together]
    for name in ("policy/loss", "policy/grad_norm", "reward/mean"):
        assert run.series(name)[:together] == pytest.approx(
            sync_run.series(name)[:together], abs=1e-5
        )


def check_export(export: Path, saved: Path, model: str, dtype: torch.dtype) -> None:
    """It has the weights of the newest checkpoint, which one rank can read."""
    worker = PolicyWorker(load_config(arguments(runs=export.parent, model=model)))
    worker.setup()
    worker.load(str(saved))
    exported = load_file(export / "model.safetensors")
    expected = {
        name: p.detach().to(dtype) for name, p in worker.backend.model.model.named_parameters()
    }
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
