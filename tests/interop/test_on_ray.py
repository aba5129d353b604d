"""Foreign code in a whole run: every process finds what a program registers or names."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync import BasePPOExp, load_config
from skyasync.envs import ENVS
from tests.end_to_end.runs import Trained
from tests.interop.harness import model
from tests.interop.skyrl.files import environment, printed

pytestmark = pytest.mark.slow
ENVS.pop(
    "measure", None
)  # which importing the file has registered: it exists for the tests that register it

FILES = Path(__file__).parent
ROWS = f"{FILES}/rows.py:rows"


def settings(folder: Path, *overrides: str, steps: int = 2) -> list[str]:
    return [
        f"trainer.policy.model.path={model()}", "trainer.policy.threads=1", "trainer.train_batch_size=2",
        f"trainer.max_training_steps={steps}", "trainer.eval_before_train=false", "trainer.eval_interval=0",
        "trainer.max_prompt_length=128", "generator.n_samples_per_prompt=2", "generator.threads=1",
        "generator.sampling_params.max_generate_length=8", "generator.eval_sampling_params.max_generate_length=8",
        "generator.backend=transformers", "generator.max_model_len=256", f"data.train_data=['{ROWS}']",
        "data.label_key=answer", f"trainer.runs_dir={folder}", "trainer.run_name=run", "trainer.terminal=lines",
        *overrides,
    ]  # fmt: skip


def run(folder: Path, experiment: type[BasePPOExp], *overrides: str, steps: int = 2) -> Trained:
    experiment(load_config(settings(folder, *overrides, steps=steps))).run()
    return Trained(folder / "run")


@pytest.mark.matrix
def test_skyrls_environment(ray_session: None, tmp_path: Path) -> None:
    environment.register(
        id="measure", entry_point=f"{environment.__file__}:Measure", kwargs={"bonus": 2.0}
    )
    trained = run(
        tmp_path, BasePPOExp, "environment.env_class=measure", "generator.max_turns=1",
        "environment.env_config={start: 10, reward: {scale: 0.5}}",
    )  # fmt: skip
    assert trained.series("env/calls") == [11.0, 11.0]


@pytest.mark.matrix
def test_the_tutorials_printed_classes_and_settings(ray_session: None, tmp_path: Path) -> None:
    placement = (
        "colocate_all=false",
        "colocate_policy_ref=true",
        "policy_num_gpus_per_node=1",
        "ref_num_gpus_per_node=1",
    )
    trained = run(
        tmp_path, printed.AsyncPPOExp, "trainer.epochs=1", *(f"trainer.placement.{key}" for key in placement),
        "generator.num_inference_engines=1", "generator.inference_engine_tensor_parallel_size=1",
        "trainer.algorithm.use_kl_loss=true", f"environment.reward_funcs=['{FILES}/odd_reward.py:odd']", steps=3,
    )  # fmt: skip
    assert trained.series("staleness/max") == [0.0, 1.0, 1.0]
    assert "policy/kl" in trained.metrics[-1] or "policy/kl_loss" in trained.metrics[-1]


@pytest.mark.matrix
def test_openrlhfs_agent_with_a_loop_of_its_own(ray_session: None, tmp_path: Path) -> None:
    trained = run(
        tmp_path,
        BasePPOExp,
        f"generator.agent_func_path={FILES}/openrlhf/files/agent_single_turn.py",
    )
    assert all(mean >= 10.0 for mean in trained.series("reward/mean"))
    assert max(trained.series("response/length_max")) <= 4.0
