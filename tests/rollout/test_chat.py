"""Conversations to tokens: the model's tokens are never made again from text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.arrays import ints
from skyasync.errors import UserError
from skyasync.examples.tiny_models import CHATML
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.chat import LONG_TEXT_TOKENS, ChatTokenizer, PlainText
from tests.rollout.episodes import tokenizer, tokens_of

SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(template=None):
    from copy import deepcopy

    if template is None:
        return ChatTokenizer(tokenizer())
    other = deepcopy(tokenizer())
    other.chat_template = template
    return ChatTokenizer(other)


def user(text):
    return {"role": "user", "content": text}


def test_a_prompt_ends_where_the_model_begins_to_write():
    found = chat().prompt([user("add 2 and 3")])
    assert (
        tokenizer().decode(found)
        == "<|im_start|>user\nadd 2 and 3<|im_end|>\n<|im_start|>assistant\n"
    )


TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ 'tool ' + tool.function.name + '\n' }}{% endfor %}" + CHATML
)


def test_the_model_is_shown_an_environments_tools():
    found = chat(WITH_TOOLS)
    assert found.tokenizer.decode(found.prompt([user("hello")], TOOLS)).startswith(
        "tool add\n<|im_start|>user"
    )
    assert not found.tokenizer.decode(found.prompt([user("hello")])).startswith("tool")


def test_tools_that_the_template_would_not_show_are_refused():
    with pytest.raises(
        UserError, match=r"has tools \(add\), but the model's chat template shows none"
    ):
        chat().prompt([user("hello")], TOOLS)


def test_content_parts_are_the_text_they_make_together():
    parts = [{"type": "text", "text": "add 2 "}, {"type": "text", "text": "and 3"}]
    found = chat()
    assert found.prompt([user(parts)]).tolist() == found.prompt([user("add 2 and 3")]).tolist()
    end = [tokenizer().eos_token_id]
    assert found.observation([user(parts)], end) == found.observation([user("add 2 and 3")], end)


def test_a_content_part_that_is_no_text_is_named():
    with pytest.raises(UserError, match="the image 'x' cannot be read: No such file"):
        chat().prompt([user([{"type": "image_url", "image_url": {"url": "x"}}])])
    with pytest.raises(
        UserError, match="parts of type input_audio: only parts of type text and image are read"
    ):
        chat().prompt([user([{"type": "input_audio", "input_audio": {"data": "x"}}])])


@pytest.mark.parametrize(("sampling", "read"), [
    ({}, "12 </a> 3"), ({"stop": ("</a>", "3")}, "12 </a> 3"),
    ({"stop": ("</a>", "3"), "include_stop_str_in_output": False}, "12 "),
    ({"stop": ("x",), "include_stop_str_in_output": False}, "12 </a> 3"),
    ({"skip_special_tokens": False}, "12 </a> 3<|im_end|>"),
])  # fmt: skip
def test_an_environment_reads_as_much_of_a_response_as_its_keys_say(sampling, read):
    response = [*tokens_of("12 </a> 3"), tokenizer().eos_token_id]
    assert chat().text(response, SamplingParams(**sampling)) == read


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=3), st.text(max_size=12))
def test_prompt_actions_and_observations_in_a_row_are_the_conversation_as_the_template_frames_it(
    answers, reply
):
    """Token in, token out: for actions that end their message, the parts concatenate to the whole."""
    conversation, tokens = [user("begin")], chat().prompt([user("begin")]).tolist()
    for answer in answers:
        action = [*tokens_of(answer), tokenizer().eos_token_id]
        tokens = tokens + action + chat().observation([user(reply)], action)
        conversation += [{"role": "assistant", "content": answer}, user(reply)]
    assert tokens == tokenizer().apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def test_tokens_of_the_model_that_no_tokenizer_would_write_are_kept():
    letters = [t for letter in "user" for t in tokens_of(letter)]
    assert letters != tokens_of("user")
    observation = chat().observation([user("more")], letters)
    assert observation[0] == tokenizer().eos_token_id  # ends the message that was cut
    assert (
        tokenizer().decode(observation[1:])
        == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_message_that_ended_is_not_ended_twice():
    action = [*tokens_of("5"), tokenizer().eos_token_id]
    assert (
        chat().observation([user("more")], action)
        == chat().observation([user("more")], tokens_of("5"))[1:]
    )


def test_an_environment_that_says_nothing_still_opens_the_models_next_message():
    action = [*tokens_of("5"), tokenizer().eos_token_id]
    assert tokenizer().decode(chat().observation([], action)) == "\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", ["system", "thinking"])
def test_what_a_template_puts_in_front_or_takes_back_is_no_part_of_an_observation(template):
    """A template may add a system message, or format the model's last message differently from earlier ones."""
    templates = {"system": SYSTEM + tokenizer().chat_template, "thinking": THINKING}
    action = [*tokens_of("5"), tokenizer().eos_token_id]
    found = chat(templates[template]).observation([user("more")], action)
    assert (
        tokenizer().decode(found) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


DROPS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


SAID = [
    user("1 > 0?"),
    {"role": "assistant", "content": "<think>\n3 > 1\n</think>\n\n13"},
    user("more"),
]


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        (None, None),
        (THINKING, None),
        (
            DROPS_THOUGHTS,
            "\n\n13<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["keeps", "adds", "drops"],
)
def test_a_turn_starts_a_new_row_if_the_template_shows_other_tokens_than_were_sampled(
    template, shows
):
    found = chat(template)
    action = [*tokens_of("<think>\n3 > 1\n</think>\n\n13"), tokenizer().eos_token_id]
    observation = found.observation([user("more")], action)
    assert (
        tokenizer().decode(observation)
        == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    extended = [*found.prompt(SAID[:1]).tolist(), *action, *observation]
    again = found.reframed(SAID, None, extended)
    assert (again is None) == (shows is None)
    if shows:
        assert tokenizer().decode(again) == tokenizer().decode(found.prompt(SAID[:1])) + shows


def test_other_tokens_of_the_same_text_do_not_start_a_new_row():
    found, said = (
        chat(DROPS_THOUGHTS),
        [user("1 > 0?"), {"role": "assistant", "content": "13"}, user("more")],
    )
    letters = [t for letter in "13" for t in tokens_of(letter)]
    action = [*letters, tokenizer().eos_token_id]
    extended = [
        *found.prompt(said[:1]).tolist(),
        *action,
        *found.observation([user("more")], action),
    ]
    assert found.reframed(said, None, extended) is None


def test_plain_text_is_the_templates_prompt_and_then_text_as_it_is():
    plain = PlainText(tokenizer())
    opening = plain.opening([user("add 2 and 3")])
    assert opening == "<|im_start|>user\nadd 2 and 3<|im_end|>\n<|im_start|>assistant\n"
    assert plain.prompt(opening).tolist() == chat().prompt([user("add 2 and 3")]).tolist()
    assert plain.observation("wrong\n", tokens_of("5")) == tokens_of("wrong\n")
    assert plain.text([*tokens_of("5"), tokenizer().eos_token_id]) == "5<|im_end|>"


def test_the_end_of_message_in_an_environments_words_ends_no_message_of_the_model():
    action = [*tokens_of("5"), tokenizer().eos_token_id]
    found = chat().observation([user("a<|im_end|>b")], action)
    assert tokenizer().decode(found).startswith("\n<|im_start|>user\na<|im_end|>b")


def test_a_template_without_ends_of_messages_is_refused_for_several_turns():
    plain = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    found = chat(plain)
    assert len(found.prompt([user("x")]))
    with pytest.raises(UserError, match="eos_token"):
        found.observation([user("more")], [1])


def test_messages_that_differ_in_any_field_are_tokenized_separately():
    named = "{% for message in messages %}{{ message.get('name', '') + message['content'] + '<|im_end|>' }}{% endfor %}"
    found = chat(named)
    first, second = (found.prompt([{**user("x"), "name": name}]).tolist() for name in "ab")
    assert first != second


def test_text_leaves_out_special_tokens():
    assert chat().text([*tokens_of("sort 3 1"), tokenizer().eos_token_id]) == "sort 3 1"


def test_without_a_template_text_goes_as_it_is():
    raw = ChatTokenizer(tokenizer(), apply_chat_template=False)
    assert tokenizer().decode(raw.prompt([user("2 + 2 =")])) == "2 + 2 ="
    assert (
        tokenizer().decode(raw.observation([user("\nnext: "), user("x")], tokens_of("4")))
        == "\nnext: x"
    )


def test_a_long_responses_text_is_the_tokenizers_own():
    response = tokens_of("12 </a> 3 ") * LONG_TEXT_TOKENS + [tokenizer().eos_token_id]
    for skip in (True, False):
        sampling = SamplingParams(skip_special_tokens=skip)
        assert chat().text(ints(response), sampling) == tokenizer().decode(
            response, skip_special_tokens=skip
        )
