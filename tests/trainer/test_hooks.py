"""Hooks that a user overrides."""

from types import SimpleNamespace

import pytest
import torch

from skyasync.errors import UserError
from skyasync.trainer.hooks import with_advantages


@pytest.mark.parametrize("returned", [None, [], object()])
def test_a_hook_that_returns_no_batch_is_one_line(returned):
    with pytest.raises(
        UserError, match=r"compute_advantages_and_returns must set batch\.advantages"
    ):
        with_advantages(returned)


def test_advantages_of_another_shape_are_an_error_and_not_broadcast():
    batch = SimpleNamespace(loss_mask=torch.ones(2, 3, dtype=torch.bool), advantages=torch.ones(2))
    with pytest.raises(
        UserError, match=r"give each token its advantage, \(2, 3\); .* has shape \(2,\)"
    ):
        with_advantages(batch)
