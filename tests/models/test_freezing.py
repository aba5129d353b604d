"""trainer.policy.freeze: frozen parameters stay bitwise the same, and the others have their usual gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skyasync.config.load import load_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.freezing import check_frozen
from skyasync.workers.policy import PolicyWorker
from tests.models.tiny_vision import FAMILIES, save_tiny
from tests.workers.conftest import config_for, make_model
from tests.workers.processes import Rank, Ranks
from tests.workers.test_vision import batch_of_images, of_one_rank

pytestmark = pytest.mark.slow

TOWER = {"qwen3_vl": "model.model.visual.", "idefics3": "model.model.vision_model."}
PROJECTOR = {
    "qwen3_vl": ("model.model.visual.merger.", "model.model.visual.deepstack_merger_list."),
    "idefics3": ("model.model.connector.",),
}


def frozen_config(folder: str, *names: str) -> Config:
    cfg = config_for(folder)
    cfg.trainer.policy.freeze = list(names)
    return cfg


def two_steps(rank: Rank, folder: str) -> tuple[dict[str, bool], set[str], set[str]]:
    """Whether each parameter is bitwise the same afterwards, and the names with a gradient and an optimizer state."""
    backend = rank.worker.backend
    parameters = dict(backend.model.named_parameters())
    before = {name: weight.clone() for name, weight in backend.weights()}
    batch = batch_of_images(folder)
    share = len(batch) // rank.count
    for _ in range(2):
        rank.worker.forward_backward(
            batch.select(torch.arange(rank.rank * share, (rank.rank + 1) * share)).trim()
        )
        gradients = {name for name, parameter in parameters.items() if parameter.grad is not None}
        rank.worker.optimizer_step()
    same = {
        f"model.{name}": torch.equal(weight, before[name]) for name, weight in backend.weights()
    }
    return (
        same,
        gradients,
        {name for name, parameter in parameters.items() if parameter in backend.optimizer.state},
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["one rank", "bfloat16, sharded", "two ranks"])
def test_a_frozen_tower_has_no_gradient_no_state_and_the_same_bits(
    family: str, kind: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    folder = save_tiny(family, tmp_path / family)
    cfg = (
        frozen_config(folder, "vision_tower")
        if kind == "one rank"
        else frozen_config(folder, "vision_tower", "projector")
    )
    if kind == "two ranks":
        ranks(2).set_up(PolicyWorker, cfg)
        found = ranks(2).call(two_steps, folder)
    else:
        cfg.trainer.policy.model.dtype = "auto" if kind == "one rank" else "bfloat16"
        alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
        alone.worker.setup()
        found = [two_steps(alone, folder)]
    for same, gradients, states in found:
        tower = {name for name in same if name.startswith(TOWER[family])} - (
            projector := {name for name in same if name.startswith(PROJECTOR[family])}
        )
        assert tower and projector
        frozen = tower if kind == "one rank" else tower | projector
        assert {name for name, equal in same.items() if equal} == frozen
        assert gradients == states == same.keys() - frozen


def test_the_rest_has_the_same_gradient_and_a_resumed_run_the_same_weights(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_vl", tmp_path / "model")
    whole, _ = of_one_rank(config_for(folder), folder)
    cfg = frozen_config(folder, "vision_tower", "model.language_model.embed_tokens")
    workers = [PolicyWorker(cfg, threads=1) for _ in range(2)]
    for worker in workers:
        worker.setup()
    first, second = workers
    batch = batch_of_images(folder)
    first.forward_backward(batch)
    for name, parameter in first.backend.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-5, atol=1e-7)
    first.optimizer_step()
    first.save(str(tmp_path / "saved"))
    second.load(str(tmp_path / "saved"))
    for worker in workers:
        worker.forward_backward(batch)
        worker.optimizer_step()
    for (name, one), (_, other) in zip(
        first.backend.weights(), second.backend.weights(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["vision_towr"], r"no part 'vision_towr': did you mean 'vision_tower'\? allowed: vision_tower, projector, "),
        (["model.visual.block"], "did you mean 'model.visual.blocks'"),
        (["visual"], "has no part 'visual'"),
        (["model"], r"freeze=\[model\] is all of Qwen3VLForConditionalGeneration: nothing would be trained"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_rejected_with_the_nearest(
    tmp_path: Path, names: list[str], problem: str
) -> None:
    folder = save_tiny("qwen3_vl", tmp_path / "model")
    with pytest.raises(UserError, match=problem):
        check_frozen(folder, {}, names)


def test_a_model_of_text_has_no_tower_and_adapters_freeze_by_themselves(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", tied=True)
    check_frozen(folder, {}, ["model.embed_tokens", "model.layers.0"])
    check_frozen(folder, {}, ["lm_head"])
    with pytest.raises(
        UserError,
        match=r"LlamaForCausalLM has no part 'vision_tower': allowed: names of parameters",
    ):
        check_frozen(folder, {}, ["vision_tower"])
    given = [
        "trainer.policy.model.path=x",
        "data.train_data=[x.jsonl]",
        "trainer.policy.lora.rank=4",
    ]
    with pytest.raises(
        UserError, match=r"lora\.rank=4 freezes all weights.*trainer\.policy\.freeze=\[lm_head\]"
    ):
        load_config([*given, "trainer.policy.freeze=[lm_head]"])
