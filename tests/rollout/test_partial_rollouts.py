"""Episodes that were in flight at a checkpoint continue from their tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.generator_api import run_generator
from tests.rollout.episodes import (
    RecordedEnv,
    generator,
    prompt,
    registered,
    requests,
    tokenizer,
    tokens_of,
)
from tests.virtual_time import virtual_time

TURNS = 3
SAID = "yes yes yes yes"


class CountsCalls(RecordedEnv):
    """Three turns; an observation depends on the number of all calls before."""

    answers = "turn"

    def answer(self, action):
        said = [{"role": "user", "content": f"{CountsCalls.answers} {self.turns}?"}]
        return {
            "observations": said,
            "reward": float(self.turns),
            "done": self.turns == TURNS,
            "metadata": {},
        }


class Slow:
    """Generates a token a second; its requests by id: prompt, and the first token's position in the answer."""

    def __init__(self):
        self.requests, self.rows = [], {}

    async def generate(self, requests):
        for one in requests:
            self.requests.append(one)
            done = sum(part.isdigit() for part in one.request_id.split("+")[1:]) and int(
                one.request_id.split("+")[-1]
            )
            row = self.rows[one.request_id] = []
            for token in [*tokens_of(SAID), tokenizer().eos_token_id][done:]:
                await asyncio.sleep(1)
                row.append(token)
            yield [self.output(one.request_id, self.rows.pop(one.request_id), "stop")]

    @staticmethod
    def output(name, tokens, finish=None):
        return GenerationOutput(name, tokens, [-0.25] * len(tokens), [4] * len(tokens), finish)

    async def progress(self):
        outputs = [self.output(name, row[:]) for name, row in self.rows.items() if row]
        for row in self.rows.values():
            row.clear()
        return outputs

    async def abort(self, ids): ...


@pytest.fixture
def prompts():
    CountsCalls.answers = "turn"
    name = registered(CountsCalls)
    return [prompt(0, name, name="0")]


async def run_for(seconds, prompts, **settings):
    """The trajectories in flight after ``seconds``."""
    engine = Slow()
    plays = generator(engine, max_turns=TURNS, **settings)
    task = asyncio.create_task(run_generator(plays, requests(prompts), 0))
    await asyncio.sleep(seconds)
    partial = await plays.partial_rollouts()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return partial


async def resume(partial, prompts, **sampling):
    engine = Slow()
    plays = generator(engine, max_turns=TURNS)
    plays.resume_from(partial)
    groups, _ = await run_generator(plays, requests(prompts, **sampling), 0)
    assert not await plays.partial_rollouts()
    return engine, groups[0].trajectories[0]


LENGTH = len(tokens_of(SAID)) + 1


@pytest.mark.parametrize("seconds", [0.5, 2.5, LENGTH + 0.5, LENGTH + 2.5, 3 * LENGTH - 0.5])
def test_what_was_written_is_not_asked_for_again(seconds, prompts):
    @virtual_time
    async def run():
        _, whole = await resume([], prompts)
        partial = await run_for(seconds, prompts)
        (copy,) = partial
        engine, again = await resume(partial, prompts)
        assert again.sequences == whole.sequences and again.metrics == whole.metrics
        turn, had = int(seconds) // LENGTH, int(seconds) % LENGTH
        assert sum(len(action.tokens) for action in copy.actions) == int(seconds)
        assert len(engine.requests) == TURNS - turn
        assert engine.requests[0].request_id.endswith(f"-t{turn}+{had}" if had else f"-t{turn}")
        assert (
            engine.requests[0].sampling.max_tokens == requests(prompts)[0].sampling.max_tokens - had
        )

    run()


@virtual_time
async def test_where_the_environment_says_something_else_the_record_is_dropped():
    CountsCalls.answers = "turn"
    prompts = [prompt(0, registered(CountsCalls), name="0")]
    partial = await run_for(2 * LENGTH + 2.5, prompts)
    CountsCalls.answers = "other"
    engine, again = await resume(partial, prompts)
    assert [r.request_id.split("-")[-1] for r in engine.requests] == ["t1", "t2"]
    assert "other 2?" in tokenizer().decode(again.tokens)


@virtual_time
async def test_with_a_seed_half_a_response_is_made_again_and_comes_out_the_same():
    CountsCalls.answers = "turn"
    prompts = [prompt(0, registered(CountsCalls), name="0")]
    partial = await run_for(LENGTH + 2.5, prompts)
    asking = [replace(each, sampling=replace(each.sampling, seed=5)) for each in requests(prompts)]
    engine = Slow()
    plays = generator(engine, max_turns=TURNS)
    plays.resume_from(partial)
    await run_generator(plays, asking, 0)
    assert [r.request_id.split("-")[-1] for r in engine.requests] == ["t1", "t2"]


@virtual_time
async def test_the_progress_of_a_request_that_went_on_has_all_its_pieces():
    CountsCalls.answers = "turn"
    prompts = [prompt(0, registered(CountsCalls), name="0")]
    partial = await run_for(3.5, prompts)
    engine = Slow()
    plays = generator(engine, max_turns=TURNS)
    plays.resume_from(partial)
    task = asyncio.create_task(run_generator(plays, requests(prompts), 0))
    await asyncio.sleep(2.5)
    (copy,) = await plays.partial_rollouts()
    assert copy.actions[0].tokens.tolist() == tokens_of(SAID)[:5]
    await task


def test_a_part_that_is_longer_than_is_allowed_now_is_the_answer():
    @virtual_time
    async def run():
        from skyasync.inference.interface import GenerationRequest, SamplingParams

        engine = Slow()
        client = InferenceClient([engine])
        had = Slow.output("", [1, 2, 3])
        answer = await client.go_on(GenerationRequest("r", [1], SamplingParams(max_tokens=3)), had)
        assert (answer.request_id, answer.finish_reason, engine.requests) == ("r", "length", [])

    run()
