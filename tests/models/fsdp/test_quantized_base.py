"""A quantized frozen base: outputs, training, syncs and exports use the numbers that the codes represent."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.config.schema import Config
from skyasync.models.fsdp import checkpoint
from skyasync.models.fsdp.quantized_base import QuantizedRows, round_to_quantized
from skyasync.models.heads import load_causal_lm
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.conftest import config_for, make_batch, step_metrics
from tests.workers.processes import Rank, Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("bitsandbytes"), reason="the extra quant"),
]
KINDS = ["nf4", "int8"]


def adapted(path: str, kind: str) -> Config:
    cfg = config_for(path)
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.base_dtype = 4, kind
    return cfg


def started(cfg: Config) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    return worker


def rounded(path: str, kind: str, folder: Path) -> str:
    """A folder of the model whose weights are the numbers that the codes represent."""
    model = load_causal_lm(path, torch.float32)
    model.requires_grad_(False)
    round_to_quantized(model, kind)
    model.save_pretrained(folder)
    return str(folder)


def learnt(worker: PolicyWorker) -> tuple[Tensor, dict[str, float], Tensor]:
    """Two steps: the result of the second."""
    for _ in range(2):
        worker.forward_backward(make_batch())
        gradient = torch.cat(
            [_whole(p.grad) for p in worker.backend.model.parameters() if p.grad is not None]
        )
        metrics = step_metrics(worker)
    return gradient, metrics, worker.logprobs(make_batch())


def _whole(tensor: Tensor) -> Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().clone()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_codes_alone_and_together(kind: str) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    whole, piece = QuantizedRows.of(weight, kind), QuantizedRows.of(weight[8:16], kind)
    assert torch.equal(whole.numbers()[8:16], piece.numbers())
    assert float((whole.numbers() - weight).abs().max()) < {"nf4": 0.6, "int8": 0.02}[kind]
    assert whole.packed.nbytes < weight.nbytes * {"nf4": 0.15, "int8": 0.28}[kind]
    assert torch.equal(whole @ weight.T, whole.numbers() @ weight.T) and whole.shape == weight.shape


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_as_on_the_dequantized_weights(
    untied_model: str, tmp_path: Path, kind: str
) -> None:
    found = started(adapted(untied_model, kind))
    held = [
        p.to_local()
        for p in found.backend.model.model.parameters()
        if isinstance(p, DTensor) and not p.requires_grad
    ]
    codes = [p for p in held if isinstance(p, QuantizedRows)]
    assert len(codes) == 2 * 7, "each layer's linear maps, without embeddings and head"
    path = rounded(untied_model, kind, tmp_path / "rounded")
    expected = started(adapted(path, ""))
    batch = make_batch()
    torch.testing.assert_close(
        found.base_logprobs(batch), expected.base_logprobs(batch), atol=1e-6, rtol=0
    )
    assert (
        float(
            (found.base_logprobs(batch) - started(config_for(untied_model)).logprobs(batch))
            .abs()
            .max()
        )
        > 1e-4
    )
    gradients, metrics, logprobs = learnt(found)
    wanted, of_plain, after = learnt(expected)
    assert float((gradients - wanted).norm() / wanted.norm()) < 1e-6
    assert metrics == pytest.approx(of_plain, rel=1e-5)
    torch.testing.assert_close(logprobs, after, atol=1e-5, rtol=0)
    sent, plain = (
        checkpoint.full_weights(w.backend.sharded_weights(), torch.float32)
        for w in (found, expected)
    )
    assert sent.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(sent[name], weight, atol=1e-6, rtol=0)
    kept = [p for p in found.backend.model.model.parameters() if p.shape == (64, 32)]
    assert kept and all(isinstance(p.to_local(), QuantizedRows) for p in kept)


def of_rank(rank: Rank) -> tuple[Any, dict[str, float]]:
    batch = make_batch(groups=5)
    mesh = rank.worker.backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
    rank.worker.forward_backward(batch.select(rows).trim())
    gradient = torch.cat(
        [_whole(p.grad) for p in rank.worker.backend.model.parameters() if p.grad is not None]
    )
    return gradient.numpy(), step_metrics(rank.worker)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("count", "kind", "replicas", "context"),
    [
        (2, "nf4", 1, 1),
        pytest.param(2, "nf4", 1, 2, marks=pytest.mark.matrix),
        pytest.param(4, "int8", 2, 1, marks=pytest.mark.matrix),
        pytest.param(4, "nf4", 2, 1, marks=pytest.mark.matrix),
    ],
)
def test_the_gradient_on_several_ranks_is_that_of_one(
    untied_model: str,
    ranks: Callable[[int], Ranks],
    count: int,
    kind: str,
    replicas: int,
    context: int,
) -> None:
    cfg = adapted(untied_model, kind)
    expected, metrics = of_rank(Rank(0, 1, started(cfg)))
    cfg.trainer.policy.fsdp_size, cfg.trainer.parallel.context = (
        count // replicas if replicas > 1 else 0,
        context,
    )
    ranks(count).set_up(PolicyWorker, cfg)
    for found, other in ranks(count).call(of_rank):
        difference = torch.from_numpy(found) - torch.from_numpy(expected)
        assert float(difference.norm() / torch.from_numpy(expected).norm()) < 1e-6
        assert other == pytest.approx(metrics, rel=1e-5)


def test_a_checkpoint_has_adapters_alone_and_goes_on_bit_by_bit(
    untied_model: str, tmp_path: Path
) -> None:
    cfg = adapted(untied_model, "nf4")
    original, resumed = started(cfg), started(cfg)
    learnt(original)
    original.save(str(tmp_path / "saved"))
    expected = learnt(original)
    resumed.load(str(tmp_path / "saved"))
    found = learnt(resumed)
    assert (
        torch.equal(found[0], expected[0])
        and found[1] == expected[1]
        and torch.equal(found[2], expected[2])
    )
    original.export(str(tmp_path / "exported"))
    again = started(config_for(str(tmp_path / "exported")))
    torch.testing.assert_close(again.logprobs(make_batch()), expected[2], atol=1e-5, rtol=0)


def test_bfloat16_computes_with_rounded_numbers(untied_model: str) -> None:
    cfg = adapted(untied_model, "nf4")
    cfg.trainer.policy.model.dtype = "bfloat16"
    worker = started(cfg)
    exact = started(adapted(untied_model, "nf4"))
    difference = (worker.logprobs(make_batch()) - exact.logprobs(make_batch())).abs().max()
    assert 0 < float(difference) < 0.5
    assert learnt(worker)[1]["grad_norm"] > 0
