"""Rows that share a prefix, also one with loss tokens, are computed as a tree, with the separate rows' gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

from skyasync.models import packing
from skyasync.models.backend import LOGPROBS, TOKEN_LOGPROBS, OutputRequest
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.packing import MicroBatches, cheapest_bundles, plain_layout, sorted_rows
from skyasync.models.token_model import TokenModel
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.test_attention import by_flex as by_flex
from tests.workers.conftest import config_for, episodes
from tests.workers.processes import Rank, Ranks


def tree_size(batch: UpdateBatch) -> int:
    """Number of different prefixes of a group's rows."""
    rows = zip(
        batch.group_ids.tolist(),
        batch.tokens.tolist(),
        batch.attention_mask.sum(1).tolist(),
        strict=True,
    )
    return len({(group, *row[:end]) for group, row, length in rows for end in range(1, length + 1)})


def whole_trees(
    batch: UpdateBatch, max_tokens: int = 4096, **options: Any
) -> MicroBatches[UpdateBatch]:
    with patch.object(packing, "MIN_SAVED_TOKENS", 0.0):
        return MicroBatches(
            batch, max_tokens=max_tokens, share_prefixes=True, **{"hidden_size": 16, **options}
        )


@st.composite
def trees(draw: st.DrawFn) -> UpdateBatch:
    """Rows that extend prefixes of other rows, and differ in masks and advantages also at tokens that they share."""
    seed, words = draw(st.integers(0, 9999)), draw(st.sampled_from([2, 40]))
    drawn = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=drawn))

    rows: list[list[int]] = []
    groups: list[int] = []
    for group in range(draw(st.integers(1, 3))):
        own: list[list[int]] = []
        for _ in range(draw(st.integers(1, 7))):
            known = own[integer(0, len(own) - 1)] if own else []
            kept = known[: integer(0, len(known))]
            own.append(
                kept
                + torch.randint(
                    1, words + 1, (integer(0 if kept else 1, 12),), generator=drawn
                ).tolist()
            )
        rows += own
        groups += [group] * len(own)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([token for row in rows for token in row])
    loss_mask = mask & (torch.rand(mask.shape, generator=drawn) < 0.7)
    loss_mask[:, 0] = False
    order = torch.randperm(len(rows), generator=drawn)
    batch = UpdateBatch(
        tokens=tokens,
        attention_mask=mask,
        loss_mask=loss_mask,
        group_ids=torch.tensor(groups),
        behaviour_logprobs=-3 * torch.rand(mask.shape, generator=drawn),
        versions=torch.zeros(mask.shape, dtype=torch.int32),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(mask.shape),
        advantages=torch.randn(mask.shape, generator=drawn),
        loss_weights=torch.rand(mask.shape, generator=drawn) * loss_mask,
    )
    return batch.select(order)


@pytest.fixture(scope="module")
def exact_model() -> TokenModel:
    """A family that computes everything in float64 (Llama's norms are float32)."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = TokenModel(GPT2LMHeadModel(config).double())
    assert model.packs
    return model


def learned(
    model: TokenModel, batch: UpdateBatch, layouts: list[tuple[Tensor, Any]]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of a loss with a ratio to each row's own old log-probabilities."""
    model.zero_grad()
    logprobs = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for rows, layout in layouts:
        part = batch.select(rows).trim()
        current = model(layout)[LOGPROBS]
        ratio = (current - part.behaviour_logprobs).exp()
        (ratio * part.advantages * part.loss_weights).sum().backward()
        logprobs[rows, : current.shape[1]] = current.detach()
    return logprobs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@settings(max_examples=40, deadline=None)
@given(
    batch=trees(),
    packs=st.booleans(),
    max_tokens=st.sampled_from([16, 4096]),
    max_rows=st.sampled_from([0, 3]),
)
def test_a_trees_gradient_is_that_of_its_rows_one_by_one(
    exact_model: TokenModel, batch: UpdateBatch, packs: bool, max_tokens: int, max_rows: int
) -> None:
    micros = list(whole_trees(batch, max_tokens, packs=packs, max_rows=max_rows, hidden_size=1000))
    each = [torch.tensor([row]) for row in range(len(batch))]
    alone = [(row, batch.select(row).trim()) for row in each]
    plain = [
        (row, plain_layout(one.tokens, one.attention_mask, one.loss_mask)) for row, one in alone
    ]
    expected, gradient = learned(exact_model, batch, plain)
    found, of_trees = learned(exact_model, batch, [(micro.rows, micro.layout) for micro in micros])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert float((of_trees - gradient).norm()) <= 1e-12 * float(gradient.norm())


@settings(max_examples=200, deadline=None)
@given(batch=trees(), packs=st.booleans())
def test_each_token_of_a_tree_is_computed_once(batch: UpdateBatch, packs: bool) -> None:
    """For a model so wide that attention costs nothing, on which the trees of a padded batch depend."""
    micros = list(whole_trees(batch, packs=packs, hidden_size=10**6))
    assert sum(int(micro.layout.visible_until.ne(packing.NO_END).sum() if micro.layout.visible_until is not None
                   else micro.batch.attention_mask.sum()) for micro in micros) == tree_size(batch)  # fmt: skip
    for micro in micros if packs else []:
        queries = (
            torch.cat([block.tokens for block in micro.layout.blocks])
            if micro.layout.blocks
            else None
        )
        if queries is not None:
            assert torch.equal(queries.sort().values, torch.arange(micro.layout.tokens.numel()))


@settings(max_examples=200, deadline=None)
@given(
    batch=trees(), max_tokens=st.integers(8, 60), max_rows=st.integers(0, 4), dense=st.booleans()
)
def test_no_other_cut_of_neighbours_costs_less(
    batch: UpdateBatch, max_tokens: int, max_rows: int, dense: bool
) -> None:
    batch = batch.select(torch.arange(min(len(batch), 8)))
    batch.group_ids.zero_()
    rows = sorted_rows(batch)
    bundles = cheapest_bundles(
        rows, hidden_size=3, dense=dense, max_tokens=max_tokens, max_rows=max_rows
    )

    def cost(starts: list[int]) -> float:
        total = 0.0
        for first, last in zip(starts, [*starts[1:], len(batch)], strict=True):
            width = int(rows.lengths[first:last].sum() - rows.prefixes[first + 1 : last].sum())
            if last - first > 1 and (width > max_tokens or 0 < max_rows < last - first):
                return float("inf")
            total += width * 18 + width**2 if dense else width
        return total

    found = (bundles.counts.cumsum(0) - bundles.counts).tolist()
    inner = range(1, len(batch))
    best = min(
        cost([0, *[row for row in inner if chosen >> (row - 1) & 1]])
        for chosen in range(2 ** len(inner))
    )
    assert cost(found) == best
    assert sorted(bundles.rows.tolist()) == list(range(len(batch)))


# ---------------------------------------------------------------- through a worker, in float32


def worker_of(path: str, *, rows: int = 0, **sizes: int) -> PolicyWorker:
    worker = PolicyWorker(settings_of(path, rows=rows, **sizes), threads=1)
    worker.setup()
    return worker


def settings_of(path: str, *, rows: int = 0, **sizes: int) -> Any:
    cfg = config_for(path)
    cfg.trainer.micro_batch_tokens, cfg.trainer.micro_train_batch_size_per_gpu = 512, rows
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    cfg.trainer.algorithm.off_policy_correction = (
        "none"  # its ratios are as inexact as log-probabilities of -10 are
    )
    vars(cfg.trainer.parallel).update(sizes)
    return cfg


def gradient(worker: PolicyWorker) -> Tensor:
    assert isinstance(worker.backend, FSDPBackend)
    found = [p.grad for p in worker.backend.model.parameters() if p.grad is not None]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_episodes_learn_what_their_rows_do_and_count_what_they_compute(untied_model: str) -> None:
    batch = episodes()
    tree, rows = worker_of(untied_model), worker_of(untied_model, rows=1)
    for worker in (tree, rows):
        worker.forward_backward(batch)
    assert distance(gradient(tree), gradient(rows)) < 1e-6
    torch.testing.assert_close(tree.logprobs(batch), rows.logprobs(batch), atol=2e-6, rtol=0)
    of_tree, of_rows = tree.optimizer_step(), rows.optimizer_step()
    for metrics in (of_tree, of_rows):
        assert metrics["row_tokens"] == int(batch.attention_mask.sum())
        assert metrics["tokens"] == int(batch.loss_mask.sum())
    assert of_tree["computed_tokens"] == tree_size(batch) < 0.3 * of_rows["computed_tokens"]
    assert of_tree["loss"] == pytest.approx(of_rows["loss"], rel=1e-6)


def of_a_rank(rank: Rank, batch: UpdateBatch) -> Any:
    backend = rank.worker.backend
    mesh = backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data, 32, shares_prefixes=rank.worker.shares_prefixes())[
        mesh.data_rank(rank.rank)
    ]
    rank.worker.forward_backward(batch.select(rows).trim())
    found = gradient(rank.worker).numpy()
    return found, rank.worker.optimizer_step()["computed_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{}, {"tensor": 2}, {"context": 2}, {"context": 2, "context_kind": "ring"}]
)
def test_ranks_of_every_dimension_learn_what_one_does(
    untied_model: str, ranks: Callable[[int], Ranks], sizes: dict[str, Any]
) -> None:
    batch = episodes()
    alone = worker_of(untied_model)
    alone.forward_backward(batch)
    expected = gradient(alone)
    ranks(2).set_up(PolicyWorker, settings_of(untied_model, **sizes))
    rows = int(batch.attention_mask.sum())
    for found, computed in ranks(2).call(of_a_rank, batch):
        assert distance(torch.from_numpy(found), expected) < 1e-6
        if sizes.get("context_kind") == "ring":
            assert computed >= rows, "it takes no masks: rows are computed one by one"
        else:  # a dense mask under context parallelism, and rows divided between ranks, may repeat some
            assert tree_size(batch) <= computed < 0.5 * rows


def test_a_mask_function_sees_what_rows_of_their_own_see(
    untied_model: str, by_flex: list[Tensor]
) -> None:
    batch, worker = episodes(), worker_of(untied_model)
    worker.forward_backward(batch)
    count = len(by_flex)
    assert count and all(states.shape[0] == 1 for states in by_flex)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TokenModel, "uses_flex", lambda model, device: False)
        rows = worker_of(untied_model, rows=1)
        rows.forward_backward(batch)
    assert len(by_flex) == count
    assert distance(gradient(worker), gradient(rows)) < 1e-6


# ---------------------------------------------------------------- what is shared


def test_tokens_that_a_teacher_asks_for_are_those_of_the_row(exact_model: TokenModel) -> None:
    """Rows that share a token may have different ones."""
    batch = episodes()
    batch.tokens %= 48
    asked = torch.randint(
        0, 48, (*batch.tokens.shape, 3), generator=torch.Generator().manual_seed(0)
    )
    (micro,) = whole_trees(batch, packs=True)
    assert len(micro.layout.targets) < len(micro.layout.cells)

    def scores(layout: Any, rows: Tensor) -> dict[str, Tensor]:
        request = OutputRequest.of(
            LOGPROBS, TOKEN_LOGPROBS, token_ids=asked[rows][:, : layout.shape[1]]
        )
        return exact_model(layout, request)

    found = scores(micro.layout, micro.rows)
    one = micro.batch
    expected = scores(plain_layout(one.tokens, one.attention_mask, one.loss_mask), micro.rows)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_rows_share_a_token_only_with_the_same_experts() -> None:
    batch = episodes(count=1)
    batch.routed_experts = torch.zeros(*batch.tokens.shape, 2, 2, dtype=torch.uint8)
    assert sum(m.layout.tokens.numel() for m in whole_trees(batch, packs=True)) == tree_size(batch)
    last = int(batch.attention_mask.sum(1).argmax())
    batch.routed_experts[last, 3:, 1, 0] = 1
    (micro,) = whole_trees(batch, packs=True)
    assert micro.layout.tokens.numel() > tree_size(batch)
    layout, place = micro.layout, int((micro.rows == last).nonzero())
    own = layout.cells // layout.shape[1] == place
    assert layout.copies is not None and layout.experts is not None
    assert (layout.experts[0, layout.predictors[layout.copies[own]], 1, 0] == 1).all()


def test_ids_of_images_are_compared_whole() -> None:
    """They have 60 bits; these two are equal in the lower 32."""
    batch = episodes(count=1)
    batch.tokens = batch.tokens.clone()
    batch.tokens[:, 3] = torch.where(
        torch.arange(len(batch)) % 2 == 0, -5 - (1 << 40), -5 - (2 << 40)
    )
    found = sorted_rows(batch)
    odd = found.rows % 2
    assert odd.diff().ne(0).sum() == 1
    assert found.prefixes[1:][odd.diff() != 0].tolist() == [3] and (found.prefixes > 4).any()


def test_ranks_get_whole_episodes_and_equal_work() -> None:
    """By rows, the cut would be at half of the tokens, within an episode's long rows."""
    batch = episodes(count=4, turns=5)
    mixed = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    batch = batch.select(mixed)
    parts = split_for_ranks(batch, 2, shares_prefixes=True)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(batch)))
    sizes = [tree_size(batch.select(rows)) for rows in parts]
    assert max(sizes) < 0.6 * tree_size(batch)
    assert batch.trajectory_ids is not None
    shared = set(batch.trajectory_ids[parts[0]].tolist()) & set(
        batch.trajectory_ids[parts[1]].tolist()
    )
    assert sum(sizes) < 1.2 * tree_size(batch) and len(shared) <= 1
