from __future__ import annotations

import asyncio
import os
import signal
import time
from copy import deepcopy
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.util.placement_group import PlacementGroup

from skyasync.config.schema import Config
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.weight_sync.transfers.shared_memory import BufferReader
from skyasync.workers.dispatch import RayWorkerDispatch
from skyasync.workers.policy import NonFiniteError, PolicyWorker
from skyasync.workers.ranks import (
    HeartbeatTimeoutError,
    WorkerPlacement,
    row_costs,
    split_for_ranks,
)
from tests.end_to_end.leftovers import is_running, none_soon
from tests.workers.conftest import comparable, config_for, make_batch


class Lacking(UpdateBatch):
    """Of its rows, those without the first have no loss weights."""

    def select(self, rows: torch.Tensor) -> Lacking:
        part = super().select(rows)
        if 0 not in rows:
            part.loss_weights = None  # type: ignore[assignment]
        return part


def in_process(cfg: Config) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    return worker


def split(batch: TokenBatch, ranks: int) -> list[list[int]]:
    return [rows.tolist() for rows in split_for_ranks(batch, ranks)]


async def started(
    cfg: Config, policy: WorkerPlacement, reference: WorkerPlacement | None = None
) -> RayWorkerDispatch:
    dispatch = RayWorkerDispatch(
        cfg, {"policy": policy} | ({"reference": reference} if reference else {})
    )
    await dispatch.start()
    return dispatch


async def published(dispatch: RayWorkerDispatch) -> dict[str, torch.Tensor]:
    update = await dispatch.transfer.publish(version=3)
    assert update.version == 3
    weights = {name: tensor.clone() for name, tensor in BufferReader().read(update.info).items()}
    await dispatch.transfer.release(update)
    return weights


def test_ranks_get_equal_work_where_long_rows_cost_more_than_their_tokens() -> None:
    """One row of 4,096 tokens and 64 of 64, for hidden size 32: attention is most of the long row's cost."""
    lengths = torch.tensor([4096] + [64] * 64)
    mask = torch.arange(4096) < lengths[:, None]
    batch = TokenBatch(mask.long(), mask, mask, group_ids=torch.arange(65))
    assert [len(rows) for rows in split_for_ranks(batch, 2)] == [1, 64], "by tokens"
    by_cost = split_for_ranks(batch, 3, hidden_size=32)
    assert [len(rows) for rows in by_cost] == [1, 64, 0], "the long row cannot be divided"
    shorter = torch.tensor([1024] * 4 + [128] * 64)
    costs = row_costs(shorter, 32)
    assert costs.tolist() == pytest.approx([1024 + 1024**2 / 384] * 4 + [128 + 128**2 / 384] * 64)
    mask = torch.arange(1024) < shorter[:, None]
    rows = split_for_ranks(
        TokenBatch(mask.long(), mask, mask, group_ids=torch.arange(68)), 2, hidden_size=32
    )
    work = [float(costs[one].sum()) for one in rows]
    assert abs(work[0] - work[1]) <= float(costs.max()) and sorted(
        torch.cat(rows).tolist()
    ) == list(range(68))


@given(st.lists(st.integers(1, 50), max_size=7), st.integers(1, 4))
def test_no_other_cut_gives_the_busiest_rank_less(lengths: list[int], ranks: int) -> None:
    mask = torch.arange(50) < torch.tensor(lengths).reshape(-1, 1)
    batch = TokenBatch(mask.long(), mask, mask, group_ids=torch.arange(len(lengths)))
    costs = row_costs(torch.tensor(lengths), 4)
    found = max(float(costs[rows].sum()) for rows in split_for_ranks(batch, ranks, hidden_size=4))
    cuts = combinations_with_replacement(range(len(lengths) + 1), ranks - 1)
    best = min(
        max(float(costs[a:b].sum()) for a, b in pairwise((0, *cut, len(lengths)))) for cut in cuts
    )
    assert found <= best * (1 + 1e-9)


def test_ranks_get_all_rows_once_with_groups_together_and_tokens_balanced() -> None:
    batch = make_batch(groups=8, samples=4)
    parts = split(batch, 2)
    assert sorted(parts[0] + parts[1]) == list(range(len(batch)))
    tokens = [int(batch.attention_mask[rows].sum()) for rows in parts]
    assert abs(tokens[0] - tokens[1]) <= 2 * batch.tokens.shape[1]
    assert (
        len(
            {int(g) for g in batch.group_ids[parts[0]]}
            & {int(g) for g in batch.group_ids[parts[1]]}
        )
        <= 1
    )


def test_a_rank_may_get_no_rows() -> None:
    assert sorted(map(len, split(make_batch(groups=1, samples=1), 2))) == [0, 1]


async def update(dispatch: RayWorkerDispatch, batch: UpdateBatch) -> dict[str, float]:
    """One optimizer step, counted by the workers."""
    await dispatch.forward_backward(batch)
    return await dispatch.optimizer_step()


@pytest.mark.slow
async def test_one_rank_updates_scores_and_publishes_like_a_worker_in_process(
    untied_model: str, bundles: PlacementGroup
) -> None:
    cfg, batch = config_for(untied_model), make_batch()
    expected = in_process(cfg)
    dispatch = await started(
        cfg,
        WorkerPlacement(bundles, num_cpus=0.5),
        reference=WorkerPlacement(bundles, num_cpus=0.5),
    )
    try:
        start = expected.logprobs(batch)
        torch.testing.assert_close(
            await dispatch.ask("policy", "logprobs", batch), start, atol=1e-6, rtol=0
        )
        assert await update(dispatch, batch) == pytest.approx(
            expected.update_policy(batch), rel=1e-5, abs=1e-7
        )
        torch.testing.assert_close(
            await dispatch.ask("policy", "logprobs", batch),
            expected.logprobs(batch),
            atol=1e-5,
            rtol=0,
        )
        torch.testing.assert_close(
            await dispatch.ask("reference", "logprobs", batch), start, atol=1e-6, rtol=0
        )
        assert (await dispatch.score([[1, 2, 3]]))[0] == pytest.approx(
            expected.score([[1, 2, 3]])[0], abs=1e-5
        )
        weights = await published(dispatch)
        for name, parameter in expected.backend.model.model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-6, rtol=1e-5)
        assert (await dispatch.stats())["busy_s"] > 0
    finally:
        await dispatch.shutdown()
    await dispatch.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "tensor"), [(5, 2), pytest.param(1, 1, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(
    "model_path", ["tied", pytest.param("untied", marks=pytest.mark.matrix)], indirect=True
)
async def test_two_ranks_train_like_one_and_exchange_checkpoints(
    model_path: str, bundles: PlacementGroup, tmp_path: Path, groups: int, tensor: int
) -> None:
    """The same gradient norm, metrics and weights; each continues from the checkpoint of the other.

    The ranks have rows of their own, or split the matrices of the same rows.
    """
    cfg = config_for(model_path)
    single = in_process(cfg)
    several = deepcopy(cfg)
    several.trainer.parallel.tensor = tensor
    single.update_policy(make_batch(seed=7))
    single.save(str(tmp_path / "one" / "policy"))
    dispatch = await started(several, WorkerPlacement(bundles, bundles=(0, 1)))
    try:
        await dispatch.load(tmp_path / "one")
        for seed, samples in (
            (0, 4),
            (1, 1),
        ):  # with one group of one sample a rank has no rows at all
            batch = make_batch(groups=groups, samples=samples, seed=seed)
            torch.testing.assert_close(
                await dispatch.ask("policy", "logprobs", batch),
                single.logprobs(batch),
                atol=1e-4,
                rtol=0,
            )
            metrics = await update(dispatch, batch)
            assert comparable(metrics) == pytest.approx(
                comparable(single.update_policy(batch)), rel=1e-4, abs=3e-6
            )
        trained = await published(dispatch)
        weights = {name: p.detach() for name, p in single.backend.model.model.named_parameters()}
        assert set(trained) == set(weights)
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-4)

        await dispatch.begin_save(tmp_path / "behind")
        while await dispatch.saved() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        files = await dispatch.save(tmp_path / "two")
        save = tmp_path / "behind"
        assert files.keys() == {f"policy/{path.name}" for path in (save / "policy").iterdir()}
        assert await dispatch.verify(tmp_path / "two", files) == []
        (save / min(files)).write_bytes(b"")
        assert len(await dispatch.verify(save, files)) >= 1
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="Not a directory"):  # the disk failed: the ranks continue
            await dispatch.save(tmp_path / "file" / "policy")
        await dispatch.export(tmp_path / "export")
        further = await update(dispatch, make_batch(seed=2))
    finally:
        await dispatch.shutdown()

    resumed = in_process(cfg)
    resumed.load(str(tmp_path / "two" / "policy"))
    for name, parameter in resumed.backend.model.model.named_parameters():
        assert torch.equal(parameter, trained[name])
    again = resumed.update_policy(make_batch(seed=2))
    assert comparable(again) == pytest.approx(comparable(further), rel=1e-4, abs=3e-6)
    cfg.trainer.policy.model.path = str(tmp_path / "export")
    for name, parameter in in_process(cfg).backend.model.model.named_parameters():
        assert torch.equal(parameter, trained[name])


@pytest.mark.matrix
@pytest.mark.slow
async def test_a_rank_that_raises_reaches_the_caller_and_nothing_hangs(
    untied_model: str, bundles: PlacementGroup
) -> None:
    """Rank 1 rejects its shard before its first collective; rank 0 already waits in one."""
    cfg, batch = config_for(untied_model), make_batch(groups=4).to_stage(Lacking)
    dispatch = await started(cfg, WorkerPlacement(bundles, bundles=(0, 1)))
    try:
        began = time.monotonic()
        with pytest.raises(ValueError, match="needs loss_weights") as failure:
            await dispatch.forward_backward(batch)
        assert time.monotonic() - began < 20
        assert "in forward_backward" in str(failure.value), "the rank's own traceback"
        with pytest.raises(RuntimeError, match="stopped") as later:
            await dispatch.ask("policy", "logprobs", batch)
        assert later.value.__cause__ is failure.value
    finally:
        await dispatch.shutdown()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_error_names_the_failed_or_hanging_rank_not_the_broken_collective(
    how: signal.Signals, untied_model: str, bundles: PlacementGroup
) -> None:
    cfg = config_for(untied_model)
    cfg.trainer.ckpt_interval, cfg.trainer.heartbeat_timeout_s = 1, 2.0
    dispatch = await started(cfg, WorkerPlacement(bundles, bundles=(0, 1)))
    try:
        pids = await dispatch._policy.call("ready")
        os.kill(pids[1], how)
        with pytest.raises(
            ray.exceptions.RayActorError if how == signal.SIGKILL else HeartbeatTimeoutError
        ) as failure:
            await update(dispatch, make_batch(groups=4))
        assert dispatch.lost == ("policy", failure.value)
        assert none_soon(lambda: [str(pid) for pid in pids if is_running(pid)]) == [], (
            "a hanging rank is killed too"
        )
        with pytest.raises(RuntimeError, match="stopped"):
            await dispatch.transfer.publish(version=1)
    finally:
        await dispatch.shutdown()


@pytest.mark.matrix
@pytest.mark.slow
async def test_a_non_finite_loss_on_one_rank_is_named(
    untied_model: str, bundles: PlacementGroup
) -> None:
    batch = make_batch(groups=4)
    batch.advantages[-1] = float("nan")
    dispatch = await started(config_for(untied_model), WorkerPlacement(bundles, bundles=(0, 1)))
    try:
        with pytest.raises(NonFiniteError, match="loss of optimizer step 0"):
            await update(dispatch, batch)
    finally:
        await dispatch.shutdown()


@pytest.mark.slow
async def test_a_model_that_cannot_be_loaded_ends_the_start(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=str(tmp_path)):
        await started(config_for(str(tmp_path)), WorkerPlacement(bundles))
    await _until_free(bundles)


async def test_models_that_do_not_load_in_time_are_named_with_the_key() -> None:
    class Slow:
        async def start(self, cfg: Config, total_steps: int) -> None:
            await asyncio.sleep(3600)

        async def shutdown(self) -> None: ...

    dispatch = object.__new__(RayWorkerDispatch)
    dispatch._cfg = config_for("m")
    dispatch._cfg.trainer.step_timeout_s = 0.01
    dispatch._groups = {"policy": Slow(), "reference": Slow()}  # type: ignore[dict-item]
    dispatch.shutdown = Slow().shutdown  # type: ignore[method-assign]
    with pytest.raises(
        TimeoutError, match=r"^loading the models \(policy, reference\) .* 0\.01 s \(trainer\.step_"
    ):
        await dispatch.start()


@pytest.mark.slow
async def test_the_event_loop_runs_on_while_a_model_loads(
    untied_model: str, bundles: PlacementGroup
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    began = time.monotonic()
    dispatch = await started(config_for(untied_model), WorkerPlacement(bundles))
    seconds = time.monotonic() - began
    ticking.cancel()
    await dispatch.shutdown()
    assert ticks > 5 * seconds, (
        "one tick is 0.01 s; two cores are shared with the actor and other tests"
    )


async def _until_free(group: PlacementGroup) -> None:
    """Killed actors free their bundles: another one starts in the same bundle."""

    @ray.remote(num_cpus=1)
    def probe() -> bool:
        return True

    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    assert await asyncio.wait_for(probe.options(scheduling_strategy=strategy).remote(), 30)
