"""A value head: new if the files have none, loaded if they do, exported in transformers' format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from skyasync.errors import UserError
from skyasync.models.heads import ValueHead
from tests.workers.conftest import make_batch
from tests.workers.test_critic import SHAPES, critic, critic_config, learning, started


def test_a_new_head_is_of_the_seed_and_small(untied_model: str) -> None:
    heads = []
    for seed in (1, 1, 2):
        cfg = critic_config(untied_model)
        cfg.trainer.seed = seed
        heads.append(started(cfg).backend.model.model.score.weight.detach())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.3 / 33 < float(heads[0].std()) < 3 / 33


def test_an_export_is_the_librarys_classifier_and_its_head_is_loaded_again(
    untied_model: str, tmp_path: Path
) -> None:
    worker = critic(untied_model)
    worker.forward_backward(learning(worker))
    worker.optimizer_step()
    worker.export(str(tmp_path))
    cfg = critic_config(untied_model)
    cfg.trainer.critic.model.path = str(tmp_path)
    again, batch = started(cfg), make_batch()
    assert torch.equal(again.values(batch), worker.values(batch))
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForSequenceClassification"]
    library = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = torch.tensor([[5, 6, 7, 8]])
    asked = make_batch(1, 1)
    expected = library(tokens).logits.item()  # on the last token's state: the value before a fifth
    asked.tokens, asked.attention_mask = (
        torch.tensor([[5, 6, 7, 8, 9]]),
        torch.ones(1, 5, dtype=torch.bool),
    )
    asked.loss_mask = torch.tensor([[False] * 4 + [True]])
    assert worker.values(asked)[0, 4].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_a_folder_that_lacks_more_than_a_head_is_refused(shape: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(SHAPES[shape])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model\.norm\.weight"):
        ValueHead().load(str(tmp_path), torch.float32)
