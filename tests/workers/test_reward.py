"""A reward model's rewards equal transformers', whatever shares a row or a rank with a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.batch import TokenBatch
from skyasync.workers.frozen import RewardWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import SMALL

SHAPES = {
    "llama": LlamaConfig(**SMALL, num_labels=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=8, num_labels=1),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    classifier = AutoModelForSequenceClassification.from_config(SHAPES[request.param])
    classifier.score.weight.data.normal_()
    classifier.save_pretrained(folder)
    return str(folder)


def reward_config(path: str) -> Config:
    cfg = config_for("unused")
    cfg.trainer.reward.model.path = path
    return cfg


def expected(path: str, batch: TokenBatch) -> torch.Tensor:
    """Row by row, without padding."""
    library = AutoModelForSequenceClassification.from_pretrained(path)
    rows = [
        tokens[mask][None] for tokens, mask in zip(batch.tokens, batch.attention_mask, strict=True)
    ]
    with torch.no_grad():
        return torch.cat([library(row).logits[0] for row in rows])


def test_scores_are_those_of_the_librarys_classifier(model: str) -> None:
    worker, batch = RewardWorker(reward_config(model), threads=1), make_batch(groups=4)
    worker.setup()
    found = worker.scores(batch)
    torch.testing.assert_close(found, expected(model, batch), atol=1e-5, rtol=1e-5)
    assert float(found.std()) > 0.1
    worker.cfg.trainer.micro_forward_batch_size_per_gpu = 1
    torch.testing.assert_close(worker.scores(batch), found, atol=1e-5, rtol=1e-5)
    assert worker.scores(batch.select(torch.zeros(0, dtype=torch.int64)).trim()).shape == (0,)


def scores_of_rank(rank: Rank) -> list[float]:
    batch = make_batch(groups=4)
    found: list[float] = rank.worker.scores(
        batch.select(split_for_ranks(batch, 2)[rank.rank]).trim()
    ).tolist()
    return found


def test_two_ranks_say_what_one_does(model: str, ranks: Callable[[int], Ranks]) -> None:
    ranks(2).set_up(RewardWorker, reward_config(model))
    batch = make_batch(groups=4)
    found = torch.tensor([score for rank in ranks(2).call(scores_of_rank) for score in rank])
    order = torch.cat(split_for_ranks(batch, 2))
    torch.testing.assert_close(found, expected(model, batch)[order], atol=1e-5, rtol=1e-5)


def test_a_model_without_a_head_is_refused(untied_model: str) -> None:
    with pytest.raises(UserError, match=r"its files hold no head \(score\.weight\)"):
        RewardWorker(reward_config(untied_model), threads=1).setup()
