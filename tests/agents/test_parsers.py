"""Tool calls and reasoning of each model family are parsed; other output is text, and never an error."""

from __future__ import annotations

import json
import time
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from examples.agents.tasks import CALCULATOR
from skyasync.agents.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParsedReply,
    ReplyParser,
    check_parsers,
    reasoning_parser,
    tool_parser,
)
from skyasync.agents.recorder import AgentChat, RecordedCall, Recorder, conversation, thoughts
from skyasync.arrays import ints
from skyasync.envs.tools import MOST_LEVELS
from skyasync.errors import UserError
from skyasync.rollout.types import Segment
from tests.rollout.episodes import tokenizer

ADD, NOW = {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}, {"name": "now", "arguments": {}}
DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ONE = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
BOTH = json.dumps([ADD, NOW])
#: Both calls, as each family writes them.
WRITTEN = {
    "hermes": [f"<tool_call>\n{json.dumps(ADD)}\n</tool_call>\n<tool_call>{json.dumps(NOW)}</tool_call>"],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}; {"name": "now", "parameters": {}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}};{"name": "now"}',
    ],
    "mistral": [
        f"[TOOL_CALLS] {BOTH}",
        '[TOOL_CALLS]add{"a": 1, "b": [2, "x"]}[TOOL_CALLS]now{}',
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
    ],
    "deepseek_v3": [
        DEEP.format(
            ONE.format('function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": [2, "x"]}\n```')
            + "\n" + ONE.format("function<｜tool▁sep｜>now\n```json\n{}\n```")
        ),
        DEEP.format(ONE.format('add<｜tool▁sep｜>{"a": 1, "b": [2, "x"]}') + ONE.format("now<｜tool▁sep｜>{}")),
    ],
    "pythonic": ["[add(a=1, b=[2, 'x']), now()]", "<|python_start|>[add(a=1, b=[2, 'x']), now()]<|python_end|>"],
}  # fmt: skip
WRITTEN_CALLS = [(name, text) for name, texts in WRITTEN.items() for text in texts]
WHOLE = ("llama3_json", "pythonic")  # no text stands before their calls
PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", DEEP, ONE, "<｜tool▁sep｜>", "{", "}",
     "[", "]", '"name"', ":", "add", "(", ")", " ", "\n", ";", "<think>", "</think>", "x", "<", json.dumps(ADD), BOTH]
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), WRITTEN_CALLS)
def test_each_familys_calls_are_read(name: str, text: str) -> None:
    parser = tool_parser(name, tokenizer())
    assert parser.read(text, [CALCULATOR]) == ("", [ADD, NOW])
    front = "" if name in WHOLE and not text.startswith("<|python_tag") else "Let me see."
    assert parser.read(f"{front}\n{text}", [CALCULATOR]) == (front, [ADD, NOW])


@pytest.mark.parametrize(("name", "text"), WRITTEN_CALLS)
def test_a_call_that_is_cut_short_or_spoilt_is_text(name: str, text: str) -> None:
    parser = tool_parser(name, tokenizer())
    spoilt = [
        text[: len(text) // 3],
        text.replace("add", "").replace('"name"', '"nom"'),
        text.replace("1", "1 1"),
    ]
    for wrong in [*spoilt, text.replace("}", "") if "}" in text else text.replace(")", "")]:
        assert parser.read(wrong, [CALCULATOR]) == (wrong, [])


def read_reply(name: str, text: str) -> ParsedReply:
    reader = ReplyParser(tokenizer(), tool_parser(name, tokenizer()))
    tokens = ints(tokenizer()(text)["input_ids"])
    return reader.read(tokens, [], [CALCULATOR], framed=True, opened=False, done=True, several=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'),
        ("mistral", r'[TOOL_CALLS]add{"a": "\ud83d"}'),
        ("pythonic", r"[add(a='\ud83d')]"),
        (
            "llama3_json",
            '{"name": "add", "parameters": {"a": ' + "[" * MOST_LEVELS + "]" * MOST_LEVELS + "}}",
        ),
        ("mistral", '[TOOL_CALLS]add{"a": -Infinity}'),
    ],
)
def test_a_call_that_a_template_or_a_client_would_fail_at_is_text(name: str, text: str) -> None:
    assert tool_parser(name, tokenizer()).read(text, [CALCULATOR])[1] or name == "hermes"
    assert read_reply(name, text)[1:3] == (text, [])


def test_a_dictionarys_keys_are_text_as_json_has_them() -> None:
    [call] = read_reply("pythonic", "[add(a={1: 2, 'b': (3,)})]").functions
    assert call == {"name": "add", "arguments": {"a": {"1": 2, "b": [3]}}}


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS.names()}))
@given(pieces=st.lists(PIECES, max_size=12))
@example(pieces=["["] * 5000)
@example(pieces=["(" * 3000 + "]"])
def test_a_parser_raises_for_nothing_and_what_was_sure_stays(name: str, pieces: list[str]) -> None:
    parser = tool_parser(name, tokenizer())
    text = "".join(pieces)
    said, calls = parser.read(text, [CALCULATOR])
    json.dumps(calls)
    assert calls or said == text
    for end in range(0, len(text), max(1, len(text) // 40)):
        assert said.startswith(parser.sure(text[:end]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "</tool_call>" + "<tool_call>" * 30_000),
        ("deepseek_v3", DEEP[:18] + "<｜tool▁call▁begin｜><｜tool▁sep｜>" * 30_000),
        (
            "deepseek_v3",
            DEEP[:18] + "<｜tool▁call▁begin｜>" * 30_000 + "<｜tool▁call▁end｜>" * 30_000,
        ),
        ("mistral", "[TOOL_CALLS]a" + " " * 200_000 + "x"),
        ("pythonic", "[f(a=" + "-" * 200_000 + "1)]"),
        ("pythonic", "[" + "f(a=1)," * 30_000 + "]"),
    ],
)
def test_a_delimiter_repeated_without_end_does_not_block_the_event_loop(
    name: str, text: str
) -> None:
    began = time.process_time()
    assert tool_parser(name, tokenizer()).read(text, [CALCULATOR])[1] == []
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("name", REASONING_PARSERS.names())
def test_thinking_is_split_off_where_the_reply_or_the_template_opens_it(name: str) -> None:
    parser = reasoning_parser(name, tokenizer())
    assert parser is not None and parser.delimiters is not None
    start, end = parser.delimiters
    for opened, text in ((False, f"{start}\nso\n{end}\n\nyes"), (True, f"so\n{end}\n\nyes")):
        assert parser.split(text, opened=opened, done=True) == ("so", "yes")
    assert parser.split("yes", opened=False, done=True) == ("", "yes")
    assert parser.split(f"yes {start}no", opened=False, done=True) == ("", f"yes {start}no")
    assert parser.split("so on and", opened=True, done=True) == ("so on and", "")
    assert parser.opens(f"<|im_start|>assistant\n{start}\n") and not parser.opens(
        f"{start}x{end}\n"
    )


@pytest.mark.parametrize("opened", [False, True])
@given(pieces=st.lists(PIECES, max_size=8), tokens=st.booleans())
def test_each_look_at_a_reply_is_the_beginning_of_the_next(
    opened: bool, pieces: list[str], tokens: bool
) -> None:
    reader = ReplyParser(
        tokenizer(), tool_parser("hermes", tokenizer()), reasoning_parser("think", tokenizer())
    )
    ids = tokenizer()("".join(pieces) + "ä€")["input_ids"]
    told = ("", "")
    for end in range(1, len(ids) + 1):
        said = reader.read(
            ints(ids[:end]), ["x]", ";"], [CALCULATOR] if tokens else None, framed=True, opened=opened,
            done=end == len(ids), several=True,
        )  # fmt: skip
        assert said.reasoning.startswith(told[0]) and said.text.startswith(told[1])
        assert not said.functions or end == len(ids)
        told = said.reasoning, said.text


def test_delimiters_that_are_special_tokens_are_parsed_and_not_shown() -> None:
    from examples.tiny.model import Recipe

    marked: Any = Recipe(corpus_size=64, rarest_merge=8).make_tokenizer()
    special = [AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "<odd>")]
    marked.add_tokens(special, special_tokens=True)
    reader = ReplyParser(marked, tool_parser("mistral", marked))
    call = '[{"name": "now", "arguments": {}}]'
    tokens = ints(marked(f"Well.<odd>[TOOL_CALLS]{call}{marked.eos_token}")["input_ids"])
    options: dict[str, Any] = {"framed": True, "opened": False, "done": True, "several": True}
    said = reader.read(tokens, [], [CALCULATOR], **options)
    assert (said.text, said.functions) == ("Well.", [NOW])
    assert reader.read(tokens, [], None, **options).text == f"Well.{call}"
    broken = ints(marked("[TOOL_CALLS]oh")["input_ids"])
    assert reader.read(broken, [], [CALCULATOR], **options).text == "[TOOL_CALLS]oh"


def own_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    if "boom" in text:
        raise LookupError(text)
    return "", [{"name": text, "arguments": {}}]


def own_thinking(text: str) -> tuple[str, str]:
    return text[:1], text[1:]


def test_parsers_of_ones_own_are_functions() -> None:
    mine = f"{__name__}:own_calls"
    assert tool_parser(mine, tokenizer()).read("go", None) == (
        "",
        [{"name": "go", "arguments": {}}],
    )
    assert tool_parser(mine, tokenizer()).read("boom", None) == ("boom", [])
    parser = reasoning_parser(f"{__name__}:own_thinking", tokenizer())
    assert parser is not None and parser.split("abc", opened=False, done=True) == ("a", "bc")


@pytest.mark.parametrize(
    ("tools", "reasoning", "problem"),
    [
        ("hermees", "", "did you mean 'hermes'"),
        ("hermes", "thinking", "did you mean 'think'"),
        (f"{__name__}:nothing", "", "attribute"),
        (f"{__name__}:WHOLE", "", "neither a function nor a class"),
    ],
)
def test_a_parser_that_there_is_not_is_refused_by_name(
    tools: str, reasoning: str, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        check_parsers(tools, reasoning)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_vllms_parsers_are_used_without_an_engine() -> None:
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        check_parsers("vllm:hermess", "")
    for name in ("hermes", "deepseek_v31", "pythonic"):
        (text, *_) = WRITTEN.get(name) or [WRITTEN["deepseek_v3"][1]]
        found = tool_parser(f"vllm:{name}", _vocabulary()).read(text, [CALCULATOR])
        assert found == ("", [ADD, NOW])
        assert tool_parser(f"vllm:{name}", _vocabulary()).read(text[:20], [CALCULATOR]) == (
            text[:20],
            [],
        )
    with pytest.raises(UserError, match="not with this model's tokenizer"):
        reasoning_parser("vllm:deepseek_r1", tokenizer())
    parser = reasoning_parser("vllm:deepseek_r1", _vocabulary())
    assert parser is not None and parser.split("<think>so</think>yes", opened=False, done=True) == (
        "so",
        "yes",
    )


@cache
def _vocabulary() -> Any:
    """A tokenizer with the delimiters that vLLM's parsers look for."""
    from examples.tiny.model import Recipe

    marked: Any = Recipe(corpus_size=64, rarest_merge=8).make_tokenizer()
    marked.add_tokens(
        [*(tool_parser("deepseek_v31", marked).delimiters or ()), "<think>", "</think>"]
    )
    return marked


#: Templates that format the model's own message as its family does.
TEMPLATES = {
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}"
        "{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "think": (  # Qwen 3: earlier reasoning is left out
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        ("mistral", "mistral", 'Hm. [TOOL_CALLS] [{"name":  "now", "arguments": { }}]'),
        (
            "think",
            "hermes",
            '<think>\nso  so\n</think>\n\nHm.<tool_call>{ "name":"now", "arguments": {} }</tool_call>',
        ),
        ("think", "hermes", "<think>on and on"),
    ],
)
@pytest.mark.parametrize("sent_back", [True, False])
def test_a_parsed_reply_is_continued_from_its_sampled_tokens(
    template: str, tools: str, said: str, sent_back: bool
) -> None:
    from examples.tiny.model import Recipe

    framing: Any = Recipe(corpus_size=64, rarest_merge=8).make_tokenizer()
    framing.chat_template = TEMPLATES[template] + "{# tools #}"
    reader = ReplyParser(framing, tool_parser(tools, framing), reasoning_parser("think", framing))
    chat, recorder, shown = AgentChat(framing), Recorder(), [CALCULATOR]
    asked = [{"role": "user", "content": "what time?"}]
    prompt = chat.prompt(asked, shown, recorder)
    sampled = framing(said)["input_ids"] + [framing.eos_token_id]
    found = reader.read(
        ints(sampled), [], shown, framed=True, opened=False, done=True, several=True
    )
    calls = [
        {"id": reader.tools.identity("c0", i), "type": "function", "function": f}
        for i, f in enumerate(found.functions)
    ]
    reply = {"role": "assistant", "content": found.text, "tool_calls": calls} if calls else {
        "role": "assistant", "content": found.text,
    }  # fmt: skip
    if found.reasoning:
        reply["reasoning_content"] = found.reasoning
    action = Segment("action", sampled, [0.0] * len(sampled), [0] * len(sampled))
    messages = [*asked, reply]
    recorder.record(RecordedCall(prompt, action), conversation(messages, shown), thoughts(messages))
    back = (
        dict(reply) if sent_back else {k: v for k, v in reply.items() if k != "reasoning_content"}
    )
    result = {"role": "tool", "content": "noon", "tool_call_id": calls[0]["id"] if calls else "x"}
    after = chat.prompt([*asked, back, result], shown, recorder).tolist()
    assert after[: len(prompt) + len(sampled)] == [*prompt.tolist(), *sampled]
    assert "noon" in framing.decode(after[len(prompt) + len(sampled) :])
    if found.reasoning:  # other reasoning is another conversation
        other = chat.prompt(
            [*asked, {**reply, "reasoning_content": "else"}, result], shown, recorder
        ).tolist()
        assert other[: len(after)] != after
