"""The cosine of consecutive gradients, and its limit: by hand, as a property, and on any ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from skyasync.config.schema import Config
from skyasync.errors import NonFiniteError
from skyasync.models.fsdp import gradient_projection
from skyasync.models.fsdp.gradient_projection import PREVIOUS, factor_of_previous
from skyasync.models.fsdp.optimizers import TrainedPart
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.test_shapes import distance, gradient, ragged, settings
from tests.workers import calls
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks
from tests.workers.test_shared_critic import learning

LIMIT = 0.1


def part_of(sizes: list[int], limit: float, max_grad_norm: float = 0.0) -> TrainedPart:
    module = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    return TrainedPart(module, torch.optim.SGD(module.parameters(), lr=0.0), max_grad_norm, limit)


def step(part: TrainedPart, gradients: list[Tensor]) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics of an optimizer step, and the gradient that the optimizer gets."""
    for parameter, each in zip(part.module.parameters(), gradients, strict=True):
        parameter.grad = each.clone()
    part.measure(1.0, None)
    metrics = part.limit_cosine(None)
    part.clip()
    result = [p.grad.clone() for p in part.module.parameters() if p.grad is not None]
    part.optimizer.step()
    part.drop_gradient()
    return metrics, result


# ---------------------------------------------------------------- by hand


def test_a_triangle_of_three_four_and_five() -> None:
    """g = (3, 4), p = (2, 0): c = 0.6. At the limit 0.28, whose sine is 0.96, 4 of 4 and 4 * 7 / 24 = 7 / 6 stay."""
    part = part_of([1, 1], 0.28)
    assert step(part, [torch.tensor([2.0]), torch.tensor([0.0])])[0] == {}
    metrics, (along, across) = step(part, [torch.tensor([3.0]), torch.tensor([4.0])])
    assert metrics == {"grad_cosine": pytest.approx(0.6)}
    assert (float(along), float(across)) == (pytest.approx(7 / 6, rel=1e-6), 4.0)
    assert factor_of_previous(0.6, 0.28) == pytest.approx(11 / 30)


def test_the_previous_gradient_is_the_one_before_projection_and_clipping() -> None:
    part = part_of([2], 0.28, max_grad_norm=1.0)
    step(part, [torch.tensor([2.0, 0.0])])
    _, (clipped,) = step(part, [torch.tensor([3.0, 4.0])])
    assert clipped.tolist() == pytest.approx([0.28, 0.96], abs=1e-5), (
        "the projected gradient is clipped"
    )
    metrics, _ = step(part, [torch.tensor([4.0, -3.0])])
    assert metrics["grad_cosine"] == 0.0, "(4, -3) is orthogonal to (3, 4)"


def test_what_repeats_the_previous_gradient_is_removed() -> None:
    part = part_of([2], 0.5)
    step(part, [torch.tensor([1.0, -2.0])])
    metrics, (rest,) = step(part, [torch.tensor([2.0, -4.0])])
    assert metrics["grad_cosine"] == pytest.approx(1.0) and rest.abs().max() < 1e-6


def test_an_opposite_gradient_and_one_without_length_stay() -> None:
    part = part_of([2], 0.1)
    step(part, [torch.tensor([1.0, 1.0])])
    assert step(part, [torch.tensor([-1.0, -1.0])])[0] == {"grad_cosine": pytest.approx(-1.0)}
    for _ in range(2):  # the second compares nothing with nothing
        metrics, (rest,) = step(part, [torch.zeros(2)])
        assert metrics == {} and not rest.any()
    assert step(part, [torch.ones(2)])[0] == {}


def test_a_parameter_may_be_one_number() -> None:
    part = TrainedPart(
        scalar := nn.ParameterList([nn.Parameter(torch.zeros(()))]),
        torch.optim.SGD(scalar),
        0.0,
        0.5,
    )
    step(part, [torch.tensor(2.0)])
    assert step(part, [torch.tensor(3.0)]) == ({"grad_cosine": 1.0}, [torch.tensor(0.0)])


def test_a_parameter_without_a_gradient_in_one_of_two_steps_is_left_out() -> None:
    part = part_of([2, 1], 0.28)
    first, second = part.module.parameters()
    step(part, [torch.tensor([2.0, 0.0]), torch.tensor([7.0])])
    first.grad = torch.tensor([3.0, 4.0])
    part.measure(1.0, None)
    assert part.limit_cosine(None) == {"grad_cosine": pytest.approx(0.6)}
    assert second.grad is None and part.optimizer.state[second][PREVIOUS].tolist() == [7.0]


# ---------------------------------------------------------------- for all gradients

numbers = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
pairs = st.integers(1, 12).flatmap(
    lambda size: st.tuples(
        *[st.lists(numbers, min_size=size, max_size=size).map(torch.tensor) for _ in range(2)]
    )
)


@given(pairs, st.floats(0.01, 1.0), st.integers(1, 4), st.booleans())
def test_the_cosine_is_at_most_the_limit_and_the_rest_stays(
    both: tuple[Tensor, Tensor], limit: float, rows: int, aligned: bool
) -> None:
    previous, now = both
    if aligned:
        now = now + 3 * previous
    assume(previous.norm() > 0 and now.norm() > 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradient_projection, "STEPPED_AT_ONCE", rows)
        part = part_of([len(now)], limit)
        step(part, [previous])
        metrics, (projected,) = step(part, [now])
    p, g, left = previous.double(), now.double(), projected.double()
    cosine, rounding = metrics["grad_cosine"], 1e-6 * float(g.norm())
    assert cosine == pytest.approx(float(g @ p / (g.norm() * p.norm())), abs=1e-9)
    if cosine <= limit:
        assert torch.equal(projected, now)
        return
    assert float(left @ p / p.norm()) == pytest.approx(limit * float(left.norm()), abs=rounding)
    unit = p / p.norm()
    assert torch.allclose(left - (left @ unit) * unit, g - (g @ unit) * unit, rtol=0, atol=rounding)
    assert float(left @ g) >= -rounding * float(g.norm())
    assert float(left.norm()) <= float(g.norm()) + rounding
    assert torch.equal(part.optimizer.state[next(part.module.parameters())][PREVIOUS], now)


# ---------------------------------------------------------------- workers


def limited(path: str, limit: float = LIMIT) -> Config:
    """Steps are almost linear in the gradient, so that rounding does not grow."""
    cfg = settings(path)
    options = cfg.trainer.policy.optimizer_config
    options.max_grad_cosine, options.lr, options.eps = limit, 0.1, 1.0
    return cfg


def steps(rank: Rank) -> list[tuple[Any, float | None, Any]]:
    """Of each step: the whole gradient, its cosine, and the whole gradient that the optimizer gets."""
    worker, seen, result = rank.worker, list[Any](), []
    worker.backend.optimizer.register_step_pre_hook(
        lambda *_: seen.append(gradient(worker).numpy())
    )
    mesh = worker.backend.spec.mesh_shape
    batch = ragged()
    for _ in range(3):
        rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
        worker.forward_backward(batch.select(rows).trim())
        before = gradient(worker).numpy()
        cosine = worker.optimizer_step().get("grad_cosine")
        result.append((before, cosine, seen[-1]))
    return result


def check(result: list[tuple[Any, float | None, Any]]) -> list[float]:
    """The cosines, after a check of every projection by the whole gradients."""
    whole = [
        [torch.from_numpy(each).double() for each in (before, after)] for before, _, after in result
    ]
    assert result[0][1] is None and torch.equal(*whole[0])
    cosines = []
    for (p, _), (g, projected), (_, cosine, _) in zip(whole, whole[1:], result[1:], strict=False):
        expected = float(g @ p / (g.norm() * p.norm()))
        assert cosine == pytest.approx(expected, abs=1e-6) and expected > LIMIT
        along = float(g @ p / p.norm())
        shorter = math.sqrt(1 - expected**2) * float(g.norm()) * LIMIT / math.sqrt(1 - LIMIT**2)
        assert distance(projected, g + (shorter - along) * p / p.norm()) < 1e-6
        cosines.append(expected)
    return cosines


def alone(cfg: Config) -> Rank:
    rank = Rank(0, 1, PolicyWorker(cfg, threads=1))
    rank.worker.setup()
    return rank


def adapted(cfg: Config) -> None:
    cfg.trainer.policy.lora.rank = 4


def in_bfloat16(cfg: Config) -> None:
    cfg.trainer.policy.model.dtype = "bfloat16"


def on_the_tensor_axis(cfg: Config) -> None:
    cfg.trainer.parallel.tensor = 2


def replicated(cfg: Config) -> None:
    cfg.trainer.policy.fsdp_size = 2


def adapted_on_the_tensor_axis(cfg: Config) -> None:
    adapted(cfg)
    on_the_tensor_axis(cfg)


WAYS: list[Any] = [
    (2, None, 1e-5),
    (2, in_bfloat16, 0.05),  # whose micro-batches differ with the ranks
    pytest.param(2, adapted, 1e-5, marks=pytest.mark.matrix),
    (2, on_the_tensor_axis, 1e-5),
    *(
        pytest.param(4, change, 1e-5, marks=[pytest.mark.slow, pytest.mark.matrix])
        for change in (None, replicated, on_the_tensor_axis, adapted_on_the_tensor_axis)
    ),
]


@pytest.mark.parametrize(("count", "change", "tolerance"), WAYS)
def test_ranks_project_as_one_rank_does(
    count: int, change: Callable[[Config], None] | None, tolerance: float, tied_model: str,
    ranks: Callable[[int], Ranks],
) -> None:  # fmt: skip
    one, several = limited(tied_model), limited(tied_model)
    if change:
        change(several)
    one.trainer.policy.lora.rank = several.trainer.policy.lora.rank
    one.trainer.policy.model.dtype = several.trainer.policy.model.dtype
    expected = check(steps(alone(one)))
    ranks(count).set_up(PolicyWorker, several)
    results = ranks(count).call(steps)
    assert len({tuple(cosine for _, cosine, _ in result) for result in results}) == 1, (
        "the ranks differ"
    )
    for result in results:
        assert check(result) == pytest.approx(expected, abs=tolerance)


def cosines(rank: Rank) -> list[float | None]:
    return [cosine for _, cosine, _ in steps(rank)]


@pytest.mark.slow
def test_stages_count_embeddings_that_both_have_once(
    tied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    cfg = limited(tied_model)
    cfg.trainer.parallel.pipeline = 2
    ranks(2).set_up(PolicyWorker, cfg)
    first, second = ranks(2).call(cosines)
    assert first == second and first[1:] == pytest.approx(
        check(steps(alone(limited(tied_model)))), abs=1e-5
    )


def both_parts(rank: Rank) -> dict[str, float]:
    """Metrics of the third step of a policy with a critic on its layers."""
    batch = learning()
    rows = split_for_ranks(batch, rank.count)[rank.rank]
    for _ in range(3):
        rank.worker.forward_backward(batch.select(rows).trim())
        metrics: dict[str, float] = rank.worker.optimizer_step()
    return metrics


@pytest.mark.slow
def test_a_critic_on_the_policys_layers_has_a_limit_of_its_own(
    tied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    cfg = limited(tied_model)
    cfg.trainer.algorithm.advantage_estimator, cfg.trainer.critic.backbone = "gae", "shared"
    expected = both_parts(alone(cfg))
    assert "grad_cosine" in expected and "critic/grad_cosine" not in expected
    cfg.trainer.critic.optimizer_config.max_grad_cosine = 0.2
    ranks(2).set_up(PolicyWorker, cfg)
    one, results = both_parts(alone(cfg)), ranks(2).call(both_parts)
    for metrics in results:
        for name in ("grad_cosine", "critic/grad_cosine"):
            assert metrics[name] == pytest.approx(one[name], abs=1e-3)


def trained(cfg: Config) -> tuple[list[dict[str, float]], PolicyWorker]:
    worker = alone(cfg).worker
    return [worker.update_policy(make_batch(seed=seed)) for seed in range(3)], worker


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_measuring_changes_no_bit_and_without_it_nothing_is_stored(
    tied_model: str, name: str
) -> None:
    cfg = config_for(tied_model)
    cfg.trainer.policy.optimizer_config.name = name
    plain, without = trained(cfg)
    cfg.trainer.policy.optimizer_config.max_grad_cosine = 1.0
    measured, with_it = trained(cfg)
    assert [m.pop("grad_cosine", None) is None for m in measured] == [True, False, False]
    assert measured == plain
    calls.equal(calls.whole_weights(with_it), calls.whole_weights(without))
    assert not any(PREVIOUS in state for state in without.backend.optimizer.state.values())
    stored = [state[PREVIOUS] for state in with_it.backend.optimizer.state.values()]
    assert [s.shape for s in stored] == [p.shape for p in with_it.backend.optimizer.state]
    assert {s.dtype for s in stored} == {torch.float32}


def test_a_gradient_that_is_dropped_is_no_previous_one(tied_model: str) -> None:
    cfg = limited(tied_model)
    _, expected = trained(cfg)
    _, worker = trained(cfg)
    broken = make_batch(seed=3)
    broken.advantages[broken.loss_mask] = float("nan")
    with pytest.raises(NonFiniteError):
        worker.update_policy(broken)
    assert worker.update_policy(make_batch(seed=4)) == expected.update_policy(make_batch(seed=4))


# ---------------------------------------------------------------- checkpoints


def written(rank: Rank, folder: str) -> tuple[str, str]:
    """Digests of the whole state that is saved, and of every rank's after another step."""
    for _ in range(2):
        saved = calls.step_and_save(rank, folder + f"/{rank.worker.backend.step}")
    steps(rank)
    return saved, calls.digest(rank.worker)


def resumed(rank: Rank, folder: str) -> tuple[str, str]:
    loaded = calls.load_whole(rank, folder + "/1")
    steps(rank)
    return loaded, calls.digest(rank.worker)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_a_resumed_run_has_the_previous_gradient(
    tied_model: str, tmp_path: Path, name: str
) -> None:
    cfg = limited(tied_model)
    cfg.trainer.policy.optimizer_config.name = name
    assert written(alone(cfg), str(tmp_path)) == resumed(alone(cfg), str(tmp_path))


def test_two_ranks_resume_and_one_reads_what_they_wrote(
    tied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2).set_up(PolicyWorker, limited(tied_model))
    expected = ranks(2).call(written, str(tmp_path))
    ranks(2).set_up(PolicyWorker, limited(tied_model))
    assert ranks(2).call(resumed, str(tmp_path)) == expected
    assert calls.load_whole(alone(limited(tied_model)), str(tmp_path / "1")) == expected[0][0]


@pytest.mark.parametrize(("before", "after"), [(0.0, LIMIT), (LIMIT, 0.0)])
def test_a_resumed_run_may_turn_the_limit_on_or_off(
    tied_model: str, tmp_path: Path, before: float, after: float
) -> None:
    _, worker = trained(limited(tied_model, before))
    worker.save(str(tmp_path))
    other = alone(limited(tied_model, after)).worker
    other.load(str(tmp_path))
    calls.equal(calls.whole_weights(other), calls.whole_weights(worker))
    assert not any(PREVIOUS in state for state in other.backend.optimizer.state.values())
    first, second = (other.update_policy(make_batch(seed=seed)) for seed in (3, 4))
    assert "grad_cosine" not in first and ("grad_cosine" in second) == bool(after)
