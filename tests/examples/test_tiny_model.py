import random
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyasync.examples.tiny.model import Recipe, build
from skyasync.examples.tiny.tasks import questions, train_prompts

FEW = {"steps": 2, "batch_size": 8, "corpus_size": 512, "rarest_merge": 20, "progress": False}


@pytest.fixture(scope="module")
def tokenizer():
    return Recipe().make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(out=tmp_path_factory.mktemp("models") / "tiny", **FEW)


@given(text=st.text())
def test_any_text_survives_tokenizing(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_digits_and_letters_of_made_up_words_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("90125") == ["9", "0", "1", "2", "5"]
    assert tokenizer.tokenize("Spell backwards: qzx") == [
        "Spell",
        "Ġbackwards",
        ":",
        "Ġ",
        "q",
        "z",
        "x",
    ]


def test_chat_template_is_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add: 1 + 2"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nAdd: 1 + 2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )  # fmt: skip
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False) + "<|im_start|>assistant\n" == text
    )


def test_end_of_message_ends_a_response_and_padding_is_another_token(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(special, add_special_tokens=False)) == 1


def test_prompts_and_answers_fit_the_example_configuration(tokenizer):
    for row in train_prompts()[:500]:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        assert len(ids) <= 32
        assert len(tokenizer.encode(row["answer"], add_special_tokens=False)) + 1 <= 9


def test_its_steps_are_those_of_adamw_on_the_answers_cross_entropy(tmp_path):
    start = str(tmp_path / "start")
    build(out=start, **FEW | {"steps": 0})
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(start),
        AutoTokenizer.from_pretrained(start),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=Recipe.lr, weight_decay=0.0)
    asked = questions("train", 0, Recipe.tasks)
    for step in range(FEW["steps"]):
        loss, count = 0.0, 0
        for question in islice(asked, FEW["batch_size"]):
            text = tokenizer.apply_chat_template(
                question.row()["prompt"], add_generation_prompt=True, tokenize=False
            )
            prompt, answer = tokenizer(
                [text, f"{question.answer}<|im_end|>\n"], add_special_tokens=False
            )["input_ids"]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(
                logits, torch.tensor(answer), reduction="sum"
            )
            count += len(answer)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = Recipe.lr * (step + 1) / Recipe.warmup_steps
        optimizer.step()
        optimizer.zero_grad()
    trained = AutoModelForCausalLM.from_pretrained(
        build(out=tmp_path / "model", **FEW)
    ).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, atol=2e-6, rtol=0)


def test_model_and_tokenizer_load_from_the_folder(folder):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert 400_000 < model.num_parameters() < 500_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.apply_chat_template(
        train_prompts()[0]["prompt"], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_is_tied_or_not_as_asked(tmp_path, tied):
    model = AutoModelForCausalLM.from_pretrained(build(out=tmp_path / "model", tied=tied, **FEW))
    assert model.config.tie_word_embeddings is tied
    assert (
        model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    ) is tied


def test_same_recipe_gives_the_same_weights_and_leaves_the_callers_randomness_alone(
    tmp_path, folder
):
    torch.manual_seed(5)
    random.seed(5)
    build(out=tmp_path / "again", **FEW)
    assert (torch.rand(1).item(), random.random()) == _draws_after_seeding()
    first, again = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder, tmp_path / "again")
    )
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def _draws_after_seeding() -> tuple[float, float]:
    torch.manual_seed(5)
    random.seed(5)
    return torch.rand(1).item(), random.random()


def test_second_build_comes_from_the_cache_and_another_recipe_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYASYNC_CACHE", str(tmp_path))
    first = build(**FEW)
    made = (tmp_path / first / "model.safetensors").stat().st_mtime_ns
    assert build(**FEW) == first
    assert (tmp_path / first / "model.safetensors").stat().st_mtime_ns == made
    assert build(**{**FEW, "steps": 1}) != first
