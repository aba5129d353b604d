"""A tokenizer is the same however it is loaded."""

import json
import pickle
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from skyasync.errors import UserError
from skyasync.rollout.chat import ChatTokenizer, PlainText
from skyasync.rollout.tokenizer import load_tokenizer, with_template
from tests.rollout.episodes import tokenizer


@pytest.fixture
def folder(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_generic_tokenizer_is_what_auto_tokenizer_gives(folder):
    found, expected = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert (found.chat_template, found.init_kwargs) == (
        expected.chat_template,
        expected.init_kwargs,
    )


def test_it_does_without_the_models(folder):
    program = (
        "import sys; from skyasync.rollout.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "assert 'transformers.models.auto.tokenization_auto' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


def test_a_models_own_class_is_kept(folder):
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "tokenizer_class": "GPT2Tokenizer"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = load_tokenizer(str(folder))
    assert type(found) is type(AutoTokenizer.from_pretrained(folder)) is GPT2Tokenizer


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if loud %}{{ '!' }}{% endif %}"


def framed(tokenizer):
    return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_a_template_of_ones_own_is_a_text_or_a_file_and_is_told_what_it_reads(folder, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    for said in (TEMPLATE, str(tmp_path / "mine.jinja")):
        assert framed(with_template(load_tokenizer(str(folder)), said, {})) == "hi"
        assert framed(with_template(load_tokenizer(str(folder)), said, {"loud": True})) == "hi!"


def test_what_it_is_told_holds_wherever_a_conversation_is_framed(folder):
    tokenizer = with_template(load_tokenizer(str(folder)), TEMPLATE, {"loud": True})
    loud = tokenizer.encode("hi!")
    assert ChatTokenizer(tokenizer).prompt([{"role": "user", "content": "hi"}]).tolist() == loud
    assert PlainText(tokenizer).opening([{"role": "user", "content": "hi"}]) == "hi!"
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, loud=False
        )
        == "hi"
    )
    assert framed(pickle.loads(pickle.dumps(tokenizer))) == "hi!"


def test_a_variable_that_the_template_does_not_read_is_refused_with_the_nearest(folder):
    with pytest.raises(
        UserError, match=r"chat_template_kwargs\.lout: .* reads no such variable; .*'loud'"
    ):
        with_template(load_tokenizer(str(folder)), TEMPLATE, {"lout": True})


def test_a_template_that_is_neither_text_nor_file_is_refused(folder):
    with pytest.raises(
        UserError, match=r"data\.chat_template=mine\.jinja is neither a file nor Jinja text"
    ):
        with_template(load_tokenizer(str(folder)), "mine.jinja", {})
