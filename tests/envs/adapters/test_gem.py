"""Environments with gem's and gymnasium's interface, played by hand."""

import sys
from types import SimpleNamespace

import pytest

from skyasync.envs import make, register
from skyasync.envs.base import InvalidEnvOutputError
from skyasync.errors import MissingExtraError, UserError


class Count:
    def __init__(self, start=0):
        self.value = start

    def reset(self, seed=None):
        return f"at {self.value + seed}", {"env_instruction": "count"}

    def step(self, action):
        self.value += len(action)
        info = {
            "metrics": {"length": len(action), "why": "text"},
            "metrics_agg_mode": {"length": "max"},
        }
        return f"at {self.value}", 0.5, self.value > 9, False, info


def test_the_row_makes_seeds_and_limits_the_episode():
    register("count", Count)
    env = make("count", env_config={"start": 1}, extras={"start": 2, "seed": 3, "max_steps": 2})
    assert env.init([{"role": "user", "content": "Play."}])[0] == [
        {"role": "user", "content": "Play.\ncount\nat 5"}
    ]
    first, second = env.step("ab"), env.step("a")
    assert (first["observations"], first["done"]) == ([{"role": "user", "content": "at 4"}], False)
    assert (second["observations"], second["reward"], second["done"]) == ([], 0.5, True)
    assert env.get_metrics() == {"length": 2.0, "steps": 2.0}


def test_what_a_class_is_registered_with_comes_before_the_row():
    register(id="count", entry_point=Count, kwargs={"start": 7})
    assert make("count", extras={"start": 2}).init([])[0][0]["content"] == "count\nat 7"


def test_a_step_of_another_form_is_told():
    class Wrong(Count):
        def step(self, action):
            return 1.0

    register("wrong", Wrong)
    env = make("wrong")
    env.init([])
    with pytest.raises(
        InvalidEnvOutputError,
        match=r"step must return \(observation, reward, terminated, truncated, info\)",
    ):
        env.step("a")


def test_a_discrete_action_is_the_last_number_that_is_one():
    class Lake(Count):
        action_space = SimpleNamespace(n=4)

        def step(self, action):
            return str(action), 0.0, False, False, {}

    register("lake", Lake)
    env = make("lake")
    env.init([])
    texts = ["1, or 2 of 9", "left", "2" + "0" * 5000, "3 steps of " + "1" * 4301]
    assert [env.step(text)["observations"][0]["content"] for text in texts] == ["2", "0", "0", "3"]


def test_the_adapter_by_name_says_what_it_needs():
    with pytest.raises(UserError, match="gem needs gem_env"):
        make("gem")
    assert (
        make("gem", extras={"gem_env": f"{__file__}:Count"}).init([])[0][0]["content"]
        == "count\nat 0"
    )
    with pytest.raises((MissingExtraError, UserError)):
        make("gem", extras={"gem_env": "game:GuessTheNumber-v0"})


@pytest.mark.parametrize(
    "name", ["game:GuessTheNumber-v0-easy", "rg:chain_sum", "eval:MATH500", "own"]
)
def test_an_id_of_gem_is_made_by_gem(monkeypatch, name):
    made = []
    monkeypatch.setitem(
        sys.modules, "gem", SimpleNamespace(make=lambda env_id: made.append(env_id) or Count(4))
    )
    assert make("gem", extras={"gem_env": name}).init([])[0][0]["content"] == "count\nat 4"
    assert made == [name]


def test_register_takes_both_spellings_and_needs_a_class():
    with pytest.raises(UserError, match="register takes a name and a class"):
        register(id="nothing")
