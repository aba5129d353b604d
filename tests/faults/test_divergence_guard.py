"""Non-finite values and spikes, in every plan: which samples are dropped, which steps undone, and when the run ends."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.cli.replay_experiment import ReplayTrainer
from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.envs.base import BaseTextEnvStepOutput
from skyasync.errors import NonFiniteError, NonFiniteRewardError, UserError
from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import RunDirectory
from skyasync.rollout import trajectory_files as recorded
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.prompt_ledger import audit
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, OddBytes, config
from tests.trainer.plans.parts import PLANS, Run, make_run, stream

pytestmark = pytest.mark.slow

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
NAN = float("nan")


class NonFiniteAdvantages(RayPPOTrainer):
    """Advantages are not finite in the steps ``bad``; keeps the weights after every step."""

    bad: frozenset[int]

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.states: dict[int, dict[str, list[torch.Tensor]]] = {}

    def compute_advantages_and_returns(self, batch: Any) -> Any:
        found = super().compute_advantages_and_returns(batch)
        if self.global_step + 1 in self.bad:
            found.advantages[found.loss_mask] = NAN  # and the critic's returns are finite
        return found

    async def end_step(self, status: Any) -> None:
        for role in ("policy", "critic"):
            if role in self.dispatch._groups:  # type: ignore[attr-defined]
                worker = self.dispatch.worker(role)  # type: ignore[attr-defined]
                optimizer_state = [
                    v for state in worker.backend.optimizer.state.values() for v in state.values()
                ]
                tensors = [*worker.backend.model.parameters(), *optimizer_state]
                self.states.setdefault(self.global_step, {})[role] = [
                    t.detach().clone() for t in tensors
                ]
        await super().end_step(status)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


def local(
    plan: type[RayPPOTrainer],
    model: str,
    folder: Path,
    *,
    critic: bool = False,
    env: str = "",
    bad: Iterable[int] = (2,),
    **trainer: Any,
) -> LocalRun:
    cfg = config(model, steps=3, eval_interval=0, **trainer)
    if critic:
        cfg.trainer.algorithm.advantage_estimator, cfg.trainer.algorithm.gae_whiten = "gae", False
    NonFiniteReward.played = False
    breaking = type("Breaking", (NonFiniteAdvantages, plan), {"bad": frozenset(bad)})
    run = LocalRun(breaking, cfg, **({"env": env} if env else {}))  # type: ignore[arg-type]
    run.trainer.context.run_dir = RunDirectory(folder, "run")
    return run


@every_plan
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
async def test_an_update_that_is_not_finite_is_left_out_by_policy_and_critic(
    plan: type[RayPPOTrainer], critic: bool, model: str, tmp_path: Path
) -> None:
    run = await local(plan, model, tmp_path, critic=critic, on_nonfinite="skip").train()
    rows, states = run.tracker.rows, run.trainer.states  # type: ignore[attr-defined]
    assert list(rows) == [1, 2, 3]
    assert [rows[step].get("nonfinite/skipped") for step in rows] == [None, 1.0, None]
    assert ["policy/loss" in rows[step] for step in rows] == [True, False, True]
    ends = audit(read_rows(tmp_path / "run" / "ledger.jsonl"))
    assert (
        sorted(end for (end,) in ends.values())
        == ["given_up@2"] * 4 + ["trained@1"] * 4 + ["trained@3"] * 4
    )
    for role in states[1]:
        assert all(map(torch.equal, states[1][role], states[2][role])), (
            f"the {role} was trained on it"
        )
        assert not all(map(torch.equal, states[2][role], states[3][role]))
    (file,) = (tmp_path / "run" / "nonfinite").iterdir()
    kept = recorded.read(file)
    assert (kept.step, len(kept.groups)) == (2, 4)
    assert all(values is not None for values in kept.trainer_logprobs), (
        "the trainer's log-probabilities of the tokens"
    )


@every_plan
async def test_without_a_word_it_ends_the_run_and_the_batch_is_kept(
    plan: type[RayPPOTrainer], model: str, tmp_path: Path
) -> None:
    run = local(plan, model, tmp_path)
    with pytest.raises(NonFiniteError, match="loss of optimizer step 1 is not finite"):
        await run.train()
    (file,) = (tmp_path / "run" / "nonfinite").iterdir()
    assert recorded.read(file).step == 2
    if plan is PLANS[0]:  # and it can be trained on
        again = LocalRun(ReplayTrainer, config(model, steps=0, eval_interval=0))
        again.trainer.files, again.trainer.independent = [file], True  # type: ignore[attr-defined]
        await again.train()
        assert list(again.tracker.rows) == [1] and again.tracker.rows[1]["policy/grad_norm"] > 0


async def test_several_in_a_row_end_the_run(model: str, tmp_path: Path) -> None:
    run = local(PLANS[0], model, tmp_path, bad=(2, 3), on_nonfinite="skip", max_bad_steps=2)
    with pytest.raises(
        NonFiniteError, match=r"2 optimizer steps in a row .*trainer\.max_bad_steps"
    ):
        await run.train()
    assert list(run.tracker.rows) == [1, 2]
    assert len(list((tmp_path / "run" / "nonfinite").iterdir())) == 2


class NonFiniteReward(OddBytes):
    """A non-finite reward for the first sample of one row, which is in the second batch."""

    played = False

    def init(self, prompt: Any) -> Any:
        self._bad = prompt[-1]["content"].endswith("4") and not NonFiniteReward.played
        NonFiniteReward.played |= self._bad
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return super().step(action) | ({"reward": NAN} if self._bad else {})  # type: ignore[return-value]


NO_NUMBER = f"{__name__}:NonFiniteReward"


@every_plan
@pytest.mark.parametrize("refill", [False, True], ids=["", "filtered"])
async def test_a_step_with_a_reward_that_is_no_number_is_left_out(
    plan: type[RayPPOTrainer],
    refill: bool,
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = local(
        plan, model, tmp_path, env=NO_NUMBER, bad=(), on_nonfinite="skip", dump_trajectories=True
    )
    if refill:
        run.cfg.trainer.algorithm.dynamic_sampling.type = "variance"
    await run.train()
    rows, states = run.tracker.rows, run.trainer.states  # type: ignore[attr-defined]
    bad = next(step for step, row in rows.items() if "nonfinite/rewards" in row)
    assert (rows[bad]["nonfinite/rewards"], rows[bad]["nonfinite/skipped"]) == (1.0, 1.0)
    assert all(map(torch.equal, states[bad - 1]["policy"], states[bad]["policy"]))
    assert ["policy/loss" in rows[step] for step in rows] == [step != bad for step in rows]
    assert re.search(r"the reward of 1 episode is not finite \(e0-i4-r\d: nan\)", caplog.text)
    ends = audit(read_rows(tmp_path / "run" / "ledger.jsonl"))
    given_up = {name for name, (end,) in ends.items() if end == f"given_up@{bad}"}
    assert "e0-i4" in given_up and len(given_up) == 4, (
        "groups that were in no update are not trained"
    )
    assert len([end for (end,) in ends.values() if end.startswith("trained@")]) == 8


@every_plan
async def test_a_reward_that_is_no_number_ends_the_run(
    plan: type[RayPPOTrainer], model: str, tmp_path: Path
) -> None:
    run = local(plan, model, tmp_path, env=NO_NUMBER, bad=())
    with pytest.raises(
        NonFiniteRewardError, match=r"the environment of e0-i4-r\d: the reward is nan"
    ):
        await run.train()


class BadReward(RayPPOTrainer):
    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        groups[0].trajectories[1].segments[-1].reward = NAN
        return groups


async def test_so_does_one_that_a_hook_or_a_generator_of_ones_own_brings_and_its_batch_is_kept(
    model: str, tmp_path: Path
) -> None:
    run = local(type("Bad", (BadReward, PLANS[0]), {}), model, tmp_path, bad=())
    with pytest.raises(
        NonFiniteError, match=r"the reward of 1 episode is not finite \(e0-i\d+-r1: nan\)"
    ):
        await run.train()
    (file,) = (tmp_path / "run" / "nonfinite").iterdir()
    rewards = [reward for group in recorded.read(file).groups for reward in group.rewards]
    assert sum(map(math.isnan, rewards)) == 1


async def test_an_evaluation_with_a_reward_that_is_no_number_says_so(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    for choice in ("skip", "raise"):
        NonFiniteReward.played = False
        run = LocalRun(PLANS[0], config(model, steps=2, on_nonfinite=choice, eval_interval=1))
        run.trainer.eval_dataset = [replace(p, messages=[{"role": "user", "content": "4"}], env_class=NO_NUMBER)
                                    for p in run.trainer.eval_dataset]  # fmt: skip
        if choice == "skip":
            await run.train()
            assert (
                math.isnan(run.tracker.rows[1]["eval/score"])
                and run.tracker.rows[2]["eval/score"] >= 0
            )
            assert "the reward of 1 episode is not finite" in caplog.text
        else:
            with pytest.raises(NonFiniteRewardError, match="the reward is nan"):
                await run.train()


# ---------------------------------------------------------------- spikes


def spiking(plan: type[RayPPOTrainer], folder: Path, kls: dict[int, float], **settings: Any) -> Run:
    """``kls``: the KL of each update by its number; the others report 0."""
    run = make_run(
        plan, prompts=24, trainer__spike_limits={"policy/approx_kl": 0.5}, trainer__ckpt_path=str(folder),
        trainer__ckpt_interval=2, **settings,
    )  # fmt: skip
    step, count = run.dispatch.optimizer_step, [0]

    async def reporting(schedule_step: int, scale: float, role: str) -> dict[str, float]:
        count[0] += 1
        return await step(schedule_step, scale, role) | {"approx_kl": kls.get(count[0], 0.0)}

    run.dispatch.optimizer_step = reporting  # type: ignore[method-assign]
    return run


@every_plan
def test_a_spike_warns(
    plan: type[RayPPOTrainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = spiking(plan, tmp_path, {3: 0.75}).train()
    assert run.tracker.of("spikes/count") == {3: 1.0}
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        "step 3: policy/approx_kl=0.75 is beyond its limit, 0.5 (trainer.spike_limits)"
    ]


@every_plan
def test_a_spike_ends_the_run_before_engines_get_its_weights(
    plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    run = spiking(plan, tmp_path, {3: 0.75}, trainer__on_spike="raise")
    with pytest.raises(
        UserError, match=r"step 3: policy/approx_kl=0\.75 .*trainer\.on_spike=raise"
    ):
        run.train()
    assert run.sync.versions == [0, 1, 2]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000002"]


@every_plan
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_spike_is_undone_and_its_data_left_out(
    plan: type[RayPPOTrainer], asynchronous: bool, tmp_path: Path
) -> None:
    kls = {1: 0.6, 4: 0.75}
    run = spiking(
        plan, tmp_path, kls, trainer__on_spike="rollback", trainer__ckpt_async=asynchronous
    ).train()
    assert [step for step, _ in run.tracker.rows] == [1, 2, 3, 4, 5, 6], (
        "no step is doubled or missing"
    )
    assert run.tracker.of("spikes/rolled_back_to") == {1: 0.0, 4: 2.0}
    # The dispatch's weights count updates: the guard undoes step 1 (1 -> 0), and steps 3 and 4 (3 -> 1).
    assert run.dispatch.weights == 3
    assert run.trained == stream(24), "every prompt is trained once"
    assert run.sync.versions == [0, 1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_on_leaves_the_same_data_out(tmp_path: Path) -> None:
    first = spiking(PLANS[0], tmp_path, {3: 1.0}, trainer__on_spike="rollback")
    first.faults["update", 4] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        first.train()
    second = spiking(
        PLANS[0], tmp_path, {}, trainer__on_spike="rollback", trainer__resume_mode="latest"
    ).train()
    assert second.trained == stream(24)[12:] and second.dispatch.weights == 2 + 3


def test_the_ledger_counts_what_was_undone_as_given_up(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, "run")
    run = spiking(
        PLANS[0], tmp_path, {4: 0.75}, trainer__on_spike="rollback", run_dir=folder
    ).train()
    ends = audit(read_rows(folder.ledger))
    assert sorted(ends) == sorted(map(str, run.trained)) and {
        len(found) for found in ends.values()
    } == {1}
    of = [str(identity) for identity in run.trained]
    assert {name for name in of if ends[name] == ["given_up@4"]} == set(of[8:16]), (
        "the prompts of steps 3 and 4"
    )
    assert {ends[name][0].partition("@")[0] for name in of[:8] + of[16:]} == {"trained"}


def test_solved_groups_of_undone_steps_are_not_replayed(tmp_path: Path) -> None:
    """Each step replays the four groups of the step before."""
    options: dict[str, Any] = {"trainer__on_spike": "rollback", "data__replay_groups": 4}
    run = spiking(PLANS[0], tmp_path, {4: 0.75}, **options).train()
    steps = [stream(24)[start : start + 4] for start in range(0, 24, 4)]
    replayed = [steps[0], steps[1], steps[2], [], steps[4]]
    assert run.trained == steps[0] + [
        each for new, old in zip(steps[1:], replayed, strict=True) for each in new + old
    ]


def test_the_ledgers_lines_of_before_a_resume_are_not_undone(tmp_path: Path) -> None:
    first = spiking(
        PLANS[0], tmp_path, {}, trainer__on_spike="rollback", run_dir=RunDirectory(tmp_path, "run")
    )
    first.faults["update", 4] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        first.train()
    folder = RunDirectory(tmp_path, "run", resume=True)
    options: dict[str, Any] = {
        "trainer__on_spike": "rollback",
        "trainer__resume_mode": "latest",
        "run_dir": folder,
    }
    run = spiking(PLANS[0], tmp_path, {1: 0.75}, **options).train()
    ends = audit(read_rows(folder.ledger))
    assert {len(found) for found in ends.values()} == {1}
    assert {name for name, found in ends.items() if found == ["given_up@3"]} == set(
        map(str, run.trained[:4])
    )


@pytest.mark.parametrize("mode", ["2", "step_000002"])
def test_a_rollback_goes_to_the_checkpoint_that_was_resumed_until_there_is_a_newer_one(
    mode: str, tmp_path: Path
) -> None:
    """``weights`` count updates: those of steps that were trained before the resume are not restored."""
    spiking(PLANS[0], tmp_path / "one", {}, trainer__ckpt_keep=0).train()
    own = tmp_path / "one" if mode == "2" else tmp_path / "two"
    mode = mode if mode == "2" else str(tmp_path / "one" / mode)
    options: dict[str, Any] = {"trainer__on_spike": "rollback", "trainer__resume_mode": mode}
    run = spiking(PLANS[0], own, {1: 0.75, 4: 0.75}, **options).train()
    assert run.tracker.of("spikes/rolled_back_to") == {3: 2.0, 6: 4.0}
    assert run.dispatch.weights == 2 + 1, (
        "steps 3, 5 and 6 are undone: 2, then 4 and what it had of step 4"
    )


def test_steps_undone_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = spiking(
        PLANS[0], tmp_path, {3: 1.0, 4: 1.0}, trainer__on_spike="rollback", trainer__max_bad_steps=2
    )
    with pytest.raises(
        UserError, match=r"step 4: rolled back 2 steps in a row \(trainer\.max_bad_steps=2\): "
    ):
        run.train()


def test_a_limit_for_a_metric_that_there_is_not_names_the_nearest(tmp_path: Path) -> None:
    run = spiking(PLANS[0], tmp_path, {}, trainer__on_spike="raise")
    run.trainer.cfg.trainer.spike_limits["policy/aprox_kl"] = 1.0
    with pytest.raises(
        UserError, match=r"spike_limits names policy/aprox_kl, .* did you mean policy/approx_kl\?"
    ):
        run.train()


def test_a_documented_metric_that_some_steps_lack_is_no_mistake_also_after_a_resume(
    tmp_path: Path,
) -> None:
    """``gap/mean`` is of the first step alone, in which the trainer's version is the sampler's."""
    settings: dict[str, Any] = {
        "trainer__policy_mini_batch_size": 2,
        "trainer__spike_limits": {"gap/mean": 1.0},
    }
    settings |= {"prompts": 24, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    first = make_run(PLANS[1], trainer__max_training_steps=3, **settings).train()
    assert list(first.tracker.of("gap/mean")) == [1]
    second = make_run(PLANS[1], trainer__resume_mode="latest", **settings).train()
    assert [step for step, _ in second.tracker.rows] == [4, 5, 6]


def test_a_metric_of_the_users_loss_that_a_step_had_may_be_absent_after_a_resume(
    tmp_path: Path,
) -> None:
    def run(names: set[int], **settings: Any) -> Run:
        run = spiking(PLANS[0], tmp_path, {}, **settings)
        run.trainer.cfg.trainer.spike_limits["policy/mine"] = 1.0
        step = run.dispatch.optimizer_step

        async def own(schedule_step: int, scale: float, role: str) -> dict[str, float]:
            found = await step(schedule_step, scale, role)
            return found | ({"mine": 0.5} if run.trainer.global_step + 1 in names else {})

        run.dispatch.optimizer_step = own  # type: ignore[method-assign]
        return run

    run({1, 2}, trainer__max_training_steps=2).train()
    assert run({5}, trainer__resume_mode="latest").train().tracker.of("policy/mine") == {5: 0.5}


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"spike_limits": {"policy/approx_kl": "high"}},
            ["spike_limits.policy/approx_kl='high' is not a number"],
        ),
        (
            {"spike_limits": {"a": 1}, "on_spike": "rollback"},
            ["trainer.on_spike=rollback", "trainer.ckpt_interval"],
        ),
        (
            {"spike_limits": {"sync/logprob_gap": 1}, "on_spike": "rollback", "ckpt_interval": 1},
            ["trainer.spike_limits.sync/logprob_gap", "too late"],
        ),
        (
            {"max_bad_steps": 4},
            ["trainer.max_bad_steps=4 has no effect with", "trainer.on_nonfinite=raise"],
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    cfg = Config()
    vars(cfg.trainer).update(settings)
    (problem,) = [line for line in check_config(cfg) if any(name in line for name in settings)]
    assert [word for word in words if word not in problem] == []
