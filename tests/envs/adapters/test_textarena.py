"""TextArena's single-player games."""

import re

import pytest

from skyasync.envs.adapters.textarena import TextArenaEnv
from skyasync.errors import UserError

pytest.importorskip("textarena")


def game(seed=1, **settings):
    env = TextArenaEnv({}, {"textarena_id": "GuessTheNumber-v0", "seed": seed, **settings})
    return env, env.init([{"role": "user", "content": "Play."}])[0][0]["content"]


def bisect(env):
    """Guesses by bisection; the rewards and the last step."""
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        step = env.step(f"[{guess}]")
        if step["done"]:
            return guess, step
        said = step["observations"][0]["content"].lower()
        low, high = (
            (guess + 1, high)
            if "higher" in said.rpartition("]")[2] or "too low" in said
            else (low, guess - 1)
        )


def test_a_seeded_game_is_won_by_bisection_and_is_the_same_again():
    (env, rules), (again, _) = game(), game()
    assert rules.startswith("Play.\n") and re.search(r"\b20\b", rules)
    number, last = bisect(env)
    assert last["reward"] == 1.0
    assert bisect(again)[0] == number


def test_an_episode_ends_after_its_most_steps():
    env, _ = game(max_steps=1)
    assert env.step("[1]")["done"]


@pytest.mark.parametrize(
    ("settings", "problem"), [({}, "needs textarena_id"), ({"textarena_id": "No-v9"}, "No-v9")]
)
def test_what_cannot_be_played_is_told(settings, problem):
    with pytest.raises(UserError, match=problem):
        TextArenaEnv({}, settings)
