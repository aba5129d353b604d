"""Engines that share the policy's devices sleep while it is trained; nothing else changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from skyasync.errors import UserError
from skyasync.trainer import RayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config, without_times
from tests.trainer.plans.parts import make_run

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Watched(LocalRun):
    """Checks the engine's cache whenever the policy is updated."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(RayPPOTrainer, cfg)
        self.caches_alive: list[bool] = []
        update = self.dispatch.forward_backward

        async def watched(batch: Any, role: str) -> dict[str, float]:
            gc.collect()
            self.caches_alive.append(any(cache() is not None for cache in self.caches))
            return await update(batch, role)

        self.dispatch.forward_backward = watched  # type: ignore[method-assign]
        self.caches: list[weakref.ref[Any]] = []
        generate = self.trainer.generator.generate

        async def generates(batch: Any) -> Any:
            output = await generate(batch)
            self.caches.append(weakref.ref(self.engine._decoder.cache))
            return output

        self.trainer.generator.generate = generates


def colocated(model: str, yes: bool) -> Any:
    cfg = config(model, steps=STEPS)
    cfg.trainer.placement.colocate_all = yes
    return cfg


@pytest.mark.matrix
async def test_the_cache_is_freed_for_training_and_the_run_is_the_same_bit_for_bit(
    model: str,
) -> None:
    separate, together = (
        await Watched(colocated(model, False)).train(),
        await Watched(colocated(model, True)).train(),
    )
    assert separate.caches_alive == [True] * STEPS
    assert together.caches_alive == [False] * STEPS
    assert without_times(together.tracker.rows) == without_times(separate.tracker.rows)
    for name, weights in separate.dispatch.weights().items():
        assert torch.equal(together.dispatch.weights()[name], weights), name


class Turns:
    """In place of ``Colocation``: records when the trainer gives the devices to the policy."""

    def __init__(self, run: Any) -> None:
        self.made: list[str] = []
        self.engines_are_awake = False
        for part, name in ((run.dispatch, "forward_backward"), (run.dispatch, "export"), (run.sync, "sync"),
                           (run.generator, "generate")):  # fmt: skip
            setattr(part, name, self._noting(name, getattr(part, name)))
        run.trainer.weight_updates.colocation = self

    async def give_devices_to_policy(self) -> None:
        self.made.append("policy")
        self.engines_are_awake = False

    def _noting(self, name: str, call: Any) -> Any:
        async def noted(*args: Any) -> Any:
            self.made.append(name)
            self.engines_are_awake = self.engines_are_awake or name == "sync"
            return await call(*args)

        return noted


def test_the_policy_has_the_devices_from_the_update_to_the_sync_and_for_the_export() -> None:
    run = make_run(RayPPOTrainer, prompts=8, eval_prompts=1, trainer__export_path="somewhere")
    turns = Turns(run)
    run.train()
    step = ["generate", "policy", "forward_backward", "sync"]
    assert turns.made == ["sync", *step, *step, "generate", "policy", "export"]
    assert sorted(run.tracker.of("time/sleep_s")) == [1, 2]


def test_a_plan_that_generates_while_engines_sleep_is_told_so() -> None:
    class Forgetful(RayPPOTrainer):
        async def train(self) -> None:
            for prompts in self.remaining_prompts():
                await self.train_on(await self.generate(prompts))

    run = make_run(Forgetful)
    Turns(run)
    with pytest.raises(
        UserError, match=r"Forgetful generates after training without a weight sync.*colocate_all"
    ):
        run.train()
