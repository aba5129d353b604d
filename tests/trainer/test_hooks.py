"""Hooks that a user overrides."""

import pytest

from skyasync.errors import UserError
from skyasync.trainer.hooks import with_advantages


@pytest.mark.parametrize("returned", [None, [], object()])
def test_a_hook_that_returns_no_batch_is_one_line(returned):
    with pytest.raises(UserError, match=r"compute_advantages_and_returns must set batch\.advantages"):
        with_advantages(returned)
