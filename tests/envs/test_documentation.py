"""The environments in docs/environments.md work as the page says."""

import json
import re
from pathlib import Path

import pytest

from skyasync.envs import ENVS, make, register

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


@pytest.fixture
def shown():
    """The objects that the page's Python defines."""
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, found)
    return found


@pytest.fixture
def named(shown):
    register("shown-guess", shown["Guess"])
    register("shown-shop", shown["Shop"])
    yield
    del ENVS["shown-guess"], ENVS["shown-shop"]


def test_the_guessing_game(named):
    env = make("shown-guess", extras={"answer": "7"})
    assert env.step(" 3 ")["observations"] == [{"role": "user", "content": "too low"}]
    assert env.step("a seven")["observations"] == [{"role": "user", "content": "too low"}]
    assert env.step("9")["observations"] == [{"role": "user", "content": "too high"}]
    end = env.step("7")
    assert (end["observations"], end["reward"], end["done"]) == ([], 1.0, True)
    assert env.get_metrics() == {"guesses": 4.0}


def test_the_shop_with_its_tool(named):
    env = make("shown-shop", extras={"prices": {"pear": 4}, "answer": "4"})

    def answers(item):
        call = json.dumps({"name": "price", "arguments": {"item": item}})
        (message,) = env.step(f"<tool_call>{call}</tool_call>")["observations"]
        return message["content"]

    assert answers("pear") == "4"
    assert answers("plum") == "error: there is no plum"
    assert answers(["pear"]) == "error: there is no ['pear']"
    assert env.step("4")["reward"] == 1.0


def test_every_adapter_of_the_page_exists():
    table = PAGE[PAGE.index("## Adapters") :]
    first = "".join(re.findall(r"^\| (.*?)(?:, or| \|)", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)(?::URL)?`", first)) == set(ENVS.names())
