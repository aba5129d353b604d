"""Limits of episodes, and environments that misbehave, with the real client, pool and tokenizer."""

import asyncio

import pytest

from skyasync.envs.pool import local_pool
from skyasync.errors import UserError
from skyasync.rollout import episode_limits as rules
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.generator_api import run_generator
from skyasync.rollout.metrics import rollout_metrics
from tests.rollout.episodes import (
    RecordedEnv,
    ScriptedEngine,
    generator,
    prompt,
    registered,
    requests,
    tokenizer,
)
from tests.virtual_time import virtual_time

MISDEEDS = {
    "raises": (ZeroDivisionError, "division"),
    "hangs": (TimeoutError, r"environment.step_timeout_s"),
    "nan": (ValueError, "the reward is nan"),
    "text": (ValueError, "the reward is 'good'"),
    "huge": (ValueError, r"10,000,000 characters; at most 200,000 are allowed"),
    "shapeless": (ValueError, "list of messages"),
    "init": (LookupError, "no board"),
}


class Naughty(RecordedEnv):
    """Two turns with reward 1 each; the row named in ``misdeed`` misbehaves in its second turn, or in ``init``."""

    async def init(self, prompt):
        if self.extras["misdeed"] == "init":
            raise LookupError("no board")
        return super().init(prompt)

    async def step(self, action):
        self.turns += 1
        misdeed = self.extras["misdeed"] if self.turns == 2 else ""
        if misdeed == "hangs":
            await asyncio.sleep(1e6)
        return {
            "observations": {
                "huge": [{"role": "user", "content": "x" * 10_000_000}],
                "shapeless": [["x"]],
            }.get(misdeed, [{"role": "user", "content": "and?"}]),
            "reward": {"raises": 0, "nan": float("nan"), "text": "good"}.get(misdeed, 1.0) or 1 / 0,
            "done": self.turns == 2,
            "metadata": {},
        }


def naughty_prompts(misdeed, count=4):
    name = registered(Naughty)
    return [
        prompt(row, name, name=str(row), misdeed=misdeed if row == 2 else "")
        for row in range(count)
    ]


async def play(asked, engine=None, **options):
    found = generator(engine or ScriptedEngine(lambda _: "go"), max_turns=2, **options)
    return (await run_generator(found, requests(asked), 0))[0]


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_by_default_a_misdeed_ends_the_run_with_one_error_that_names_the_prompt(misdeed):
    @virtual_time
    async def run():
        kind, message = MISDEEDS[misdeed]
        with pytest.raises(kind, match=message) as caught:
            await play(naughty_prompts(misdeed))
        assert "while playing the episode e0-i2-r0" in "\n".join(caught.value.__notes__)

    run()


@pytest.mark.parametrize("on_error", ["mask", "keep"])
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_ends_its_episode_alone_where_that_is_wished_and_is_counted(
    misdeed, on_error, caplog
):
    rules._warned.clear()

    @virtual_time
    async def run():
        asked = naughty_prompts(misdeed)
        groups = await play(asked, on_error=on_error, give_up_reward=-0.5)
        (bad,) = (failed := groups.pop(2)).trajectories
        assert [g.rewards for g in groups] == [[2.0]] * 3
        assert all(len(g.trajectories[0].actions) == 2 for g in groups)
        assert (
            bad.segments[0].tokens.tolist()
            == ChatTokenizer(tokenizer()).prompt(asked[2].messages).tolist()
        )
        played = 0 if misdeed == "init" else 2
        assert len(bad.actions) == (played if on_error == "keep" else 0)
        assert len(bad.tokens) > len(bad.segments[0].tokens) or not played
        assert bad.reward == (-0.5 if played else 0.0)
        assert bad.stop_reason == "abort"
        counted = rollout_metrics([*groups, failed])
        assert counted["env/given_up"] == 0.25 and "dynamic_sampling/ended_early" not in counted
        assert rollout_metrics([failed])["env/given_up"] == 1.0, "also if it is the last one"
        assert bad.metrics == {"given_up": 1.0}
        assert sorted(Naughty.closed) == ["0", "1", "2", "3"]

    run()
    (warning,) = caplog.messages
    assert "episode e0-i2-r0 is given up (environment.on_error)" in warning


@virtual_time
async def test_a_wrong_setting_ends_the_run_whatever_on_error_says():
    class NeedsAnswer(RecordedEnv):
        def answer(self, action):
            raise UserError("the row has no answer")

    with pytest.raises(UserError, match="the row has no answer"):
        await play([prompt(0, registered(NeedsAnswer))], on_error="mask")


class Slow(RecordedEnv):
    """Each step takes ten seconds."""

    async def step(self, action):
        await asyncio.sleep(10)
        return super().step(action)

    def answer(self, action):
        return {"observations": [], "reward": 1.0, "done": self.turns == 2, "metadata": {}}


@virtual_time
async def test_an_episode_that_takes_too_long_is_an_error_that_names_it_and_the_key():
    with pytest.raises(
        TimeoutError,
        match=r"episode e0-i0-r0 did not end within 15 s \(generator.episode_timeout_s\)",
    ):
        await play([prompt(0, registered(Slow))], timeout_s=15)
    assert asyncio.get_running_loop().time() == pytest.approx(15)
    await asyncio.sleep(100)
    assert Slow.closed == ["?"]


@virtual_time
async def test_or_it_is_given_up_with_the_turns_it_had():
    (group,) = await play([prompt(0, registered(Slow))], timeout_s=15, on_error="keep")
    assert (
        len(group.trajectories[0].actions) == 2
    )  # the second one was generated, and has no reward
    assert group.rewards == [0.0]


@pytest.mark.parametrize(("in_flight", "seconds"), [(0, 20), (2, 60), (6, 20)])
def test_no_more_episodes_are_in_flight_than_allowed(in_flight, seconds):
    @virtual_time
    async def run():
        name = registered(Slow)
        await play([prompt(row, name) for row in range(6)], in_flight=in_flight, timeout_s=21)
        assert asyncio.get_running_loop().time() == pytest.approx(seconds)

    run()


@virtual_time
async def test_the_sampling_of_the_next_action_follows_the_environments_wish():
    class Cooling(RecordedEnv):
        def answer(self, action):
            return {
                "observations": [], "reward": 0.0, "done": self.turns == 2, "metadata": {},
                "sampling_params": {"temperature": 0.5, "max_tokens": 3},
            }  # fmt: skip

    engine = ScriptedEngine(lambda _: "go")
    await play([prompt(0, registered(Cooling))], engine)
    assert [(r.sampling.temperature, r.sampling.max_tokens) for r in engine.requests] == [
        (1.0, 32),
        (0.5, 3),
    ]


@virtual_time
async def test_plain_text_is_appended_as_it_is_and_actions_come_with_their_special_tokens():
    heard = []

    class Plain(RecordedEnv):
        raw_text = True

        def init(self, prompt):
            heard.append(prompt)
            return prompt + "Begin: ", {}

        def answer(self, action):
            heard.append(action)
            return {
                "observations": "wrong\n",
                "reward": 0.0,
                "done": self.turns == 2,
                "metadata": {},
            }

    asked = [prompt(0, registered(Plain))]
    ((episode,),) = [g.trajectories for g in await play(asked, pool=local_pool())]
    opening = "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n"
    assert heard == [opening, "go<|im_end|>", "go<|im_end|>"]
    assert tokenizer().decode(episode.tokens) == opening + "Begin: go<|im_end|>wrong\ngo<|im_end|>"
