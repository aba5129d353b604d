"""A batch by SkyRL's names: reads return SkyRL's layout, writes arrive in ours."""

import pytest
import torch

from skyasync.interop.skyrl import TrainingInputBatch
from skyasync.models.batch import ScoredBatch


@pytest.fixture
def view():
    """Two rows: a prompt of two tokens and a response of three, and the other way round."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)
    batch = ScoredBatch(
        tokens=torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]),
        attention_mask=torch.ones(2, 5, dtype=torch.bool),
        loss_mask=mask,
        group_ids=torch.tensor([0, 1]),
        behaviour_logprobs=-torch.arange(10.0).view(2, 5),
        versions=torch.zeros(2, 5, dtype=torch.int32),
        truncated=torch.zeros(2, dtype=torch.bool),
        rewards=torch.tensor([[0, 0, 0, 0, 1.0], [0, 0, 0, 0, 2.0]]),
    )
    return TrainingInputBatch(batch, torch.tensor([2, 3]), ["a", "b"])


def test_responses_begin_on_the_left_and_prompts_end_where_they_begin(view):
    assert view["sequences"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 0]]
    assert view["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    assert view["response_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert view["rewards"].tolist() == [[0, 0, 1], [0, 2, 0]]
    assert view["rollout_logprobs"].tolist() == [[-2, -3, -4], [-8, -9, 0]]
    assert view["values"] is None and view.get("pixels", 3) == 3
    assert view.metadata["uids"] == ["a", "b"] and view.metadata["response_length"] == 3


def test_what_is_set_stands_in_our_batch(view):
    view["rewards"] = view["rewards"] * 2
    assert view.batch.rewards.tolist() == [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4]]
    view["loss_mask"] = torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    assert view.batch.loss_mask.tolist() == [[False, False, True, False, False], [False] * 5]
    view["advantages"] = view["response_mask"] * 3.0
    assert view.as_training().advantages.tolist() == [[0, 0, 3, 3, 3], [0, 0, 0, 3, 3]]
    view["mine"] = "kept"
    assert view["mine"] == "kept" and "mine" in view


def test_what_is_popped_is_gone_from_sight_alone(view):
    assert view.pop("rewards").tolist() == [[0, 0, 1], [0, 2, 0]]
    assert "rewards" not in view and view.batch.rewards.sum() == 3
    with pytest.raises(KeyError):
        view["rewards"]
    assert view.pop("rewards", None) is None


def test_what_cannot_be_set_is_told(view):
    with pytest.raises(ValueError, match=r"advantages must be \[2, 3\], as it is read; found \[2, 5\]"):
        view["advantages"] = torch.zeros(2, 5)
    with pytest.raises(KeyError, match="says what was sampled"):
        view["sequences"] = torch.zeros(2, 6)
    with pytest.raises(KeyError, match="has set no data"):
        view.as_training()
