"""A checkpoint has the groups that are generated and not yet trained: a resumed run does not generate them again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.callbacks import TrainerCallback
from skyasync.inference.client import InferenceClient
from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import RunDirectory
from skyasync.rollout import partial_rollouts as saved
from skyasync.rollout.types import Group, PromptId, Trajectory
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.prompt_ledger import NO_SIGNAL, TRUNCATED, audit
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, config
from tests.trainer.plans.parts import BOUNDED, PLANS, make_run

pytestmark = pytest.mark.slow

ASYNCHRONOUS = [AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer]


class Broken(Exception):
    pass


def interrupted(plan: type, tmp_path: Path, step: int, **settings: Any) -> tuple[Any, Any]:
    """A run that fails in the update after ``step``, and the run that resumes from its checkpoint."""
    shared = {
        "prompts": 10,
        "trainer__epochs": 3,
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 1,
    }
    first = make_run(plan, **shared, **settings)
    first.faults["update", step + 1] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(plan, **shared, **settings, trainer__resume_mode="latest")
    return first, second.train()


@pytest.mark.parametrize("plan", ASYNCHRONOUS)
@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_finished_is_trained_and_not_asked_for_again(
    plan: type, step: int, depth: int, tmp_path: Path
) -> None:
    ages = (
        {"trainer__async_queue_size": depth}
        if plan is AsyncRayPPOTrainer
        else {"trainer__max_staleness": depth}
    )
    whole = make_run(plan, prompts=10, trainer__epochs=3, generating=[1.0], **ages).train()
    first, second = interrupted(plan, tmp_path, step, generating=[1.0], **ages)
    held = set(first.generator.asked) - set(first.trained)
    assert held, "there are groups to keep"
    trained = [*first.trained[: 4 * step], *second.trained]
    assert trained == whole.trained
    assert Counter(trained).most_common(1)[0][1] == 1
    again = Counter(first.generator.asked) + Counter(second.generator.asked)
    kept = [prompt for prompt, times in again.items() if times == 1 and prompt in held]
    assert kept, "finished at the checkpoint"
    ages_of = second.tracker.of("staleness/max")
    assert {s: ages_of[s] for s in ages_of} == {
        s: a for s, a in whole.tracker.of("staleness/max").items() if s > step
    }


def test_what_a_resumed_run_has_not_requested_yet_is_in_its_next_checkpoint(tmp_path: Path) -> None:
    shared = {
        "prompts": 10,
        "trainer__epochs": 3,
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 1,
    }
    first = make_run(FullyAsyncRayPPOTrainer, **shared, generating=[1.0], trainer__max_staleness=2)
    first.faults["update", 4] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(
        RayPPOTrainer, **shared, trainer__resume_mode="latest"
    )  # requests one batch at a time
    second.faults["update", 2] = Broken()  # its second
    with pytest.raises(Broken):
        second.train()
    third = make_run(RayPPOTrainer, **shared, trainer__resume_mode="latest").train()
    next_batch = set(third.trained[:4])
    assert next_batch <= set(first.generator.asked)
    assert not next_batch & {*second.generator.asked, *third.generator.asked}


@pytest.mark.parametrize("plan", ASYNCHRONOUS)
def test_without_saved_rollouts_a_resumed_run_generates_again(plan: type, tmp_path: Path) -> None:
    _, second = interrupted(plan, tmp_path, 3, trainer__ckpt_rollouts=False)
    assert not list(tmp_path.rglob("rollouts.safetensors"))
    assert set(second.trained) == set(second.generator.asked)
    assert second.tracker.of("staleness/max")[4] == 0


def test_rollouts_of_another_group_size_are_left_out_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {
        "prompts": 10,
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 1,
        "trainer__epochs": 3,
    }
    first = make_run(AsyncRayPPOTrainer, **shared)
    first.faults["update", 3] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(
        AsyncRayPPOTrainer,
        **shared,
        generator__n_samples_per_prompt=4,
        trainer__resume_mode="latest",
    )
    second.train()
    assert set(second.trained) == set(second.generator.asked)
    assert (
        "are left out and generated again: they are not of generator.n_samples_per_prompt=4"
        in caplog.text
    )


class Long(RayPPOTrainer):
    """The responses to one row are cut off."""

    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        for trajectory in (
            t for group in groups if group.prompt.id.row == 2 for t in group.trajectories
        ):
            trajectory.stop_reason = "length"
        return groups


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_not_trained_stands_in_the_ledger_with_its_reason(
    plan: type, tmp_path: Path
) -> None:
    folder = RunDirectory(tmp_path, "run")
    settings = {"dynamic_sampling__type": "variance", "truncated_responses": "drop"}
    run = make_run(
        type("Both", (Long, plan), {}), prompts=10, run_dir=folder, all_right=frozenset({5}),
        **{f"trainer__algorithm__{name}": value for name, value in settings.items()},
    )  # fmt: skip
    run.train()
    rejected = {
        name: why
        for row in read_rows(folder.ledger)
        for name, why in row.get("rejected", {}).items()
    }
    assert rejected == {"e0-i5": NO_SIGNAL, "e0-i2": TRUNCATED}
    assert {end.partition("@")[0] for (end,) in audit(read_rows(folder.ledger)).values()} == {
        "trained",
        "rejected",
    }


@pytest.mark.parametrize("plan", PLANS)
def test_the_ledger_of_an_interrupted_run_has_every_prompt_once(plan: type, tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, "run")
    shared = {
        "prompts": 10,
        "trainer__epochs": 3,
        "trainer__ckpt_path": str(tmp_path / "c"),
        "run_dir": folder,
    }
    first = make_run(plan, **shared, trainer__ckpt_interval=2)
    first.faults["update", 6] = Broken()  # step 5 is redone
    with pytest.raises(Broken):
        first.train()
    shared["run_dir"] = RunDirectory(tmp_path, "run", resume=True)
    make_run(plan, **shared, trainer__ckpt_interval=2, trainer__resume_mode="latest").train()
    rows = read_rows(folder.ledger)
    assert [row["step"] for row in rows] == list(range(1, 9))
    found = audit(rows)
    assert set(found) == {str(PromptId(epoch, row)) for epoch in range(3) for row in range(10)}
    assert all(len(ends) == 1 and ends[0].startswith("trained@") for ends in found.values())


def test_a_prompt_that_is_replaced_has_no_version_in_a_checkpoint_since_its_slot_is_free(
    tmp_path: Path,
) -> None:
    """With it the resumed run would have more open prompts than slots, and forget when all of them were started."""
    right = frozenset(range(0, 40, 2))
    sampling = {
        f"trainer__algorithm__dynamic_sampling__{k}": v
        for k, v in {"type": "variance", "mode": "refill"}.items()
    }
    run = make_run(
        FullyAsyncRayPPOTrainer, prompts=40, all_right=right, generating=(1.0, 0.5, 2.5), trainer__ckpt_interval=1,
        trainer__ckpt_path=str(tmp_path), trainer__ckpt_keep=0, **sampling,
    ).train()  # fmt: skip
    given_back = set()
    for file in tmp_path.glob(f"step_*/{saved.FILE}"):
        state = saved.read(file, run.trainer.context.prompts.of_identity)
        rejected = {group.prompt.id for group in state.groups if group.prompt.id.row in right}
        assert not rejected & state.versions.keys()
        assert len(state.versions) <= run.trainer.admission.slots
        given_back |= rejected
    assert given_back, "their groups are kept, and rejected again in their turn"


def test_what_a_filter_rejects_stands_in_the_ledger(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, "run")
    run = make_run(
        AsyncRayPPOTrainer, prompts=10, run_dir=folder, all_right=frozenset({2, 5}),
        trainer__algorithm__dynamic_sampling__type="variance",
    )  # fmt: skip
    run.train()
    found = audit(read_rows(folder.ledger))
    assert sorted(name for name, ends in found.items() if ends[0].startswith("rejected")) == [
        "e0-i2",
        "e0-i5",
    ]
    assert len(found) == 10


# ---------------------------------------------------------------- the real policy and engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Stop(TrainerCallback):
    """Ends a run at the end of a step, before its checkpoint."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == self._after:
            raise Broken


DEFINITE = [plan for plan in PLANS if plan not in BOUNDED]
STEPS = 6  # of four prompts, with ten in an epoch


def definite(plan: type[RayPPOTrainer], model: str, folder: Path, **settings: Any) -> LocalRun:
    """Settings of a plan whose batches do not depend on the clock."""
    cfg = config(
        model, steps=STEPS, ckpt_interval=1, ckpt_path=str(folder), stream_groups=2, **settings
    )
    cfg.generator.sampling_params.seed = 5  # a request is sampled by its name, in any run
    return LocalRun(type("Remembering", (Memory, plan), {}), cfg)


@pytest.fixture(scope="module")
def whole_runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[type, LocalRun]:
    """By plan: uninterrupted."""
    runs = {plan: definite(plan, model, tmp_path_factory.mktemp("whole")) for plan in DEFINITE}
    return {plan: asyncio.run(run.train()) for plan, run in runs.items()}


@pytest.mark.parametrize(
    "stop",
    [pytest.param(2, marks=pytest.mark.matrix), 3, pytest.param(5, marks=pytest.mark.matrix)],
)
@pytest.mark.parametrize("plan", DEFINITE)
async def test_plans_whose_batches_are_definite_resume_bit_for_bit(
    plan: type[RayPPOTrainer],
    whole_runs: dict[type, LocalRun],
    model: str,
    tmp_path: Path,
    stop: int,
) -> None:
    """The step is interrupted at its end, before its checkpoint, and repeated."""
    whole = whole_runs[plan]
    first = definite(plan, model, tmp_path / "cut")
    first.trainer.callbacks.append(Stop(after=stop))
    with pytest.raises(Broken):
        await first.train()
    second = await definite(plan, model, tmp_path / "cut", resume_mode="latest").train()
    assert (
        first.trainer.trained_ids[: 4 * (stop - 1)] + second.trainer.trained_ids
        == whole.trainer.trained_ids
    )
    for step in range(stop, STEPS + 1):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "staleness/max"):
            assert second.tracker.rows[step][name] == whole.tracker.rows[step][name], (step, name)
    ours, theirs = second.dispatch.weights(), whole.dispatch.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Watched(Memory, FullyAsyncRayPPOTrainer):
    """Saves when the requests in flight have some tokens."""

    async def save_checkpoint(self, **how: Any) -> Path | None:
        def halfway() -> bool:
            return sum(len(each.token_ids) for each in client._inflight.so_far().values()) >= 40

        client = self.inference_engine_client
        while client._inflight and not halfway():
            await client.progress()
        return await super().save_checkpoint(**how)


class RecordsRequests(InferenceClient):
    """Records the requests to engines: their ids, and the prompts' lengths."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: dict[str, list[int]] = {}

    def _submit(self, request: Any, caller_id: str, group: Any) -> None:
        self.asked.setdefault(caller_id, []).append(len(request.prompt_token_ids))
        super()._submit(request, caller_id, group)


async def test_a_resumed_run_asks_the_engines_for_no_token_that_the_checkpoint_had(
    model: str, tmp_path: Path
) -> None:
    def run(**settings: Any) -> LocalRun:
        cfg = config(
            model, steps=5, train_length=40, ckpt_interval=1, ckpt_path=str(tmp_path), **settings
        )
        return LocalRun(Watched, cfg, client=RecordsRequests)

    first = run()
    first.trainer.callbacks.append(Stop(after=3))
    with pytest.raises(Broken):
        await first.train()
    kept = saved.read(
        tmp_path / "step_000002" / saved.FILE, first.trainer.context.prompts.of_identity
    )
    had = {str(t.id): t for t in kept.partial}
    assert sum(len(t.actions[0].tokens) for t in had.values() if t.actions) >= 40

    second = await run(resume_mode="latest").train()
    trained = {
        str(t.id): t
        for groups in second.trainer.trained
        for group in groups
        for t in group.trajectories
    }
    for name, before in had.items():
        (now,), asked = trained[name].actions, second.client.asked.get(f"{name}-t0", [])
        done = before.actions[0] if before.actions else None
        count = len(done.tokens) if done else 0
        assert now.tokens[:count].tolist() == (done.tokens.tolist() if done else [])
        assert now.logprobs[:count].tolist() == (done.logprobs.tolist() if done else [])
        assert now.versions[:count].tolist() == (done.versions.tolist() if done else [])
        whole = done is not None and before.stop_reason != "abort"
        assert asked[:1] == ([] if whole else [len(now_prompt(trained[name])) + count])
    assert max(second.tracker.rows[step]["staleness/max"] for step in range(3, 6)) <= 1


def now_prompt(trajectory: Trajectory) -> list[int]:
    return trajectory.segments[0].tokens.tolist()
