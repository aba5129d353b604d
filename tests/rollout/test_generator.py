"""Episodes with the real client, pool and tokenizer; only the engine is scripted."""

import asyncio
from copy import deepcopy
from dataclasses import replace

import pytest

from skyasync.envs.pool import local_pool
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput
from skyasync.rollout import episode_limits as rules
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.generator_api import run_generator
from skyasync.rollout.types import Prompt, PromptId
from tests.rollout.episodes import (
    RecordedEnv,
    ScriptedEngine,
    generator,
    prompt,
    registered,
    request,
    requests,
    tokenizer,
    tokens_of,
)
from tests.rollout.test_chat import DROPS_THOUGHTS
from tests.virtual_time import virtual_time

ENV = "examples.agents.env:CalculatorEnv"


class Once(RecordedEnv):
    """One turn; right if the model says yes."""

    def answer(self, action):
        return {"observations": [], "reward": float(action == "yes"), "done": True, "metadata": {}}


class Countdown(RecordedEnv):
    """Ends after three turns; each turn has its number as reward."""

    def answer(self, action):
        said = [{"role": "user", "content": f"turn {self.turns}: {action}?"}]
        return {
            "observations": said,
            "reward": float(self.turns),
            "done": self.turns == 3,
            "metadata": {},
        }


class FailsOnTwo(RecordedEnv):
    def answer(self, action):
        if self.extras["name"] == "2":
            raise ZeroDivisionError("two")
        return super().answer(action)


def prompts(env, count):
    name = registered(env)
    return [prompt(row, name, name=str(row)) for row in range(count)]


async def groups(generator, asked_for):
    return (await run_generator(generator, asked_for, 0))[0]


@virtual_time
async def test_a_single_turn_is_one_action_with_what_the_engine_said_of_it():
    asked = prompts(Once, 3)
    engine = ScriptedEngine(
        lambda tokens: "yes" if "question 1" in tokenizer().decode(tokens) else "no"
    )
    found = await groups(generator(engine), requests(asked, samples=2))
    assert [g.rewards for g in found] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    only = found[1].trajectories[0]
    assert (
        only.segments[0].tokens.tolist()
        == ChatTokenizer(tokenizer()).prompt(asked[1].messages).tolist()
    )
    assert only.actions[0].tokens.tolist() == [*tokens_of("yes"), tokenizer().eos_token_id]
    assert set(only.actions[0].logprobs) == {-0.25}
    assert set(only.versions) == {4}
    assert only.metrics == {"turns": 1.0}


@virtual_time
async def test_several_turns_feed_the_engine_exactly_what_it_said_and_what_the_environment_answered():
    asked = prompts(Countdown, 1)
    engine = ScriptedEngine(lambda tokens: "yes")
    (group,) = await groups(generator(engine, max_turns=5), requests(asked))
    (episode,) = group.trajectories
    assert [s.kind for s in episode.segments] == [
        "prompt",
        "action",
        "observation",
        "action",
        "observation",
        "action",
    ]
    assert [s.reward for s in episode.actions] == [1.0, 2.0, 3.0]
    for turn, asked_tokens in enumerate(r.prompt_token_ids for r in engine.requests):
        before = episode.segments[: 1 + 2 * turn]
        assert asked_tokens.tolist() == [t for s in before for t in s.tokens.tolist()]
    assert "turn 2: yes?" in tokenizer().decode(episode.tokens)
    assert len({r.request_id for r in engine.requests}) == 3
    assert len({r.session_id for r in engine.requests}) == 1
    assert episode.metrics == {"turns": 3.0}


class Thoughtful(RecordedEnv):
    def answer(self, action):
        said = [{"role": "user", "content": f"turn {self.turns}?"}]
        return {
            "observations": said,
            "reward": float(self.turns),
            "done": self.turns == 3,
            "metadata": {},
        }


@virtual_time
@pytest.mark.parametrize("as_shown", [True, False])
async def test_a_turn_with_a_changed_context_is_a_separate_row(as_shown):
    """The second reply has no reasoning, so the third turn extends the second."""
    speaks, asked = deepcopy(tokenizer()), prompts(Thoughtful, 1)
    speaks.chat_template = DROPS_THOUGHTS

    def says(tokens):
        return "no" if "turn 1?" in tokenizer().decode(tokens) else "<think>why</think>yes"

    engine = ScriptedEngine(says)
    client = InferenceClient([engine], 60)
    plays = EpisodeGenerator(client, local_pool(), speaks, 512, as_template_shows=as_shown)
    (group,) = await groups(plays, requests(asked))
    (episode,) = group.trajectories
    rows = [[s.kind for s in row] for row in episode.sequences]
    if not as_shown:
        assert rows == [["prompt", "action", "observation", "action", "observation", "action"]]
    else:
        assert rows == [["prompt", "action"], ["prompt", "action", "observation", "action"]]
        assert "<think>" not in tokenizer().decode(episode.segments[0].tokens)
        assert "yes" in tokenizer().decode(episode.segments[0].tokens)
    assert [s.reward for s in episode.actions] == [1.0, 2.0, 3.0]
    for asked_tokens, action in zip(
        (r.prompt_token_ids for r in engine.requests), episode.actions, strict=True
    ):
        (row,) = [row for row in episode.sequences if any(s is action for s in row)]
        place = next(n for n, s in enumerate(row) if s is action)
        assert asked_tokens.tolist() == [t for s in row[:place] for t in s.tokens.tolist()]


@virtual_time
@pytest.mark.parametrize(("spread", "sessions"), [(True, 4), (False, 2)])
async def test_a_group_stays_on_one_engine_or_its_episodes_are_free_to_spread(spread, sessions):
    asked = prompts(Countdown, 2)
    engine = ScriptedEngine(lambda tokens: "yes")
    await generator(engine, max_turns=5, spread=spread).generate(request(asked, samples=2))
    assert len(engine.requests) == 2 * 2 * 3
    assert len({r.session_id for r in engine.requests}) == sessions


@virtual_time
async def test_an_environments_tools_are_shown_called_and_answered_without_a_loss():
    from examples.agents.model import Recipe

    speaks = Recipe(corpus_size=64).make_tokenizer()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>'
    asked = [
        Prompt(PromptId(0, 0), [{"role": "user", "content": "12 * 34 ="}], ENV, {"answer": "408"})
    ]

    class Engine(ScriptedEngine):
        async def generate(self, requests):
            self.requests += requests
            for r in requests:
                said = "408" if "408" in speaks.decode(r.prompt_token_ids) else call
                tokens = speaks(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]
                yield [
                    GenerationOutput(
                        r.request_id, tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop"
                    )
                ]

    engine = Engine(lambda _: "")
    episodes = EpisodeGenerator(
        InferenceClient([engine]), local_pool(), speaks, 256, EpisodeLimits(max_turns=3)
    )
    (group,) = await groups(episodes, requests(asked))
    (episode,) = group.trajectories
    prompt, asks, observation, answers = (
        speaks.decode(segment.tokens) for segment in episode.segments
    )
    assert prompt == (
        "<|im_start|>system\ntools: calculator<|im_end|>\n"
        "<|im_start|>user\n12 * 34 =<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    assert (asks, answers) == (f"{call}<|im_end|>", "408<|im_end|>")
    assert observation == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    assert [s.kind for s in episode.segments] == ["prompt", "action", "observation", "action"]
    assert group.rewards == [1.0]
    assert episode.metrics == {"tool_used": 1.0}


@virtual_time
async def test_an_episode_ends_after_max_turns_and_its_environments_metrics_count():
    asked = prompts(Countdown, 2)
    found = await groups(generator(ScriptedEngine(lambda _: "yes"), max_turns=2), requests(asked))
    for group in found:
        assert group.rewards == [3.0]
        assert group.trajectories[0].segments[-1].kind == "action"
        assert group.trajectories[0].metrics == {"turns": 2.0}
    assert sorted(Countdown.closed) == ["0", "1"]


@virtual_time
async def test_by_default_an_episode_has_as_many_turns_as_its_environment_wants():
    asked = prompts(Countdown, 1)
    (group,) = await groups(generator(ScriptedEngine(lambda _: "yes")), requests(asked))
    assert group.trajectories[0].metrics == {"turns": 3.0}


@virtual_time
async def test_an_episode_that_is_full_before_its_environment_is_done_is_told_of_once_with_both_keys(
    caplog,
):
    asked = prompts(Countdown, 2)
    rules._warned.clear()
    limit = len(ChatTokenizer(tokenizer()).prompt(asked[0].messages)) + 8
    output = await generator(ScriptedEngine(lambda _: "yes"), max_model_len=limit).generate(
        request(asked)
    )
    assert output["stop_reasons"] == ["length"] * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert "is full after 1 turns" in told
    assert f"generator.max_model_len={limit}" in told and "generator.max_turns" in told


@virtual_time
async def test_no_sequence_exceeds_max_model_len():
    asked = prompts(Countdown, 1)
    length = len(ChatTokenizer(tokenizer()).prompt(asked[0].messages))
    for limit in range(length + 1, length + 80, 3):
        engine = ScriptedEngine(lambda tokens: "yes yes yes")
        found = await groups(generator(engine, max_model_len=limit, max_turns=3), requests(asked))
        (episode,) = found[0].trajectories
        assert len(episode.tokens) <= limit
        assert all(
            len(r.prompt_token_ids) + r.sampling.max_tokens <= limit for r in engine.requests
        )
        assert all(r.sampling.max_tokens > 0 for r in engine.requests)
        assert episode.segments[-1].kind == "action"
        assert len(episode.actions) == 3 or episode.stop_reason == "length"


@virtual_time
async def test_the_least_length_of_a_response_fits_in_what_is_free():
    asked = prompts(Once, 1)
    length = len(ChatTokenizer(tokenizer()).prompt(asked[0].messages))
    engine = ScriptedEngine(lambda _: "yes")
    longer = [
        replace(each, sampling=replace(each.sampling, min_tokens=30)) for each in requests(asked)
    ]
    await groups(generator(engine, max_model_len=length + 20), longer)
    (sent,) = engine.requests
    assert sent.sampling.min_tokens == sent.sampling.max_tokens == 20, (
        "vLLM and SGLang reject a larger one"
    )


async def test_a_prompt_that_is_too_long_is_rejected_with_its_name_and_the_keys():
    asked = prompts(Once, 1)
    length = len(ChatTokenizer(tokenizer()).prompt(asked[0].messages))
    with pytest.raises(
        UserError, match=rf"e0-i0-r0 has {length} tokens.*generator\.max_model_len={length}"
    ):
        await generator(ScriptedEngine(lambda _: "yes"), max_model_len=length).generate(
            request(asked)
        )


@virtual_time
async def test_an_error_in_one_environment_names_the_episode_and_cancels_the_others():
    asked = prompts(FailsOnTwo, 4)
    with pytest.raises(ZeroDivisionError) as caught:
        await generator(ScriptedEngine(lambda _: "yes")).generate(request(asked))
    notes = "\n".join(caught.value.__notes__)
    assert "while playing the episode e0-i2-r0" in notes
    assert 'raise ZeroDivisionError("two")' in notes
    await asyncio.sleep(1)
    assert sorted(FailsOnTwo.opened) == sorted(FailsOnTwo.closed) == ["0", "1", "2", "3"]
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


@virtual_time
async def test_a_missing_filter_metric_is_an_error_at_the_first_group():
    asked, engine = prompts(Countdown, 3), ScriptedEngine(lambda _: "yes")
    one_by_one = generator(engine, max_turns=1, metric="turnz", in_flight=1)
    with pytest.raises(UserError, match=r"dynamic_sampling\.metric 'turnz': did you mean 'turns'"):
        await one_by_one.generate(request(asked, samples=2))
    assert len(engine.requests) <= 3, "of six episodes"
    found = await groups(generator(engine, max_turns=1, metric="turns"), requests(asked))
    assert [group.trajectories[0].metrics for group in found] == [{"turns": 1.0}] * 3


@virtual_time
async def test_an_engines_error_ends_all_episodes_and_is_told_of_once():
    asked = prompts(Once, 6)
    error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught:
        await generator(ScriptedEngine(lambda _: error)).generate(request(asked, samples=4))
    assert caught.value is error
    assert len([note for note in error.__notes__ if "while playing" in note]) == 1
    await asyncio.sleep(1)
    assert sorted(Once.opened) == sorted(Once.closed)
    assert len(Once.closed) == 24


@virtual_time
async def test_cancellation_closes_every_environment():
    class Silent(ScriptedEngine):
        async def generate(self, requests):
            await asyncio.sleep(1000)
            yield []

    asked = prompts(Once, 5)
    task = asyncio.create_task(generator(Silent(None)).generate(request(asked)))
    await asyncio.sleep(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    await asyncio.sleep(1)
    assert sorted(Once.closed) == ["0", "1", "2", "3", "4"]


@virtual_time
async def test_all_first_requests_travel_in_one_message():
    engine = ScriptedEngine(lambda _: "yes")
    await generator(engine, pool=local_pool(workers=1)).generate(
        request(prompts(Once, 8), samples=4)
    )
    assert len(engine.requests) == 32
    assert engine.messages == 1


@virtual_time
async def test_an_unknown_environment_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="gsm8k"):
        await generator(ScriptedEngine(lambda _: "yes")).generate(request([prompt(0, "gsm8")]))
