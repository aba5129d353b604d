"""Gymnasium's text games: seeded, rendered as text, played by words."""

import pytest

from skyasync.envs.adapters.gymnasium import GymnasiumEnv, board_view, near_view
from skyasync.errors import UserError

pytest.importorskip("gymnasium")

LAKE = {"gym_id": "FrozenLake-v1", "gym_args": {"map_size": 4, "is_slippery": False}, "seed": 3}
ROWS = ["SFFF", "FHFH", "FFFH", "HFFG"]


def lake(**settings):
    env = GymnasiumEnv({}, {**LAKE, "gym_args": dict(LAKE["gym_args"]), **settings})
    return env, env.init([{"role": "user", "content": "Find the goal."}])[0][0]["content"]


def test_the_row_decides_the_game():
    assert lake()[1] == lake()[1]
    assert lake(seed=4)[1] != lake()[1]
    slips = [
        [lake(gym_args={"is_slippery": True})[0].step("right")["observations"] for _ in range(3)]
        for _ in "ab"
    ]
    assert slips[0] == slips[1]


def test_the_prompt_shows_the_board_below_the_rows_own_words():
    first, *board = lake()[1].split("\n")
    assert first == "Find the goal."
    assert len(board) == 4 and board[0][0] == "P" and board[3][3] == "G"


def test_views():
    assert board_view(ROWS, (1, 0)) == "SFFF\nPHFH\nFFFH\nHFFG"
    assert near_view(ROWS, (1, 0)) == "row 1 column 0\nleft edge\ndown frozen\nright hole\nup start"


@pytest.mark.parametrize(
    ("text", "action"),
    [("right", 2), ("I go DOWN.", 1), ("not left but up", 3), ("upwards", None), ("", None)],
)
def test_the_last_action_that_is_named_counts(text, action):
    assert lake()[0].parse(text) == action


def test_an_answer_without_an_action_costs_a_turn_and_is_counted():
    env, _ = lake(max_steps=2, invalid_reward=-0.5)
    step = env.step("hm")
    assert step["reward"] == -0.5 and not step["done"]
    assert "left, down, right, up" in step["observations"][0]["content"]
    assert env.step("hm")["done"]
    assert env.get_metrics() == {"success": 0.0, "steps": 2.0, "unparsable": 1.0}


def test_reaching_the_goal_is_rewarded_once_and_ends_the_episode():
    env = GymnasiumEnv(
        {}, {"gym_id": "FrozenLake-v1", "gym_args": {"desc": ["SG"], "is_slippery": False}}
    )
    env.init([])
    step = env.step("right")
    assert (step["reward"], step["done"], env.get_metrics()["success"]) == (1.0, True, 1.0)


def test_any_game_with_discrete_actions_is_played():
    env = GymnasiumEnv({"gymnasium": {"gym_id": "Taxi-v4"}}, {})
    (message,), _ = env.init([])
    assert "+" in message["content"]
    assert env.step("north")["done"] is False


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "needs gym_id"),
        ({"gym_id": "FrozenLak-v1"}, "FrozenLak"),
        ({"gym_id": "Pendulum-v1"}, "only discrete actions"),
        ({"gym_id": "FrozenLake-v1", "view": "bord"}, "board"),
    ],
)
def test_what_cannot_be_played_is_told(settings, problem):
    with pytest.raises(UserError, match=problem):
        GymnasiumEnv({}, settings)
