"""Environment variables of other frameworks, which have no effect here."""

import pytest

from skyasync.config import load_config
from skyasync.errors import UserError
from skyasync.run.experiment import BasePPOExp


def test_openrlhfs_variables_are_answered_with_our_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENRLHF_ASYNC_NUM_TASKS", "64")
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "2")
    with pytest.raises(UserError, match="does not exist"):
        BasePPOExp(load_config(["generator.agent_func_path=/none/agent.py"])).prepare()
    assert capsys.readouterr().err.splitlines() == [
        "warning: OPENRLHF_ASYNC_NUM_TASKS=64 is read only by OpenRLHF: set generator.max_concurrent_episodes",
        "warning: OPENRLHF_ASYNC_QUEUE_SIZE=2 is read only by OpenRLHF: set trainer.async_queue_size",
    ]
