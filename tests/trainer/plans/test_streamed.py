"""The streamed plan: on policy and overlapped, with the gradient of the synchronous plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.streamed import Arrivals, StreamedRayPPOTrainer
from tests.inference.tiny_llama import EOS, VOCABULARY, save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config
from tests.trainer.plans.parts import dataset, make_run, stream

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_double(tmp_path_factory.mktemp("double"))


def save_double(folder: Path) -> str:
    """A model that computes in its weights' dtype throughout: Llama's norms are always float32."""
    save_tiny_llama(folder, tied=True)  # for its tokenizer
    torch.manual_seed(0)
    settings = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, eos_token_id=EOS,
                          bos_token_id=EOS, pad_token_id=EOS, initializer_range=0.2, resid_pdrop=0.0, embd_pdrop=0.0,
                          attn_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(settings).save_pretrained(folder)
    return str(folder)


# ---------------------------------------------------------------- order of training


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.booleans(), st.data())
def test_every_group_is_taken_once_and_in_order_only_where_order_counts(
    order, rejected, in_order, data
) -> None:
    arrivals, taken = Arrivals(in_order, started=6), []
    groups = [Group(prompt, []) for prompt in dataset(6)]
    for place in order:
        arrivals.end(place, [groups[place]], {}, accepted=place not in rejected)
        if data.draw(st.booleans()):
            taken += arrivals.take()
    taken += arrivals.take()
    assert arrivals.complete
    assert sorted(group.prompt.id.row for group in taken) == sorted(set(range(6)) - rejected)
    assert sorted(group.prompt.id.row for group in arrivals.rejected) == sorted(rejected)
    if in_order:
        assert [group.prompt.id.row for group in taken] == sorted(set(range(6)) - rejected)


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)), st.integers(1, 8), st.data())
def test_what_is_trained_together_does_not_depend_on_what_ends_first(
    order, rejected, portion, data
) -> None:
    arrivals, taken = Arrivals(False, 7, portion), []
    groups = [Group(prompt, []) for prompt in dataset(7)]
    for place in order:
        arrivals.end(place, [groups[place]], {}, accepted=place not in rejected)
        while data.draw(st.booleans()) and (some := arrivals.take()):
            taken.append([group.prompt.id.row for group in some])
    while some := arrivals.take():
        taken.append([group.prompt.id.row for group in some])
    assert arrivals.complete
    firsts = range(0, 7, portion)
    portions = [
        [row for row in range(first, min(first + portion, 7)) if row not in rejected]
        for first in firsts
    ]
    assert taken == [rows for rows in portions if rows]


def test_groups_may_be_trained_in_the_order_of_their_prompts() -> None:
    run = make_run(
        StreamedRayPPOTrainer, prompts=4, generating=[9.0, 1.0, 1.0, 1.0], updating=[2.0], syncing=[0.0],
        trainer__stream_groups=2,
    ).train()  # fmt: skip
    assert [[i.row for i in part] for part in run.dispatch.trained] == [[i.row for i in stream(4)]]
    assert run.tracker.of("time/step_s")[1] == pytest.approx(
        9.0 + 2 * 2.0
    )  # all wait for the first one


def test_metrics_of_rewards_are_of_the_whole_batch() -> None:
    """Prompts whose samples are all right arrive first, half of the others' samples are right."""
    right = frozenset(identity.row for identity in stream(8)[::2])
    settings: dict[str, Any] = {
        "prompts": 8,
        "all_right": right,
        "generating": (1.0, 9.0, 3.0, 20.0),
    }
    settings |= {
        "trainer__algorithm__reward_scale": 10.0,
        "trainer__algorithm__use_kl_in_reward": True,
    }
    streamed, synchronous = (
        make_run(plan, **settings).train().tracker
        for plan in (StreamedRayPPOTrainer, RayPPOTrainer)
    )
    for name in ("reward/mean", "reward/shaped_mean", "reward/kl"):
        assert streamed.of(name) == pytest.approx(synchronous.of(name))
    assert synchronous.of("reward/shaped_mean") == pytest.approx({1: 7.5, 2: 7.5})


def test_a_batch_trains_while_its_stragglers_are_generated() -> None:
    run = make_run(
        StreamedRayPPOTrainer,
        prompts=4,
        generating=[1.0, 1.0, 1.0, 9.0],
        updating=[2.0],
        syncing=[0.0],
    ).train()
    # Three groups are there after a second and trained until the third; the last comes after 9 and takes 2 more.
    assert run.tracker.of("time/step_s")[1] == pytest.approx(11.0)
    assert run.tracker.of("time/wait_data_s")[1] == pytest.approx(1.0 + 6.0)
    assert run.dispatch.weights == 1
    assert run.tracker.of("staleness/max") == {1: 0.0}


def test_with_mini_batches_an_update_follows_as_soon_as_its_prompts_are_complete() -> None:
    run = make_run(
        StreamedRayPPOTrainer, prompts=4, generating=[1.0, 1.0, 9.0, 1.0], updating=[1.0], syncing=[0.0],
        trainer__policy_mini_batch_size=2,
    ).train()  # fmt: skip
    assert [[i.row for i in update] for update in run.dispatch.trained] == [
        [i.row for i in stream(4)[:2]],
        [i.row for i in stream(4)[2:]],
    ]
    late = run.dispatch.batches[-1]
    assert torch.equal(late.proximal_logprobs, late.behaviour_logprobs)


# ---------------------------------------------------------------- the gradient


class Gradients(LocalRun):
    """Keeps the gradient of every update, as it changed the weights."""

    def __init__(self, plan: type[RayPPOTrainer], cfg: Any, dtype: torch.dtype) -> None:
        super().__init__(plan, cfg)
        worker: Any = self.dispatch._policy
        worker.backend.model.to(dtype)
        self.found: list[torch.Tensor] = []
        clip = worker.backend._clip

        def noted() -> float:
            self.found.append(
                torch.cat([p.grad.flatten().clone() for p in worker.backend.model.parameters()])
            )
            return clip()

        worker.backend._clip = noted


async def gradients(
    model: str,
    plan: type[RayPPOTrainer],
    dtype: torch.dtype,
    algorithm: dict[str, Any],
    **trainer: Any,
):
    cfg = config(model, steps=1, train_batch_size=8, **trainer)
    for name, value in algorithm.items():
        setattr(cfg.trainer.algorithm, name, value)
    return (await Gradients(plan, cfg, dtype).train()).found


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss_reduction": "sequence_mean", "advantage_estimator": "rloo"},
        {"loss_reduction": "prompt_mean", "policy_loss_type": "gspo"},
        {"loss_reduction": "token_sum", "advantage_estimator": "dr_grpo"},
        {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 12},
    ],
    ids=lambda algorithm: algorithm.get("loss_reduction", "token_mean"),
)
async def test_the_gradient_is_that_of_the_synchronous_plan(
    model, double, algorithm, dtype, close
) -> None:
    model = double if dtype == torch.float64 else model
    (expected,) = await gradients(model, RayPPOTrainer, dtype, algorithm)
    (found,) = await gradients(model, StreamedRayPPOTrainer, dtype, algorithm)
    assert float((found - expected).norm() / expected.norm()) < close


async def test_the_first_mini_batchs_gradient_is_that_of_the_synchronous_plan_too(model) -> None:
    expected = await gradients(model, RayPPOTrainer, torch.float32, {}, policy_mini_batch_size=4)
    found = await gradients(
        model, StreamedRayPPOTrainer, torch.float32, {}, policy_mini_batch_size=4
    )
    assert len(found) == len(expected) == 2
    assert float((found[0] - expected[0]).norm() / expected[0].norm()) < 1e-6
    # Then the engines' log-probabilities replace the policy's own: equal up to rounding.
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-3
