"""Unchanged agents and reward functions that were written for AReaL."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync.errors import UserError
from tests.interop.harness import ROWS, train

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"


def agent(reference: str, *overrides: str):
    return train(f"generator.agent_program={FILES}/{reference}", *overrides)


def test_an_agent_that_calls_once() -> None:
    run = agent(
        "agent_math.py:MathAgent", "environment.env_config={temperature: 1.0, max_turns: 3}"
    )
    assert run.learned
    assert run.metrics["env/agent_calls"] == 1.0


def test_rewards_by_call_are_discounted_by_turn() -> None:
    run = agent(
        "agent_turns.py:TurnsAgent",
        "environment.env_config={max_turns: 3}",
        "generator.turn_discount=0.5",
    )
    assert run.metrics["env/agent_calls"] == 3.0
    assert run.metrics["env/agent_sequences"] == 1.0
    assert run.metrics["reward/mean"] == 1.0 + 2.0 * 0.5 + 3.0 * 0.25
    for batch in run.batches:
        assert sorted(batch.rewards[batch.rewards != 0].unique().tolist()) == [0.75, 1.0]


def test_without_a_discount_rewards_add_up() -> None:
    run = agent("agent_turns.py:TurnsAgent", "environment.env_config={max_turns: 2}")
    assert run.metrics["reward/mean"] == 3.0


def test_a_class_without_async_and_calls_without_a_reward() -> None:
    run = agent("agent_first_draft.py:Drafts")
    assert run.metrics["env/agent_sequences"] == 2.0
    assert run.learned


@pytest.mark.parametrize(
    "reference", ["reward.py:parity_reward_fn", "reward_multi.py:length_reward"]
)
def test_a_reward_function(reference: str) -> None:
    rows = [{**row, "source": "book"} for row in ROWS]
    run = train(f"environment.reward_funcs=[{FILES}/{reference}]", rows=rows)
    assert run.learned
    assert run.metrics["reward/mean"] >= (1.0 if "multi" in reference else 0.0)


def test_a_reward_for_no_answer_of_the_episode_is_told(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "import aiohttp\n"
        "class Agent:\n"
        "    async def run(self, data, base_url, api_key, **extra):\n"
        "        async with aiohttp.ClientSession(headers={'Authorization': f'Bearer {api_key}'}) as http:\n"
        "            async with http.post(f'{base_url}/chat/completions', json={'messages': data['messages']}) as r:\n"
        "                await r.json()\n"
        "        return {'chatcmpl-unknown': 1.0}\n"
    )
    with pytest.raises(
        Exception, match="a reward for chatcmpl-unknown, which is the id of none of its 1 answers"
    ):
        train(f"generator.agent_program={tmp_path}/wrong.py:Agent")


def test_a_class_without_run_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("class Agent:\n    pass\n")
    with pytest.raises(UserError, match="must be a function"):
        train(f"generator.agent_program={tmp_path}/none.py:Agent")
