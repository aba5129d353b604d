"""Mesh dimensions: tensor and context parallelism change neither a model's outputs nor its gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3MoeConfig

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.fsdp.checkpoint import full_weights
from skyasync.models.heads import copy_own_part
from skyasync.models.parallel import tensor as sums
from skyasync.models.parallel.tensor import NormOfOwnHeads
from skyasync.weight_sync.transfers.file import read_weights
from skyasync.workers.critic import CriticWorker
from skyasync.workers.frozen import TeacherWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.test_shapes import SHAPES, WIDE, distance, gradient, ragged, settings
from tests.models.test_shapes import shapes as shapes
from tests.workers import calls
from tests.workers.conftest import step_metrics
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import EXPERTS

CASES: list[tuple[str, int, dict[str, int]]] = [
    *((name, 2, {"tensor": 2}) for name in SHAPES),
    *((name, 2, {"context": 2}) for name in SHAPES),
    ("qwen3_tied", 4, {"tensor": 2}),
    ("gemma2_capped", 4, {"context": 2}),
    ("qwen3_moe", 4, {"context": 2, "tensor": 2}),
]
QUICK: list[tuple[str, int, dict[str, int]]] = [
    ("llama", 2, {"tensor": 2}),
    ("qwen2", 2, {"context": 2}),
    ("qwen3_tied", 2, {"tensor": 2}),
]
ONE: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = {}


def parallel(path: str, **sizes: int) -> Config:
    cfg = settings(path)
    cfg.generator.backend = (
        "transformers"  # which takes weights by the names of the model's parameters
    )
    cfg.trainer.parallel.context, cfg.trainer.parallel.tensor = (
        sizes.get("context", 1),
        sizes.get("tensor", 1),
    )
    cfg.trainer.algorithm.use_entropy_loss, cfg.trainer.algorithm.entropy_loss_coef = True, 0.01
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.1
    cfg.trainer.micro_batch_tokens = 96
    if len(sizes) > 1:
        cfg.trainer.policy.reduce_gradients, cfg.trainer.policy.gradient_checkpointing = (
            "update",
            "selective",
        )
    return cfg


def of_one(path: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Log-probabilities, gradient and metrics of a step on one rank."""
    if path not in ONE:
        worker = PolicyWorker(parallel(path), threads=1)
        worker.setup()
        logprobs = worker.logprobs(ragged())
        worker.forward_backward(ragged())
        found = gradient(worker)
        ONE[path] = logprobs, found, step_metrics(worker)
    return ONE[path]


def step(rank: Rank) -> Any:
    worker, batch = rank.worker, ragged()
    mesh = worker.backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
    mine = batch.select(rows).trim()
    logprobs = worker.logprobs(mine)
    worker.forward_backward(mine)
    found = gradient(worker).numpy()
    return rows.numpy(), logprobs.numpy(), found, step_metrics(worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.matrix) for case in CASES],
    ids=str,
)
def test_split_matrices_and_sequences_have_one_ranks_gradient(
    shapes: dict[str, str],
    name: str,
    count: int,
    sizes: dict[str, int],
    ranks: Callable[[int], Ranks],
) -> None:
    logprobs, expected, metrics = of_one(shapes[name])
    ranks(count).set_up(PolicyWorker, parallel(shapes[name], **sizes))
    for rows, said, found, told in ranks(count).call(step):
        torch.testing.assert_close(
            torch.from_numpy(said), logprobs[rows, : said.shape[1]], atol=2e-6, rtol=0
        )
        difference = distance(torch.from_numpy(found), expected)
        assert difference < 1e-6
        assert told == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
def test_plans_that_gather_have_one_ranks_gradient_as_well(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Phi3Config(**WIDE)).save_pretrained(tmp_path)
    _, expected, metrics = of_one(str(tmp_path))
    ranks(2).set_up(PolicyWorker, parallel(str(tmp_path), tensor=2))
    for _, _, found, told in ranks(2).call(step):
        assert distance(torch.from_numpy(found), expected) < 1e-6
        assert told == pytest.approx(metrics, rel=1e-5)


def valued(rank: Rank) -> Any:
    worker, batch = rank.worker, ragged()
    rows = split_for_ranks(batch, worker.backend.spec.mesh_shape.data)[
        worker.backend.spec.mesh_shape.data_rank(rank.rank)
    ]
    return rows.numpy(), worker.values(batch.select(rows).trim()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "name"), [("tensor", "gemma2_capped"), ("context", "llama")])
def test_a_critic_colocated_with_the_policy_is_divided_like_it(
    shapes: dict[str, str], axis: str, name: str, ranks: Callable[[int], Ranks]
) -> None:
    """Gemma's plan splits its embeddings, as they are its head; a critic has another head."""
    cfg = parallel(shapes[name], **{axis: 2})
    cfg.trainer.algorithm.advantage_estimator = "gae"
    alone = CriticWorker(parallel(shapes[name]), threads=1)
    alone.setup()
    expected = alone.values(ragged())
    ranks(2).set_up(CriticWorker, cfg)
    for rows, said in ranks(2).call(valued):
        assert len(rows) == len(expected)
        torch.testing.assert_close(
            torch.from_numpy(said), expected[rows, : said.shape[1]], atol=2e-6, rtol=0
        )


IN_BFLOAT16: list[tuple[str, int, dict[str, int]]] = [  # others: test_matrix_bfloat16
    ("llama", 2, {}),
    ("llama", 2, {"context": 2}),
    ("llama", 2, {"tensor": 2}),
]


def in_bfloat16(path: str, **sizes: int) -> Config:
    cfg = settings(path)
    cfg.trainer.policy.model.dtype = "bfloat16"
    cfg.trainer.parallel.context, cfg.trainer.parallel.tensor = (
        sizes.get("context", 1),
        sizes.get("tensor", 1),
    )
    return cfg


def of_one_in_bfloat16(path: str, rows: int) -> torch.Tensor:
    cfg = in_bfloat16(path)
    cfg.trainer.micro_train_batch_size_per_gpu = rows
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    worker.forward_backward(ragged())
    return gradient(worker)


@pytest.mark.matrix
@pytest.mark.slow
def test_in_bfloat16_ranks_differ_no_more_than_one_does_from_itself_in_another_order(
    shapes: dict[str, str], ranks: Callable[[int], Ranks]
) -> None:
    noise, alone = {}, {}
    for name in {name for name, _, _ in IN_BFLOAT16}:
        alone[name] = of_one_in_bfloat16(shapes[name], 0)
        noise[name] = max(
            distance(of_one_in_bfloat16(shapes[name], rows), alone[name]) for rows in (1, 2)
        )
    for name, count, sizes in IN_BFLOAT16:
        ranks(count).set_up(PolicyWorker, in_bfloat16(shapes[name], **sizes))
        found = torch.from_numpy(ranks(count).call(step)[0][2])
        assert distance(found, alone[name]) < 1.25 * noise[name], (name, count, sizes)


def test_parts_are_multiplied_to_float32_on_any_device() -> None:
    """By torch's fake tensors for the product on a GPU, without numbers."""
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            left, right = (
                torch.empty(shape, device=device, dtype=torch.bfloat16)
                for shape in ((3, 8), (8, 5))
            )
            found = sums._wide(left, right)
            assert (found.shape, found.dtype, found.device.type) == ((3, 5), torch.float32, device)


def set_adapters(rank: Rank) -> None:
    """B of each adapter is not 0, so that A has a gradient; the same on any ranks."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in rank.worker.backend.model.named_parameters():
        if ".lora_B." in name:
            copy_own_part(parameter, torch.randn(parameter.shape, generator=generator) / 10)


def merged(rank: Rank) -> dict[str, Any]:
    weights = full_weights(rank.worker.backend.sharded_weights(), torch.float32)
    return {name: weight.numpy() for name, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [
        ("llama", 2, {"context": 2}),
        ("qwen3_tied", 2, {"tensor": 2}),
        ("qwen3_moe", 4, {"tensor": 2}),
    ],
    ids=str,
)
def test_adapters_train_on_split_matrices(
    shapes: dict[str, str],
    name: str,
    count: int,
    sizes: dict[str, int],
    ranks: Callable[[int], Ranks],
) -> None:
    cfg = parallel(shapes[name])
    cfg.trainer.policy.lora.rank = 4
    alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
    alone.worker.setup()
    set_adapters(alone)
    logprobs = alone.worker.logprobs(ragged())
    alone.worker.forward_backward(ragged())
    expected = gradient(alone.worker)
    metrics = step_metrics(alone.worker)
    cfg = parallel(shapes[name], **sizes)
    cfg.trainer.policy.lora.rank = 4
    ranks(count).set_up(PolicyWorker, cfg)
    ranks(count).call(set_adapters)
    for rows, said, found, told in ranks(count).call(step):
        torch.testing.assert_close(
            torch.from_numpy(said), logprobs[rows, : said.shape[1]], atol=2e-6, rtol=0
        )
        assert distance(torch.from_numpy(found), expected) < (1.5e-6 if "tensor" in sizes else 1e-6)
        assert told == pytest.approx(metrics, rel=1e-5)
    expected_weights = merged(alone)
    for weights in ranks(count).call(merged):
        assert weights.keys() == expected_weights.keys()
        assert all(abs(weights[n] - expected_weights[n]).max() < 1e-5 for n in weights)


def compared(rank: Rank) -> Any:
    """A teacher's distributions, and the gradient of distillation to them."""
    worker, batch = rank.worker, ragged()
    rows = split_for_ranks(batch, worker.backend.spec.mesh_shape.data)[
        worker.backend.spec.mesh_shape.data_rank(rank.rank)
    ]
    mine = batch.select(rows).trim()
    mine.teacher_top_k = TeacherWorker.top_logprobs(worker, mine) * 1.1
    mine.teacher_top_k[..., :4] /= 1.1
    worker.forward_backward(mine)
    return rows.numpy(), mine.teacher_top_k.numpy(), gradient(worker).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"context": 2}, {}], ids=str)
def test_a_teachers_likeliest_tokens_are_one_ranks(
    shapes: dict[str, str], sizes: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    """Also with a vocabulary that is split, and in chunks, as for long rows."""
    cfg = parallel(shapes["qwen3_tied"], **sizes)
    cfg.trainer.teacher.model.path, cfg.trainer.teacher.top_k = shapes["qwen3_tied"], 4
    alone = PolicyWorker(cfg, threads=1)
    cfg.trainer.parallel.context = cfg.trainer.parallel.tensor = 1
    alone.setup()
    with patch("skyasync.models.token_model.MAX_LOGITS", 96 * 5):
        _, said, expected = compared(Rank(0, 1, alone))
    ranks(2).set_up(PolicyWorker, parallel_of(cfg, sizes))
    for rows, found, gradients in ranks(2).call(compared):
        torch.testing.assert_close(
            torch.from_numpy(found),
            torch.from_numpy(said)[rows, : found.shape[1]],
            atol=1e-5,
            rtol=0,
        )
        assert distance(torch.from_numpy(gradients), torch.from_numpy(expected)) < 1e-6


def parallel_of(cfg: Config, sizes: dict[str, int]) -> Config:
    vars(cfg.trainer.parallel).update(sizes)
    return cfg


def forgetful(rank: Rank) -> str:
    """An update by a plan that leaves out the norms of heads."""
    with patch.object(NormOfOwnHeads, "context_around_forward", lambda *_: nullcontext()):
        rank.worker.forward_backward(ragged())
    with pytest.raises(UserError) as found:
        rank.worker.optimizer_step()
    return str(found.value)


def test_a_plan_that_forgets_a_parameter_is_found_out_before_a_weight_changes(
    shapes: dict[str, str], ranks: Callable[[int], Ranks]
) -> None:
    ranks(2).set_up(PolicyWorker, parallel(shapes["qwen3_tied"], tensor=2))
    for line in ranks(2).call(forgetful):
        assert "layers.0.self_attn.q_norm.weight" in line and "trainer.parallel.tensor=1" in line


def go_on(rank: Rank, loaded: str, folder: str) -> tuple[str, str, Any]:
    """Digests of the whole state as loaded and after another step, which is saved; the published weights."""
    worker = rank.worker
    if loaded:
        worker.load(loaded)
    before = calls.digest_of_whole(worker)
    batch = ragged()
    rows = split_for_ranks(batch, worker.backend.spec.mesh_shape.data)[
        worker.backend.spec.mesh_shape.data_rank(rank.rank)
    ]
    worker.update_policy(batch.select(rows).trim())
    worker.save(folder)
    written = worker.transfer_weights("file", "write")
    path = written and written[0]
    published = (
        {name: tensor.clone().numpy() for name, tensor in read_weights(path).items()}
        if path
        else {}
    )
    if path:
        worker.transfer_weights("file", "remove", path)
    worker.export(f"{folder}_export")
    return before, calls.digest_of_whole(worker), published


@pytest.mark.matrix
@pytest.mark.slow
def test_any_mesh_resumes_from_any_others_checkpoint_and_publishes_whole_weights(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """A mixture of experts with tied embeddings, divided in several ways in turn; the last way twice."""
    torch.manual_seed(0)
    experts = {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    path = str(tmp_path / "model")
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**WIDE, **experts)).save_pretrained(path)
    ways = [(4, {"tensor": 2}), (1, {}), (2, {"context": 2}), (2, {"tensor": 2})]
    state = ""
    for number, (count, sizes) in enumerate(ways):
        ranks(count).set_up(PolicyWorker, parallel(path, **sizes))
        loaded = str(tmp_path / str(number - 1)) if number else ""
        found = ranks(count).call(go_on, loaded, str(tmp_path / str(number)))
        assert not state or {before for before, _, _ in found} == {state}, (
            f"{sizes} has loaded other weights"
        )
        state, published = found[0][1:]
        assert {after for _, after, _ in found} == {state}, "the ranks differ"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{number}_export")
        assert {n for n, _ in model.named_parameters()} == published.keys()
        assert all(
            torch.equal(w, torch.from_numpy(published[n])) for n, w in model.named_parameters()
        )
    ranks(2).set_up(PolicyWorker, parallel(path, tensor=2))
    again = ranks(2).call(go_on, str(tmp_path / "2"), str(tmp_path / "again"))
    assert again[0][1] == state


def first(rank: Rank) -> Any:
    """The model as loaded, and log-probabilities of the distribution that was sampled from."""
    worker = rank.worker
    weights = calls.whole_weights(worker)
    return {n: w.numpy() for n, w in weights.items()}, worker.logprobs(ragged()).numpy()


def test_what_is_loaded_is_the_files_and_filters_see_all_logits(
    shapes: dict[str, str], ranks: Callable[[int], Ranks]
) -> None:
    """With experts whose files must be merged, and a vocabulary that is gathered if sampling has filters."""
    path = shapes["qwen3_moe"]
    cfg = parallel(path, tensor=2)
    cfg.generator.sampling_params.top_p, cfg.generator.sampling_params.temperature = 0.9, 0.7
    alone = parallel(path)
    alone.generator.sampling_params = cfg.generator.sampling_params
    worker = PolicyWorker(alone, threads=1)
    worker.setup()
    expected = calls.whole_weights(worker)
    ranks(2).set_up(PolicyWorker, cfg)
    for found, logprobs in ranks(2).call(first):
        calls.equal({n: torch.from_numpy(w) for n, w in found.items()}, expected)
        torch.testing.assert_close(
            torch.from_numpy(logprobs), worker.logprobs(ragged()), atol=2e-6, rtol=0
        )
