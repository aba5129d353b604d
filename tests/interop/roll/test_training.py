"""Data and environments that were written for ROLL, and games of its examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.sokoban.boards import row as sokoban
from skyasync.envs import make
from skyasync.errors import UserError
from tests.interop.harness import ROWS, train

FILES = Path(__file__).parent / "files"
TAGGED = [
    {
        "id": str(number),
        "messages": json.dumps([{"role": "user", "content": row["prompt"]}]),
        "ground_truth": row["answer"],
        "tag": ("deepmath", "aime", "ifeval_one")[number % 3],
    }
    for number, row in enumerate(ROWS)
]


def test_messages_as_json_and_tags_of_domains() -> None:
    run = train(
        "data.prompt_key=messages", "data.domain_key=tag", "data.label_key=ground_truth",
        f"environment.domains.math_rule={{reward_funcs: ['{FILES}/judges.py:math_rule'], tags: [deepmath, aime]}}",
        f"environment.domains.ifeval={{reward_funcs: ['{FILES}/judges.py:ifeval'], tags: [ifeval_one]}}",
        "trainer.train_batch_size=8", rows=TAGGED,
    )  # fmt: skip
    assert run.learned
    assert all(text.startswith("<user>") and "role" not in text for text in run.texts)
    assert run.metrics["env/ifeval/ifeval"] >= 2.0
    assert 0.0 <= run.metrics["env/math_rule/math_rule"] <= 1.0


def test_a_tag_of_two_domains_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"environment\.domains: the tag aime is listed by math_rule and ifeval"
    ):
        train(
            "data.domain_key=tag", "environment.domains.math_rule={reward_funcs: exact_match, tags: [aime]}",
            "environment.domains.ifeval={reward_funcs: exact_match, tags: [aime, other]}", rows=TAGGED,
        )  # fmt: skip


def test_an_environment_in_gems_form() -> None:
    rows = [
        {"prompt": "Play.", "seed": number, "highest": 5, "format_penalty": -0.1}
        for number in range(8)
    ]
    run = train(f"environment.env_class={FILES}/guess_env.py:GuessEnv", rows=rows)
    assert run.learned
    assert run.metrics["env/steps"] >= 1.0 and 0.0 <= run.metrics["env/action_is_valid"] <= 1.0
    assert all("Play.\nA number from 1 to 5.\nGuess." in text for text in run.texts)
    assert any("Not 1. (1)" in text for text in run.texts)


def test_a_gymnasium_environment_that_is_not_registered() -> None:
    rows = [{"prompt": "", "seed": number, "length": 4} for number in range(8)]
    run = train(
        f"environment.env_class={FILES}/corridor_env.py:Corridor",
        "generator.max_turns=4",
        rows=rows,
    )
    assert run.learned
    assert all("x" in text and "..." in text for text in run.texts)


def test_a_registered_gymnasium_game_as_it_is() -> None:
    rows = [
        {"prompt": "", "gym_id": "FrozenLake-v1", "seed": number, "max_steps": 3}
        for number in range(8)
    ]
    run = train("environment.env_class=gymnasium", rows=rows)
    assert run.metrics["env/steps"] == 3.0


def test_sokoban_is_a_function_of_its_seed_and_plays() -> None:
    pytest.importorskip("textarena")
    first, second = (make("textarena", extras=sokoban(7)) for _ in range(2))
    board = first.init([])[0][-1]["content"]
    assert board == second.init([])[0][-1]["content"] and "P" in board
    assert board != make("textarena", extras=sokoban(8)).init([])[0][-1]["content"]
    run = train(
        "generator.max_turns=2", "generator.max_model_len=2048", "trainer.max_prompt_length=1800",
        "trainer.train_batch_size=1", rows=[sokoban(number) for number in range(2)], length=2048,
    )  # fmt: skip
    assert run.metrics["env/steps"] >= 1.0
