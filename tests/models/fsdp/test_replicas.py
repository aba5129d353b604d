"""Groups of ranks that shard the weights and are replicas of each other: the gradient and files of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM

from skyasync.workers.critic import CriticWorker
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.policy import PolicyWorker
from tests.models.test_shapes import SHAPES, distance, of_a_rank, of_one, ragged, settings
from tests.workers.calls import load_whole, step_and_save
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow


def outputs_of(rank: Rank) -> tuple[bool, Any]:
    """Whether its weights are sharded in groups, and its log-probabilities."""
    parameters = list(rank.worker.backend.model.parameters())
    right = all(
        isinstance(p, DTensor) and p.placements == (Replicate(), Shard(0)) for p in parameters
    )
    asked = rank.worker.values if isinstance(rank.worker, CriticWorker) else rank.worker.logprobs
    return right, asked(ragged()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("worker", [CriticWorker, ReferenceWorker])
def test_a_critic_and_a_reference_have_replicas_too(
    worker: type[ModelWorker], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES["llama"]).save_pretrained(tmp_path)
    cfg = settings(str(tmp_path))
    alone = Rank(0, 1, worker(cfg, threads=1))
    alone.worker.setup()
    _, expected = outputs_of(alone)
    cfg.trainer.critic.fsdp_size = cfg.trainer.ref.fsdp_size = 2
    four = ranks(4)
    four.set_up(worker, cfg)
    for right, found in four.call(outputs_of):
        assert right and abs(found - expected).max() < 2e-6


def layout(rank: Rank) -> tuple[bool, str]:
    """Whether every parameter is sharded in its group and replicated among them; what the first rank publishes."""
    parameters = list(rank.worker.backend.model.parameters())
    right = all(
        isinstance(p, DTensor) and p.placements == (Replicate(), Shard(0)) for p in parameters
    )
    path, *_ = rank.worker.transfer_weights("file", "write") or [""]
    if path:
        rank.worker.transfer_weights("file", "remove", path)
    return right, path


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_replicas_have_the_gradient_of_one_rank_and_other_counts_go_on_from_their_files(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """One model's files are read in slices; the first rank sends the other model's weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[name]).save_pretrained(tmp_path / "model")
    cfg = settings(str(tmp_path / "model"))
    expected = of_one(cfg.trainer.policy.model.path)
    cfg.trainer.policy.fsdp_size = 2
    four = ranks(4)
    four.set_up(PolicyWorker, cfg)
    found: list[Any] = four.call(of_a_rank, SHAPES[name].hidden_size)
    assert all(distance(torch.from_numpy(one), expected) < 1e-6 for one in found)
    assert [right for right, _ in four.call(layout)] == [True] * 4
    saved = set(four.call(step_and_save, str(tmp_path / "saved")))
    assert len(saved) == 1
    cfg.trainer.policy.fsdp_size = 0
    alone = PolicyWorker(cfg, threads=1)
    alone.setup()
    assert load_whole(Rank(0, 1, alone), str(tmp_path / "saved")) in saved
    step_and_save(Rank(0, 1, alone), str(tmp_path / "one"))
    cfg.trainer.policy.fsdp_size = 2
    four.set_up(PolicyWorker, cfg)
    assert set(four.call(load_whole, str(tmp_path / "one"))) == {
        load_whole(Rank(0, 1, alone), str(tmp_path / "one"))
    }
