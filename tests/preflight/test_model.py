"""What a model's folder, or the hub, tells before a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from skyasync.config import Config
from skyasync.errors import UserError
from skyasync.preflight.model import MODEL, check_model, hub_folder
from tests.inference.tiny_llama import save_tiny_llama


@pytest.mark.parametrize("role", ["ref", "critic", "teacher", "reward"])
def test_the_engines_size_divides_only_the_model_that_they_hold(role: str, tmp_path: Path) -> None:
    shape = {"model_type": "llama", "num_attention_heads": 12, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    cfg = Config()
    cfg.generator.inference_engine_tensor_parallel_size = 8
    check_model(
        str(tmp_path), cfg, key=f"trainer.{role}.model.path", own_tokenizer=True, weights=False
    )
    with pytest.raises(UserError, match="does not divide the 12 attention heads"):
        check_model(str(tmp_path), cfg, key=MODEL, own_tokenizer=True, weights=False)


@pytest.mark.parametrize(
    ("status", "answer"), [(404, "404: there is no such model"), (429, "429$"), (503, "503$")]
)
def test_a_hub_that_is_busy_does_not_lack_the_model(
    status: int, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SimpleNamespace(head=lambda *args, **options: SimpleNamespace(status_code=status))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=f"it answers {answer}"):
        hub_folder("some-owner/some-model")


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
USUAL = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [LOOPS, "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}" + LOOPS, USUAL, "{{"]
)
def test_a_chat_template_that_does_not_end_is_rejected(template: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tied=True)
    # A process of its own: the thread of a template that does not end would take half of the tests' processor.
    program = (
        "from skyasync.preflight import model\n"
        "from skyasync.rollout.tokenizer import load_tokenizer\n"
        "from skyasync.errors import UserError\n"
        "model.TEMPLATE_S = 1.0\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r})\n"
        f"tokenizer.chat_template = {template!r}\n"
        "try:\n    model.check_template(tokenizer)\nexcept UserError as error:\n    print(error)\n"
        "import os; os._exit(0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ("has not rendered one message within 1 s" in run.stdout) == (LOOPS in template)
