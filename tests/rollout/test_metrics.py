import pytest
from PIL import Image as PIL

from skyasync.models.images import decoded, read_image
from skyasync.rollout.metrics import (
    environment_metrics,
    eval_name,
    rollout_metrics,
    sample_records,
    staleness_metrics,
)
from skyasync.rollout.types import Group, Segment
from tests.rollout.episodes import action, prompt, trajectory


def group(*rewards, row=0, version=0):
    found = [
        trajectory(action([3, 4], r, version=version), repetition=i) for i, r in enumerate(rewards)
    ]
    return Group(prompt(row), found)


def test_rewards_are_averaged_over_trajectories_and_mixed_groups_counted():
    found = rollout_metrics([group(0.0, 1.0), group(1.0, 1.0)])
    assert found["reward/mean"] == 0.75
    assert found["reward/std"] == pytest.approx(0.4330127)
    assert found["reward/mixed_groups"] == 0.5


def test_lengths_count_generated_tokens_and_not_observations():
    cut = trajectory(action([1]), Segment("observation", [9] * 5), action([2, 3]), stop="length")
    found = rollout_metrics([Group(prompt(0), [cut, trajectory(action([4]))])])
    assert (found["response/length_mean"], found["response/length_max"]) == (2.0, 3.0)
    assert found["response/truncated"] == 0.5


async def test_nothing_has_no_metrics():
    assert rollout_metrics([]) == await staleness_metrics([], 3) == {}


def test_an_environments_metric_is_averaged_over_the_trajectories_that_report_it():
    first, second, third = (trajectory(action([1])) for _ in range(3))
    first.metrics, second.metrics, third.metrics = {"a": 1.0}, {"a": 3.0, "b": 5.0}, {}
    assert environment_metrics([first, second, third]) == {"a": 2.0, "b": 5.0}


async def test_staleness_is_read_from_the_stamps_of_every_token():
    crossing = trajectory(
        action([1, 2], version=3), Segment("observation", [9]), action([3, 4], version=5)
    )
    found = await staleness_metrics([Group(prompt(0), [crossing]), group(0.0, version=4)], 5)
    assert (found["staleness/min"], found["staleness/max"]) == (0, 2)
    assert found["staleness/mean"] == pytest.approx((2 + 2 + 0 + 0 + 1 + 1) / 6)
    assert found["staleness/head_mean"] == 1.5
    assert found["staleness/last_token_mean"] == 0.5
    assert [found[f"staleness/tokens_{staleness}"] for staleness in (0, 1, 2)] == [2, 2, 2]


def test_samples_are_the_first_of_the_first_groups_with_what_was_said():
    talk = trajectory(action([3]), Segment("observation", [9]), action([4], 1.0), row=0)
    found = sample_records(
        [Group(prompt(0), [talk]), group(0.0, row=1)], 1, decode=lambda tokens: str(tokens)
    )
    assert found == [
        {"prompt_id": "e0-i0-r0", "prompt": "question 0", "response": "[3, 9, 4]", "reward": 1.0,
         "stop_reason": "stop", "versions": [0],
         "tokens": {"text": ["[3]", "[9]", "[4]"], "versions": [0, -1, 0], "logprobs": [-0.5, None, -0.5]}}
    ]  # fmt: skip


def test_a_sample_shows_its_images_in_small():
    large = read_image(PIL.new("RGB", (800, 400), (255, 0, 0)))
    talk = trajectory(
        action([3]), Segment("observation", [9], images=(large,)), action([4], 1.0), row=0
    )
    (found,) = sample_records([Group(prompt(0), [talk])], 1, decode=str)
    (shown,) = found["images"]
    assert decoded(read_image(shown)).size == (160, 80)
    assert len(shown) < 3000


@pytest.mark.parametrize(
    "row, label",
    [({"answer": 42}, "42"), ({"reward_spec": {"ground_truth": "13"}}, "13"), ({"label": 0, "answer": 1}, "0"),
     ({"label": ["assert f(1)"] * 1000}, str(["assert f(1)"] * 1000)[:2000])],
)  # fmt: skip
def test_a_sample_is_saved_with_the_right_answer(row, label):
    one = group(0.0)
    one.prompt.extras.update(row)
    assert sample_records([one], 1, decode=str)[0]["label"] == label


def test_rewards_are_told_per_domain_as_well():
    groups = [group(0.0, 1.0), group(1.0, 1.0), group(0.0, 0.0), group(0.5, 0.5)]
    for found, domain in zip(groups, ("a", "a", "b", None), strict=True):
        found.prompt.extras["domain"] = domain
    found = rollout_metrics(groups)
    assert {name: found[name] for name in sorted(found) if name.endswith(("/a", "/b"))} == {
        "reward/mean/a": 0.75, "reward/mean/b": 0.0, "reward/mixed_groups/a": 0.5, "reward/mixed_groups/b": 0.0,
        "reward/prompts/a": 0.5, "reward/prompts/b": 0.25,
    }  # fmt: skip


def test_a_domain_whose_episodes_all_failed_has_no_mean_reward():
    failed = trajectory(row=1, stop="abort")
    failed.metrics = {"given_up": 1.0}
    metrics = rollout_metrics([group(1.0), Group(prompt(1, domain="code"), [failed])])
    assert metrics["reward/prompts/code"] == 0.5 and "reward/mean/code" not in metrics
    assert metrics["env/given_up"] == 1.0


def test_in_evaluation_the_reward_is_the_score():
    names = (
        "reward/mean",
        "reward/mean/sums",
        "reward/mean_other",
        "reward/std",
        "env/exact_match",
    )
    assert [eval_name(name) for name in names] == [
        "eval/score", "eval/score/sums", "eval/reward_mean_other", "eval/reward_std", "eval/env_exact_match",
    ]  # fmt: skip
