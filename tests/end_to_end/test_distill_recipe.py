"""On-policy distillation raises the held-out reward: the teacher was trained with rewards, the student gets none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import PARTS, read_lines, train_in

pytestmark = [pytest.mark.slow, pytest.mark.recipe]


@pytest.fixture(scope="module")
def teacher(
    ray_session: None, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The student's model after a few steps of GRPO."""
    folder = tmp_path_factory.mktemp("teacher")
    train_in(folder / "runs", models["tied"])(
        "trainer.max_training_steps=30", "trainer.policy.optimizer_config.lr=5e-3", "trainer.train_batch_size=16",
        "generator.n_samples_per_prompt=8", f"trainer.export_path={folder / 'model'}",
    )  # fmt: skip
    return str(folder / "model")


@pytest.mark.parametrize(
    ("plan", "top_k"), [("sync", 0), ("one_step_off", 0), ("sync", 8), ("one_step_off", 8)]
)
def test_a_few_steps_raise_the_held_out_score(
    plan: str, top_k: int, ray_session: None, models: dict[str, str], teacher: str, tmp_path: Path
) -> None:
    whole = [f"trainer.teacher.top_k={top_k}"] if top_k else []
    run = train_in(tmp_path / "runs", models["tied"])(
        *whole,
        f"trainer.plan={plan}", "trainer.algorithm.preset=distill", f"trainer.teacher.model.path={teacher}",
        "trainer.max_training_steps=25", "trainer.policy.optimizer_config.lr=3e-3", "trainer.train_batch_size=32",
        "trainer.eval_before_train=true", f"data.val_data={PARTS}:val_prompts",
    )  # fmt: skip
    before, *steps = read_lines(run.folder / "metrics.jsonl")
    assert before["eval/score"] < 0.2
    assert steps[-1]["eval/score"] > 0.6
    kl = run.series("policy/teacher_kl" if top_k else "teacher/kl")
    assert kl[-1] < 0.2 * kl[0]
