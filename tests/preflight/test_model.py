"""What a model's folder tells before a run: what divides it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.config import Config
from skyasync.errors import UserError
from skyasync.preflight.model import MODEL, check_model


@pytest.mark.parametrize("role", ["ref", "critic", "teacher", "reward"])
def test_the_engines_size_divides_only_the_model_that_they_hold(role: str, tmp_path: Path) -> None:
    shape = {"model_type": "llama", "num_attention_heads": 12, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    cfg = Config()
    cfg.generator.inference_engine_tensor_parallel_size = 8
    check_model(str(tmp_path), cfg, key=f"trainer.{role}.model.path", own_tokenizer=True, weights=False)
    with pytest.raises(UserError, match="does not divide the 12 attention heads"):
        check_model(str(tmp_path), cfg, key=MODEL, own_tokenizer=True, weights=False)
