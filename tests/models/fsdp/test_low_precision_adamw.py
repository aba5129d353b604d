"""AdamW with a low-precision state: steps are AdamW's, small ones are not lost, and ranks do not change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.fsdp.low_precision_adamw import (
    LowPrecisionAdamW,
    block_of,
    codebook,
    decode,
    encode,
    linear_indices,
    random_bits,
    round_stochastically,
)
from skyasync.workers.policy import PolicyWorker
from tests.workers import calls
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow

KINDS = {
    "8bit": (True, torch.float32),
    "bfloat16": (False, torch.bfloat16),
    "both": (True, torch.bfloat16),
}


def short(path: str, kind: str) -> Config:
    cfg = config_for(path)
    eight_bits, dtype = KINDS[kind]
    optimizer = cfg.trainer.policy.optimizer_config
    optimizer.name, optimizer.bf16_stochastic_round = (
        "adamw_8bit" if eight_bits else "adamw",
        dtype == torch.bfloat16,
    )
    cfg.trainer.policy.model.dtype = str(dtype).removeprefix("torch.")
    optimizer.weight_decay = 0.1
    return cfg


# ------------------------------------------------------------ arithmetic


def test_what_bfloat16_can_say_stays_and_the_rest_is_right_on_average() -> None:
    where = linear_indices(torch.empty(400, 500))
    chance, other, _ = random_bits(where, key=1)
    assert chance.shape == (400, 500) and int(chance.min()) >= 0 and int(chance.max()) < 1 << 16
    assert not torch.equal(chance, other) and not torch.equal(chance, random_bits(where, key=2)[0])
    for value in (1.0, -0.0078125, 0.0):
        assert (round_stochastically(torch.full((400, 500), value), chance) == value).all()
    rounded = round_stochastically(torch.full((400, 500), -1.002), chance)
    assert set(rounded.unique().tolist()) == {-1.0, -1.0078125}
    assert float(rounded.double().mean()) == pytest.approx(-1.002, abs=3e-5)


def test_a_place_has_its_chance_whichever_rows_are_asked_for() -> None:
    rows, columns = linear_indices(torch.empty(6, 5))
    whole = random_bits([rows, columns], 3)
    part = random_bits([rows[2:4], columns], 3)
    assert all(torch.equal(one, all_[2:4]) for one, all_ in zip(part, whole, strict=True))


@pytest.mark.parametrize(("signed", "most"), [(True, 0.012), (False, 0.008)])
def test_eight_bits_are_near_what_they_stand_for(signed: bool, most: float) -> None:
    values = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square() + 1e-12
    codes, scales = encode(values, 256, signed=signed)
    assert codes.dtype == torch.uint8 and scales.shape == (8, 2)
    found = decode(codes, scales, signed=signed)
    assert float((found - values).norm() / values.norm()) < most
    assert signed or bool((found > 0).all()), "a step would divide by 0"
    assert not decode(*encode(torch.zeros(2, 32), 32, signed=signed), signed=signed).any()
    codes = codebook(signed, values.device)
    assert len(codes) == 256 and bool((codes.diff() > 0).all())


@pytest.mark.parametrize(
    ("shape", "block"), [((9, 2560), 256), ((4, 6, 43), 129), ((5, 257), 0), ((512,), 0)]
)
def test_blocks_divide_rows(shape: tuple[int, ...], block: int) -> None:
    assert block_of(torch.Size(shape)) == block


# ------------------------------------------------------------ steps


def walked(
    optimizer: type[torch.optim.AdamW],
    start: Tensor,
    lr: float,
    gradients: list[Tensor],
    **options: Any,
) -> Tensor:
    """The change of a parameter, in float64."""
    parameter = nn.Parameter(start.clone())
    made = optimizer([{"params": [parameter]}], lr=lr, weight_decay=0.0, **options)
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        made.step()
    return parameter.detach().double() - start.double()


@pytest.mark.parametrize("eight_bits", [False, True])
def test_steps_that_bfloat16_loses_are_learnt_on_average(eight_bits: bool) -> None:
    start = (torch.rand(40, 256, generator=torch.Generator().manual_seed(0)) / 2 + 0.5).bfloat16()
    gradients = [torch.ones(40, 256)] * 100
    assert not walked(torch.optim.AdamW, start, 5e-6, gradients, fused=True).any()
    found = walked(
        LowPrecisionAdamW, start, 5e-6, gradients, eight_bits=eight_bits, seed=0, fused=True
    )
    assert float(found.mean()) == pytest.approx(-5e-4, rel=0.1)


@pytest.mark.parametrize(("kind", "most"), [("8bit", 0.03), ("bfloat16", 0.1), ("both", 0.1)])
def test_steps_are_near_those_of_adamw(kind: str, most: float) -> None:
    """Gradients that differ by a factor of ten within a block. For bfloat16 the distance is the weights' spacing."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** -torch.rand(16, 512, generator=generator)
    gradients = [scale * (torch.randn(16, 512, generator=generator) + 0.5) for _ in range(60)]
    eight_bits, dtype = KINDS[kind]
    start = torch.randn(16, 512, generator=generator).bfloat16().to(dtype)
    expected = walked(torch.optim.AdamW, start.float(), 1e-2, gradients, fused=True)
    found = walked(
        LowPrecisionAdamW, start, 1e-2, gradients, eight_bits=eight_bits, seed=0, fused=True
    )
    difference = float((found - expected).norm() / expected.norm())
    assert difference < most


# ------------------------------------------------------------ ranks and checkpoints


def of_one_gradient(rank: Rank, seeds: list[int]) -> list[Any]:
    """Every parameter after steps with given gradients, whole."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in rank.worker.backend.model.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad_dtype = None
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = whole
        rank.worker.backend.optimizer.step()
    return [tensor.float().numpy() for tensor in calls.whole_weights(rank.worker).values()]


@pytest.mark.parametrize(("count", "tensor", "fsdp_size"), [(2, 2, 0), pytest.param(4, 2, 0, marks=pytest.mark.slow),
                                                         pytest.param(4, 1, 2, marks=pytest.mark.slow)])  # fmt: skip
def test_chance_is_the_same_for_split_matrices_and_for_replicas(
    count: int, tensor: int, fsdp_size: int, untied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    cfg = short(untied_model, "bfloat16")
    alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
    alone.worker.setup()
    expected = of_one_gradient(alone, [1, 2])
    cfg.trainer.parallel.tensor, cfg.trainer.policy.fsdp_size = tensor, fsdp_size
    ranks(count).set_up(PolicyWorker, cfg)
    for found in ranks(count).call(of_one_gradient, [1, 2]):
        assert all((one == other).all() for one, other in zip(found, expected, strict=True))


def on(rank: Rank, folder: str) -> tuple[str, str]:
    """Digests after a step that is saved, and after another."""
    return calls.step_and_save(rank, folder), calls.step_and_save(rank, folder + "_next")


def again(rank: Rank, folder: str) -> tuple[str, str]:
    return calls.load_whole(rank, folder), calls.step_and_save(rank, folder + "_again")


@pytest.mark.parametrize(
    "kind",
    ["both", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("8bit", "bfloat16"))],
)
def test_ranks_change_nothing_and_checkpoints_are_resumed_by_the_same_and_read_by_others(
    kind: str, untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    cfg = short(untied_model, kind)
    alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
    alone.worker.setup()
    expected = of_one_gradient(alone, [1, 2])
    two = ranks(2)
    two.set_up(PolicyWorker, cfg)
    for found in two.call(of_one_gradient, [1, 2]):
        assert all((one == other).all() for one, other in zip(found, expected, strict=True))
    (saved, gone_on), other = two.call(on, str(tmp_path / "two"))
    assert other == (saved, gone_on)
    two.set_up(PolicyWorker, cfg)
    assert set(two.call(again, str(tmp_path / "two"))) == {(saved, gone_on)}
    assert calls.load_whole(alone, str(tmp_path / "two")) == saved
    after, _ = on(alone, str(tmp_path / "one"))
    assert set(two.call(calls.load_whole, str(tmp_path / "one"))) == {after}


def test_gradients_of_micro_batches_are_added_up_in_float32(untied_model: str) -> None:
    worker = PolicyWorker(short(untied_model, "bfloat16"), threads=1)
    worker.setup()
    assert {p.dtype for p in worker.backend.model.parameters()} == {torch.bfloat16}
    worker.forward_backward(make_batch())
    assert {p.grad.dtype for p in worker.backend.model.parameters() if p.grad is not None} == {
        torch.float32
    }
    assert worker.optimizer_step()["grad_norm"] > 0


# ------------------------------------------------------------ errors


def of(**settings: Any) -> Config:
    cfg = config_for("nowhere")
    for name, value in settings.items():
        setattr(cfg.trainer.policy.optimizer_config, name, value)
    return cfg


def adapters(cfg: Config) -> Config:
    cfg.trainer.policy.lora.rank = 4
    return cfg


def two_ranks_of_a_matrix(cfg: Config) -> Config:
    cfg.trainer.parallel.tensor = cfg.trainer.placement.policy_num_gpus_per_node = 2
    return cfg


def in_float32(cfg: Config) -> Config:
    cfg.trainer.policy.model.dtype = "float32"
    return cfg


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (of(name="muon", bf16_stochastic_round=True), ("bf16_stochastic_round=true", "name=muon")),
        (in_float32(of(bf16_stochastic_round=True)), ("bf16_stochastic_round=true", "model.dtype=float32")),
        (adapters(of(bf16_stochastic_round=True)), ("bf16_stochastic_round=true", "lora.rank=4")),
        (two_ranks_of_a_matrix(of(name="adamw_8bit")), ("name=adamw_8bit", "parallel.tensor=2")),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused(cfg: Config, named: tuple[str, str]) -> None:
    assert any(all(word in problem for word in named) for problem in check_config(cfg))


def test_a_device_whose_own_dtype_is_float32_is_refused(untied_model: str) -> None:
    cfg = config_for(untied_model)
    cfg.trainer.policy.optimizer_config.bf16_stochastic_round = True
    with pytest.raises(
        UserError, match=r"bf16_stochastic_round=true .* float32: set trainer\.policy\.model\.dtype"
    ):
        PolicyWorker(cfg, threads=1).setup()
