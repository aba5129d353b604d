"""Tools: their descriptions for the model, which calls are parsed, and their answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.envs import BaseTextEnv, ToolError, make, tool
from skyasync.envs.tools import MOST_LEVELS, read_tool_calls, schemas
from skyasync.errors import UserError


class Shop(BaseTextEnv):
    @tool
    def price(self, item: str, count: int = 1) -> str:
        """What so many of an item cost.

        Args:
            item: its name
            count: how many
        """
        if item != "apple":
            raise ToolError(f"no {item} here")
        return str(3 * count)

    @tool
    def leave(self) -> str:
        """Leave the shop."""
        raise ZeroDivisionError("the door is broken")

    def step(self, action):
        text, said = self.call_tools(action)
        return {"observations": said, "reward": 0.0, "done": not said, "metadata": {"text": text}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answers(action):
    return [
        message["content"]
        for message in make("tests.envs.test_tools:Shop").step(action)["observations"]
    ]


def test_the_model_is_told_what_the_methods_say_of_themselves():
    leave, price = schemas(Shop)
    assert leave["function"] == {
        "name": "leave",
        "description": "Leave the shop.",
        "parameters": {"type": "object", "properties": {}},
        "return": {"type": "string"},
    }
    assert price["type"] == "function"
    assert price["function"]["name"] == "price"
    assert price["function"]["description"] == "What so many of an item cost."
    assert price["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "its name"},
            "count": {"type": "integer", "description": "how many"},
        },
        "required": ["item"],
    }


def test_an_environment_without_tools_has_none():
    assert schemas(BaseTextEnv) == []


def test_a_tool_that_does_not_explain_itself_is_refused_by_name():
    class Silent(BaseTextEnv):
        @tool
        def hum(self, tune: str) -> str:
            return tune

    with pytest.raises(UserError, match=r"tool Silent\.hum: .*docstring"):
        schemas(Silent)


def test_calls_are_carried_out_in_order_and_answered_by_messages_of_the_tool():
    env = make("tests.envs.test_tools:Shop")
    step = env.step(
        f"Let me see. {call('price', item='apple')}{call('price', item='apple', count=4)}"
    )
    assert step["observations"] == [
        {"role": "tool", "name": "price", "content": "3"},
        {"role": "tool", "name": "price", "content": "12"},
    ]
    assert step["metadata"]["text"] == "Let me see."


def test_what_the_model_does_wrong_it_is_told():
    assert answers(call("prize", item="apple")) == [
        "error: unknown tool 'prize': did you mean 'price'? allowed: leave, price"
    ]
    assert answers(call("price")) == ["error: price: missing a required argument: 'item'"]
    assert answers(call("price", item="apple", colour="red")) == [
        "error: price: got an unexpected keyword argument 'colour'"
    ]
    assert answers(call("price", item="pear")) == ["error: no pear here"]


def test_methods_that_are_no_tools_cannot_be_called():
    assert answers(call("close"))[0].startswith("error: unknown tool 'close'")
    assert answers(call("__init__"))[0].startswith("error: unknown tool '__init__'")


def test_looking_for_tools_runs_none_of_an_environments_properties():
    class Unready(Shop):
        @property
        def shelf(self):
            raise AssertionError("a property was read")

    (message,) = Unready().call_tools(call("price", item="apple"))[1]
    assert message["content"] == "3"


def test_a_tool_that_would_have_to_be_awaited_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"ask is async def: a tool must be a plain method"):

        @tool
        async def ask(self) -> str:
            """Ask somebody."""
            return ""


def test_what_a_tool_raises_is_an_error_of_the_environment():
    with pytest.raises(ZeroDivisionError, match="the door is broken"):
        answers(call("leave"))


DEEP = '{"name": "price", "arguments": {"item": ' + "[" * MOST_LEVELS + "]" * MOST_LEVELS + "}}"
NOT_SENT = [
    '{"name": "price", "arguments": {"item": "\\ud83d"}}',
    '{"name": "pri\\ud83dce", "arguments": {}}',
    '{"name": "price", "arguments": {"item": NaN}}',
    DEEP,
]


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", '{"name": 3}', '{"name": "price", "arguments": 3}', "[" * 100_000, *NOT_SENT],
)
def test_a_call_that_is_not_well_formed_leaves_the_text_as_it_is(broken):
    text = f"So: <tool_call>{broken}</tool_call>"
    assert read_tool_calls(text) == (text, [])
    assert answers(text) == []


WORDS = st.sampled_from(["", "a", "price", "two words", '"quoted"', "{}", "é\n", "</tool"])
CALLS = st.lists(
    st.tuples(WORDS, st.dictionaries(WORDS, st.none() | st.integers() | WORDS, max_size=3)),
    max_size=3,
)


@given(text=WORDS, calls=CALLS)
def test_every_well_formed_call_is_read(text, calls):
    written = "".join(
        f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls
    )
    said, found = read_tool_calls(text + written)
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert said == (text.rstrip() if calls else text)
