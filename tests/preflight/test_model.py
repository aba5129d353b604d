"""What a model's folder, or the hub, tells before a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from skyasync.config import Config
from skyasync.errors import UserError
from skyasync.preflight.model import MODEL, check_model, hub_folder


@pytest.mark.parametrize("role", ["ref", "critic", "teacher", "reward"])
def test_the_engines_size_divides_only_the_model_that_they_hold(role: str, tmp_path: Path) -> None:
    shape = {"model_type": "llama", "num_attention_heads": 12, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    cfg = Config()
    cfg.generator.inference_engine_tensor_parallel_size = 8
    check_model(str(tmp_path), cfg, key=f"trainer.{role}.model.path", own_tokenizer=True, weights=False)
    with pytest.raises(UserError, match="does not divide the 12 attention heads"):
        check_model(str(tmp_path), cfg, key=MODEL, own_tokenizer=True, weights=False)


@pytest.mark.parametrize(("status", "answer"), [(404, "404: there is no such model"), (429, "429$"), (503, "503$")])
def test_a_hub_that_is_busy_does_not_lack_the_model(status: int, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(head=lambda *args, **options: SimpleNamespace(status_code=status))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=f"it answers {answer}"):
        hub_folder("some-owner/some-model")
