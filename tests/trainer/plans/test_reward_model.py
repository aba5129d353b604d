"""A reward model in addition to the environments' rewards, with real models in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from skyasync.config.schema import Config, RewardConfig
from skyasync.config.schema.models import RewardModel, reward_models
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


@pytest.fixture(scope="module")
def judge(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(model, num_labels=1)
    )
    classifier.score.weight.data.normal_()
    folder = tmp_path_factory.mktemp("judge")
    classifier.save_pretrained(folder)
    return str(folder)


def configuration(model: str, judge: str, **reward: Any) -> Config:
    cfg = config(model, steps=2)
    vars(cfg.trainer.reward).update(reward)
    cfg.trainer.reward.model.path = judge
    return cfg


class Keeping(RayPPOTrainer):
    """Keeps the groups that it trains; works with any plan."""

    async def prepare(self, groups: list[Group]) -> Any:
        self.kept = [*getattr(self, "kept", []), *groups]
        return await super().prepare(groups)


@pytest.mark.parametrize("plan", PLANS)
async def test_each_episode_is_scored_once_and_its_score_is_part_of_its_reward(
    model: str, judge: str, plan: type[RayPPOTrainer]
) -> None:
    run = LocalRun(
        type("Kept", (Keeping, plan), {}),
        configuration(model, judge, weight=0.5, mean=0.1, std=2.0, clip=0.4),
    )
    await run.train()
    library = AutoModelForSequenceClassification.from_pretrained(judge)
    library.config.pad_token_id = (
        None  # it is the end of a response here, whose state is what counts
    )
    trajectories = [t for group in run.trainer.kept for t in group.trajectories]
    assert len(trajectories) == 2 * 4 * 4
    for trajectory in trajectories:
        with torch.no_grad():
            score = library(torch.tensor([trajectory.tokens.tolist()])).logits.item()
        assert trajectory.metrics["reward_model"] == pytest.approx(score, abs=1e-4)
        text = bytes(t for t in trajectory.actions[0].tokens.tolist() if t < 256).decode(
            errors="replace"
        )
        own = trajectory.reward - 0.5 * min(max((score - 0.1) / 2.0, -0.4), 0.4)
        assert own * 10 == pytest.approx(round(own * 10), abs=1e-3), (
            f"environment rewards are tenths: {text!r}"
        )
    for step in (1, 2):
        assert run.tracker.rows[step]["env/reward_model"] == pytest.approx(
            run.tracker.rows[step]["env/reward_model"]
        )
    assert "eval/env_reward_model" in run.tracker.rows[2]


def test_scores_are_scaled_clipped_and_weighed() -> None:
    one = RewardModel("a/b", weight=2.0, mean=1.0, std=0.5, clip=3.0)
    assert [one.part(score) for score in (1.0, 1.5, -9.0, 9.0)] == [0.0, 2.0, -6.0, 6.0]
    reward = RewardConfig(models={"other": {"path": "c/d", "weight": 3}})
    assert reward_models(reward) == {"reward_model/other": RewardModel("c/d", weight=3)}
    reward.model.path, reward.std = "a/b", 2.0
    assert list(reward_models(reward)) == ["reward_model", "reward_model/other"]
    assert reward_models(reward)["reward_model"].part(7.0) == 3.5


async def test_several_models_are_added_up_and_each_is_a_metric(
    model: str, judge: str, tmp_path: Path
) -> None:
    """The same model twice, once with a negated head."""
    other = AutoModelForSequenceClassification.from_pretrained(judge)
    other.score.weight.data.mul_(-2.0)
    other.save_pretrained(tmp_path / "other")
    models = {
        "turned": {"path": str(tmp_path / "other"), "weight": 0.25},
        "same": {"path": judge, "weight": 2.0},
    }
    run = LocalRun(
        type("Kept", (Keeping, RayPPOTrainer), {}),
        configuration(model, judge, weight=0.5, models=models),
    )
    await run.train()
    for trajectory in (t for group in run.trainer.kept for t in group.trajectories):
        first, turned, same = (
            trajectory.metrics[f"reward_model{name}"] for name in ("", "/turned", "/same")
        )
        assert same == first and turned == pytest.approx(-2 * first, abs=1e-4)
        own = trajectory.reward - (0.5 * first + 0.25 * turned + 2.0 * same)
        assert own * 10 == pytest.approx(round(own * 10), abs=1e-3), (
            "environment rewards are tenths"
        )
    assert "env/reward_model/turned" in run.tracker.rows[2]
