"""A user's own role: it is placed, started, called, offloaded, saved and stopped with the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from skyasync.config.keys import When
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.batch import TokenBatch
from skyasync.registry import user_parts
from skyasync.run.placement import plan_slots
from skyasync.workers.dispatch import LocalDispatch, RayWorkerDispatch
from skyasync.workers.ranks import WorkerPlacement
from skyasync.workers.roles import ROLES, Role, register_role, roles_with_ranks
from skyasync.workers.worker import Worker
from tests.workers.conftest import config_for, make_batch

KL = When("trainer.algorithm.use_kl_loss")


class LengthWorker(Worker):
    """Rewards responses by their lengths in units that are learned, so a checkpoint contains them."""

    unit, awake = 1.0, True

    def lengths(self, batch: TokenBatch) -> torch.Tensor:
        assert not hasattr(batch, "advantages") and hasattr(batch, "behaviour_logprobs"), (
            "only the fields that the entry names are sent"
        )
        return batch.loss_mask.sum(1) * self.unit

    def optimizer_step(
        self,
        schedule_step: int | None = None,
        scale: float = 1.0,
        lr_scale: float = 1.0,
        beta1: float | None = None,
    ) -> dict[str, float]:
        self.unit *= 2
        return {"unit": self.unit}

    def offload(self) -> None:
        self.awake = False

    def onload(self) -> None:
        self.awake = True

    def is_awake(self) -> bool:
        return self.awake

    def save(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, f"unit-{self.rank}").write_text(str(self.unit))

    def load(self, folder: str) -> None:
        self.unit = float(Path(folder, f"unit-{self.rank}").read_text())


@pytest.fixture
def lengths() -> Iterator[Role]:
    register_role(
        Role(
            "lengths",
            LengthWorker,
            trains=True,
            columns=("behaviour_logprobs",),
            colocated_if=lambda cfg: cfg.trainer.algorithm.use_kl_loss,
        )
    )
    yield ROLES["lengths"]
    del ROLES["lengths"]


def config(path: str, *, shared: bool = True) -> Config:
    cfg = config_for(path)
    cfg.trainer.algorithm.use_kl_loss = shared
    return cfg


def test_the_policy_is_first_and_the_others_come_where_something_asks_for_them(
    lengths: Role,
) -> None:
    assert [role.name for role in roles_with_ranks(config("", shared=False))] == [
        "policy",
        "lengths",
    ]
    assert [role.name for role in roles_with_ranks(config(""))] == [
        "policy",
        "reference",
        "lengths",
    ]


def test_a_users_role_travels_and_the_librarys_do_not(lengths: Role) -> None:
    assert user_parts()["skyasync.workers.roles:ROLES"] == {"lengths": lengths}


def test_an_unknown_role_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"unknown role 'polici'.*'policy'"):
        ROLES["polici"]


def test_a_third_role_is_colocated_with_the_policy_or_on_devices_of_its_own(lengths: Role) -> None:
    cfg = config("")
    cfg.trainer.placement.policy_num_gpus_per_node = 2
    colocated = plan_slots(cfg, gpus=True, roles=roles_with_ranks(cfg))
    assert colocated.by_role == {
        "policy": (0, 1),
        "reference": (0, 1),
        "lengths": (0, 1),
        "engines": (2,),
    }
    assert {colocated.share[role] for role in ("policy", "reference", "lengths")} == {0.3333}
    register_role(Role("lengths", LengthWorker, gpu=False))
    separate = plan_slots(cfg, gpus=True, roles=roles_with_ranks(cfg))
    assert separate.by_role["lengths"] == (2,) and separate.bundles[2] == {"CPU": 1.0}
    assert separate.share["lengths"] == 1.0


def test_a_role_without_a_model_of_its_own_has_the_policys() -> None:
    cfg = config_for("somewhere")
    assert ROLES["reference"].model(cfg) is cfg.trainer.policy.model
    cfg.trainer.ref.model.path = "elsewhere"
    assert ROLES["reference"].model(cfg) is cfg.trainer.ref.model


async def test_a_role_that_was_not_started_is_named(untied_model: str) -> None:
    dispatch = LocalDispatch(config_for(untied_model))
    with pytest.raises(RuntimeError, match=r"no reference was started.*use_kl_loss"):
        await dispatch.ask("reference", "logprobs", make_batch())
    await dispatch.shutdown()


async def test_a_checkpoint_of_a_run_without_the_role_is_refused(
    untied_model: str, lengths: Role, tmp_path: Path
) -> None:
    dispatch = LocalDispatch(config_for(untied_model), roles=("policy", "lengths"))
    (tmp_path / "policy").mkdir()
    await dispatch.save(tmp_path)
    (tmp_path / "lengths" / "unit-0").unlink()
    (tmp_path / "lengths").rmdir()
    with pytest.raises(UserError, match="holds no lengths"):
        await dispatch.load(tmp_path)
    await dispatch.shutdown()


@pytest.mark.slow
async def test_a_third_role_is_driven_like_the_others(
    untied_model: str, bundles: PlacementGroup, lengths: Role, tmp_path: Path
) -> None:
    place = WorkerPlacement(bundles, bundles=(0, 1), num_cpus=0.5)
    one = WorkerPlacement(bundles, num_cpus=0.5)
    dispatch = RayWorkerDispatch(config(untied_model), {"policy": one, "lengths": place})
    await dispatch.start()
    try:
        batch = make_batch()
        expected = batch.loss_mask.sum(1).float()
        assert torch.equal(await dispatch.ask("lengths", "lengths", batch), expected), (
            "in the batch's order"
        )
        await dispatch.save(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["lengths", "policy"]
        assert await dispatch.optimizer_step(role="lengths") == {"unit": 2.0}
        assert torch.equal(await dispatch.ask("lengths", "lengths", batch), 2 * expected)
        await dispatch.load(tmp_path)
        assert torch.equal(await dispatch.ask("lengths", "lengths", batch), expected)
        await dispatch.offload()
        assert await dispatch.call("lengths", "is_awake") == [False, False]
        await dispatch.onload()
        assert await dispatch.call("lengths", "is_awake") == [True, True]
        assert (await dispatch.stats())["lengths_busy_s"] > 0
    finally:
        await dispatch.shutdown()
    with pytest.raises((RuntimeError, ray.exceptions.RayActorError)):
        await dispatch.ask("lengths", "lengths", batch)
