"""A tokenizer is the same however it is loaded."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from skyasync.rollout.tokenizer import load_tokenizer
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
    assert (found.chat_template, found.init_kwargs) == (expected.chat_template, expected.init_kwargs)


def test_it_does_without_the_models(folder):
    program = (
        "import sys; from skyasync.rollout.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "assert 'transformers.models.auto.tokenization_auto' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


def test_a_models_own_class_is_kept(folder):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = load_tokenizer(str(folder))
    assert type(found) is type(AutoTokenizer.from_pretrained(folder)) is GPT2Tokenizer
