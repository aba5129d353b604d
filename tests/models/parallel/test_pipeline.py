"""Pipeline stages change neither a model's outputs nor its gradient, whatever the widths of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.checkpoint import full_weights
from skyasync.models.parallel.pipeline import layers_of_stages
from skyasync.weight_sync.transfers.file import read_weights
from skyasync.workers.critic import CriticWorker
from skyasync.workers.frozen import TeacherWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.parallel.test_parallel import parallel
from tests.models.test_shapes import WIDE, distance
from tests.models.tiny_models import save_models
from tests.workers.conftest import make_batch, step_metrics
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import EXPERTS

DEEP: dict[str, Any] = {**WIDE, "num_hidden_layers": 5}
MODELS = {
    "llama": LlamaConfig(**DEEP),
    "qwen3_tied": Qwen3Config(**DEEP, head_dim=8, tie_word_embeddings=True),
    "gemma2_tied": Gemma2Config(
        **DEEP, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
    ),
    "qwen3_moe": Qwen3MoeConfig(**DEEP, **EXPERTS, head_dim=8, moe_intermediate_size=16),
}
SEEDS = (0, 1, 2)

Gradients = Mapping[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(MODELS, tmp_path_factory.mktemp("deep"))


def settings(
    path: str, *, pipeline: int = 1, expert: int = 0, recomputed: bool = False, **sizes: int
) -> Config:
    cfg = parallel(path, **sizes)
    cfg.trainer.parallel.pipeline, cfg.trainer.parallel.expert = pipeline, expert
    cfg.trainer.policy.reduce_gradients = "update" if recomputed else "micro_batch"
    cfg.trainer.policy.gradient_checkpointing = recomputed
    return cfg


def packing(seed: int) -> UpdateBatch:
    """Groups of rows that share prompts, of different lengths: two to eight micro-batches of different widths."""
    parts = [make_batch(2, 3 + seed, seed, 9 + 5 * seed), make_batch(1, 2, seed + 10, 40)]
    batch = UpdateBatch.concatenate(parts)
    batch.advantages = batch.advantages.abs()
    return batch


def updates(rank: Rank) -> list[tuple[Any, Any, Any, dict[str, Any], Any]]:
    """Of each packing: this rank's rows, their log-probabilities twice, gradients by name, the step's metrics."""
    worker, found = rank.worker, []
    shape = worker.backend.spec.mesh_shape
    for seed in SEEDS:
        batch = packing(seed)
        rows = split_for_ranks(batch, shape.data)[shape.data_rank(rank.rank)]
        mine = batch.select(rows).trim()
        said, before = worker.logprobs(mine), worker.forward_backward(mine)
        gradients = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy().copy()
            for name, p in worker.backend.model.named_parameters()
            if p.grad is not None
        }
        worker.examine()
        gradients |= {name: grad for name, grad in _after_examination(worker, gradients).items()}
        metrics: dict[str, Any] = {}
        if seed == SEEDS[-1]:
            metrics = step_metrics(worker)
        worker.drop_gradient()
        found.append((rows.numpy(), said.numpy(), before.numpy(), gradients, metrics))
    return found


def _after_examination(worker: PolicyWorker, names: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings of two stages: their gradients are complete when they are checked."""
    stage = worker.backend.stage
    if stage is None or stage.embeddings() is None:
        return {}
    weight = stage.embeddings()
    (name,) = [name for name, p in worker.backend.model.named_parameters() if p is weight]
    return {name: weight.grad.full_tensor().numpy().copy()}


ONE: dict[str, Any] = {}


def of_one(path: str) -> Any:
    if path not in ONE:
        worker = PolicyWorker(settings(path), threads=1)
        worker.setup()
        ONE[path] = updates(Rank(0, 1, worker))
    return ONE[path]


def difference(found: Gradients, expected: Gradients) -> float:
    """Relative difference of a stage's gradients from one rank's."""
    first, second = (
        torch.cat([torch.from_numpy(each[name]).flatten() for name in found])
        for each in (found, expected)
    )
    return distance(first, second)


QUICK = [
    ("gemma2_tied", 2, {"pipeline": 2, "recomputed": True}),
    ("qwen3_moe", 2, {"pipeline": 2}),
]
MATRIX = [
    ("qwen3_tied", 4, {"pipeline": 4}),
    ("llama", 4, {"pipeline": 2, "tensor": 2}),
    ("llama", 2, {"pipeline": 2}),
    ("qwen3_tied", 2, {"pipeline": 2}),
    ("llama", 4, {"pipeline": 4, "recomputed": True}),
    ("qwen3_tied", 4, {"pipeline": 2}),
    ("llama", 4, {"pipeline": 2, "recomputed": True}),
    ("llama", 4, {"pipeline": 2, "context": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=str,
)
def test_stages_have_one_ranks_gradient_over_any_widths(
    models: dict[str, str],
    name: str,
    count: int,
    sizes: dict[str, Any],
    ranks: Callable[[int], Ranks],
) -> None:
    alone = of_one(models[name])
    ranks(count).close()  # torch keeps meshes of a process's earlier groups
    ranks(count).set_up(PolicyWorker, settings(models[name], **sizes))
    answers = ranks(count).call(updates)
    for number, (_, logprobs, _, expected, metrics) in enumerate(alone):
        seen: set[str] = set()
        for of_rank in answers:
            rows, said, before, gradients, told = of_rank[number]
            assert abs(said - logprobs[rows, : said.shape[1]]).max() < 1e-5
            assert abs(before - said).max() < 1e-6
            assert difference(gradients, expected) < 1e-6
            assert told == pytest.approx(metrics, rel=1e-5)
            seen |= gradients.keys()
        assert seen == expected.keys()


def whole(tensor: torch.Tensor) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def state(worker: PolicyWorker) -> dict[str, Any]:
    """Weights and moments of this stage, whole."""
    found = {}
    for name, parameter in worker.backend.model.named_parameters():
        found[name] = whole(parameter)
        for kind, value in worker.backend.optimizer.state[parameter].items():
            found[f"{name} {kind}"] = whole(value)
    return found


def go_on(
    rank: Rank, loaded: str, folder: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The state as loaded, the state that is saved after another step, and the published weights."""
    worker, batch = rank.worker, packing(0)
    if loaded:
        worker.load(loaded)
    before = state(worker)
    shape = worker.backend.spec.mesh_shape
    worker.update_policy(
        batch.select(split_for_ranks(batch, shape.data)[shape.data_rank(rank.rank)]).trim()
    )
    worker.begin_save(folder) if rank.count > 2 else worker.save(folder)
    while rank.count > 2 and worker.saved() is None:
        pass
    written = worker.transfer_weights("file", "write")
    sent = (
        {name: tensor.clone().numpy() for name, tensor in read_weights(written[0]).items()}
        if written
        else {}
    )
    if written:
        worker.transfer_weights("file", "remove", written[0])
    gathered = {
        name: tensor.numpy()
        for name, tensor in full_weights(worker.backend.sharded_weights(), torch.float32).items()
    }
    assert not sent or all((sent[name] == gathered[name]).all() for name in sent | gathered)
    worker.export(f"{folder}_export")
    return before, state(worker), gathered


def joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all stages; ranks of the same stage agree."""
    found: dict[str, Any] = {}
    for each in states:
        for name, value in each.items():
            assert (found.setdefault(name, value) == value).all(), f"the ranks differ in {name}"
    return found


@pytest.mark.matrix
@pytest.mark.slow
def test_any_stages_resume_from_any_others_checkpoint_and_publish_whole_weights(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """A mixture of experts with tied embeddings, whose files have experts one by one."""
    path, before = str(tmp_path / "model"), dict[str, Any]()
    torch.manual_seed(0)
    experts = {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**DEEP, **experts)).save_pretrained(path)
    ways = [(2, 2), (1, 1), (4, 4), (4, 2), (2, 2), (2, 1)]
    for number, (count, stages) in enumerate(ways):
        ranks(count).close()
        ranks(count).set_up(PolicyWorker, settings(path, pipeline=stages))
        found = ranks(count).call(
            go_on, str(tmp_path / str(number - 1)) if number else "", str(tmp_path / str(number))
        )
        loaded, after = (joined([each[i] for each in found]) for i in (0, 1))
        assert not before or loaded.keys() == before.keys()
        assert all((loaded[name] == value).all() for name, value in before.items()), (
            f"stages={stages} loads other weights"
        )
        before, weights = after, found[0][2]
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{number}_export")
        assert list(weights) == [name for name, _ in exported.named_parameters()]
        assert all(
            (weight.detach().numpy() == weights[name]).all()
            for name, weight in exported.named_parameters()
        )
        for _, _, other in found:
            assert all((other[name] == weight).all() for name, weight in weights.items())


def outputs_of(rank: Rank) -> Any:
    batch = packing(1)
    if isinstance(rank.worker, CriticWorker):
        batch.returns, batch.values = (
            torch.ones(batch.tokens.shape),
            torch.zeros(batch.tokens.shape),
        )
        values = rank.worker.values(batch)
        rank.worker.forward_backward(batch)
        return values.numpy(), step_metrics(rank.worker)
    return TeacherWorker.top_logprobs(rank.worker, batch).numpy(), {}


@pytest.mark.slow
@pytest.mark.parametrize("worker", [CriticWorker, PolicyWorker])
def test_values_and_likeliest_tokens_come_from_the_last_stage(
    models: dict[str, str], worker: type[Any], ranks: Callable[[int], Ranks]
) -> None:
    cfg = settings(models["qwen3_tied"])
    cfg.trainer.algorithm.advantage_estimator, cfg.trainer.teacher.top_k = "gae", 4
    alone = Rank(0, 1, worker(cfg, threads=1))
    alone.worker.setup()
    expected, metrics = outputs_of(alone)
    cfg.trainer.parallel.pipeline = 2
    ranks(2).set_up(worker, cfg)
    for found, told in ranks(2).call(outputs_of):
        assert abs(found - expected).max() < 1e-5
        assert told == pytest.approx(metrics, rel=1e-5)


@given(st.integers(1, 60), st.integers(1, 8))
def test_every_stage_has_layers_and_the_last_no_more_than_others(stages: int, more: int) -> None:
    layers = stages + more
    found = layers_of_stages(layers, stages)
    assert sum(found) == layers and len(found) == stages
    assert max(found) - min(found) <= 1 and found[-1] == min(found) >= 1
