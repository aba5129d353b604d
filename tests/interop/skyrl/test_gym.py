"""Environments that were written for SkyRL and are constructed by hand."""

from __future__ import annotations

from typing import Any

from skyasync.envs import ENVS
from skyasync.interop.skyrl import make
from skyasync.interop.skyrl.gym import SkyRLEnv, register


class OwnExtras(SkyRLEnv):
    """Which it computes itself."""

    def __init__(self, **given: Any) -> None:
        self.max_turns = 1

    @property
    def extras(self) -> dict[str, int]:
        return {"answer": 4}


def test_what_a_class_has_itself_is_not_replaced() -> None:
    register(id="own-extras", entry_point=f"{__file__}:OwnExtras")
    assert "own-extras" in ENVS
    env = make("own-extras", env_config={"scale": 2}, extras={"answer": 3})
    assert env.extras == {"answer": 4} and env.env_config == {"scale": 2}
