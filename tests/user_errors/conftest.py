"""A model that consists of names and numbers, and invalid inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyasync.utils import manifest
from tests.user_errors import parts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "
)
ROWS = [
    {"prompt": "What comes after one?", "question": "What comes after one?", "answer": "two"}
] * 5


def make_model(folder: Path) -> Path:
    folder.mkdir()
    shape = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "hidden_size": 8,
        "num_hidden_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    save_file({"nothing": np.zeros(1)}, folder / "model.safetensors")
    letters = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    folder = tmp_path_factory.mktemp("inputs")
    model = make_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"prompt": "x"\n')
    write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    write_table(pa.Table.from_pylist(ROWS).slice(0, 0), folder / "empty.parquet")
    state = {"step": 3, "position": 6, "seed": 7, "dataset_size": 5}
    checkpoint = folder / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest.write(checkpoint, {"state.json": manifest.sum_of(checkpoint / "state.json")})
    (folder / "damaged" / "step_000004").mkdir(parents=True)
    (folder / "damaged" / "step_000004" / "state.json").write_text('{"step": 4}')
    for name in (
        "no_tokenizer",
        "bad_tokenizer",
        "no_template",
        "no_weights",
        "bad_weights",
        "bad_config",
        "two_labels",
        "other_tokens",
        "recurrent",
        "planless",
        "experts",
    ):
        shutil.copytree(model, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / name).unlink()
    (folder / "bad_tokenizer" / "tokenizer.json").write_text('{"model": 3}')
    (folder / "no_template" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (folder / "no_weights" / "model.safetensors").unlink()
    (folder / "bad_weights" / "model.safetensors").write_bytes(b"nothing that could be read")
    (folder / "bad_config" / "config.json").write_text("{model_type: llama}")
    plain = json.loads((model / "config.json").read_text())
    (folder / "recurrent" / "config.json").write_text(
        json.dumps(plain | {"layer_types": ["linear_attention"]})
    )
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (folder / "planless" / "config.json").write_text(json.dumps(plain | gpt2))
    (folder / "experts" / "config.json").write_text(
        json.dumps(plain | {"model_type": "qwen3_moe", "num_experts": 4})
    )
    shape = json.loads((model / "config.json").read_text()) | {
        "architectures": ["LlamaForSequenceClassification"]
    }
    (folder / "two_labels" / "config.json").write_text(json.dumps(shape))
    (folder / "other_tokens" / "config.json").write_text(
        json.dumps(shape | {"id2label": {"0": "score"}})
    )
    tokens = json.loads((model / "tokenizer.json").read_text())
    tokens["model"]["vocab"] |= {
        "a": tokens["model"]["vocab"]["b"],
        "b": tokens["model"]["vocab"]["a"],
    }
    (folder / "other_tokens" / "tokenizer.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The components that a user's program would have registered."""
    for registry, name, part in (
        (POLICY_LOSSES, "misspelt", parts.misspelt_loss),
        (POLICY_LOSSES, "without_gradient", parts.without_gradient),
        (POLICY_LOSSES, "unset", parts.unset),
        (POLICY_LOSSES, "anything", parts.anything),
        (ADVANTAGE_ESTIMATORS, "misspelt", parts.misspelt_estimator),
        (CORRECTIONS, "misspelt", parts.misspelt_correction),
        (LOSS_REDUCTIONS, "misspelt", parts.misspelt_reduction),
    ):
        monkeypatch.setitem(registry, name, part)
    monkeypatch.setattr(parts.grouped, "group_relative", True, raising=False)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "grouped", parts.grouped)
    yield
