"""GSM8K with a tiny model: its rows, its reward and an additional shaped one, in every plan.

The rows are GSM8K's own if SKYASYNC_GSM8K names a folder with train.jsonl and test.jsonl, otherwise generated word
problems in the same format. No model of this size solves any: the share of digits must rise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean

import pytest

from examples.gsm8k.gsm8k_dataset import prepare
from skyasync import BasePPOExp, load_config
from tests.end_to_end.runs import Trained

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gsm8k")
    source = os.environ.get("SKYASYNC_GSM8K") or word_problems(folder / "source")
    return prepare(folder, Path(source))


def word_problems(folder: Path) -> Path:
    """A folder in GSM8K's format."""
    import reasoning_gym

    folder.mkdir()
    for name, seed in (("train", 1), ("test", 10_001)):
        found = reasoning_gym.create_dataset("gsm_symbolic", size=160, seed=seed)
        rows = [
            {"question": e["question"], "answer": f"It is {e['answer']}.\n#### {e['answer']}"}
            for e in found
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(files: dict[str, Path], model: str, folder: Path, *overrides: str) -> Trained:
    cfg = load_config([
        "--config", str(EXAMPLE / "tiny.yaml"), *overrides, f"data.train_data={files['train']}",
        f"trainer.policy.model.path={model}", "trainer.policy.optimizer_config.lr=5e-3",
        "generator.backend=transformers", "trainer.policy.threads=1", "generator.threads=1",
        f"trainer.runs_dir={folder}", "trainer.run_name=run", "trainer.terminal=lines",
    ])  # fmt: skip
    BasePPOExp(cfg).run()
    return Trained(folder / "run")


def check_learning(run: Trained) -> None:
    rewards, digits = run.series("reward/mean"), run.series("env/digits")
    assert sum(digits[-3:]) / 3 > sum(digits[:2]) / 2 + 0.2
    for row in run.metrics:
        assert row["reward/mean"] == pytest.approx(row["env/gsm8k"] + 0.2 * row["env/digits"])
        assert row["env/digits/is_number"] <= row["env/digits"]
    assert any(norm > 0 for norm in run.series("policy/grad_norm"))
    assert rewards[-1] > rewards[0]


@pytest.mark.parametrize(("plan", "staleness"), [("sync", 0), ("one_step_off", 1)])
def test_grpo_in_step_and_one_step_off(
    ray_session: None,
    files: dict[str, Path],
    models: dict[str, str],
    tmp_path: Path,
    plan: str,
    staleness: int,
) -> None:
    run = train(files, models["tied"], tmp_path, f"trainer.plan={plan}")
    assert run.series("staleness/max")[1:] == [staleness] * (len(run.metrics) - 1)
    check_learning(run)


def test_areal_s_decoupled_ppo_with_bounded_staleness(
    ray_session: None, files: dict[str, Path], models: dict[str, str], tmp_path: Path
) -> None:
    run = train(files, models["tied"], tmp_path, "--config", str(EXAMPLE / "areal.yaml"))
    assert 0 < mean(run.series("staleness/mean")) <= 2, (
        "the mean bound holds over the run, not for each batch"
    )
    check_learning(run)
