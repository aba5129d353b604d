"""Sampling through the SDK's client: which weights answer, with which log-probabilities, and failures of engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import tinker
from tinker import types

from skyasync.interop.tinker import training, worker
from tests.inference.tiny_llama import EOS, save_tiny_llama
from tests.interop.tinker.local_server import KEY, tinker_server, with_sdk
from tests.interop.tinker.test_training import ADAM, FIRST, losses_of

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


def sampled(sampler: Any, count: int = 1, **params: Any) -> Any:
    return sampler.sample(
        types.ModelInput.from_ints(PROMPT),
        count,
        types.SamplingParams(**{"max_tokens": 6, **params}),
    )


def trainers_logprobs(client: Any, tokens: list[int]) -> list[float]:
    inputs = {"target_tokens": tokens[1:]}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    return list(
        client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    )


async def test_a_sampler_stays_with_its_weights_while_others_are_sampled(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            base = service.create_sampling_client(base_model=model).result()
            samplers, expected = [base], [trainers_logprobs(client, [*PROMPT, 9, 9, 9])]
            for kind in ("snapshot", "inflight"):
                losses_of(client, [FIRST], 2)
                samplers.append(client.save_weights_and_get_sampling_client(kind=kind).result())
                expected.append(trainers_logprobs(client, [*PROMPT, 9, 9, 9]))
            named = client.save_weights_for_sampler("named").result().path
            samplers.append(client.create_sampling_client(named).result())
            expected.append(expected[-1])
            losses_of(
                client, [FIRST], 2
            )  # the model is trained further, and the samplers keep their weights
            futures = [
                s.compute_logprobs(types.ModelInput.from_ints([*PROMPT, 9, 9, 9]))
                for s in samplers * 3
            ]
            for own, future in zip(expected * 3, futures, strict=True):
                first, *others = future.result()
                assert first is None and others == pytest.approx(own, abs=1e-5)
            assert len({value[0] for value in expected}) == 3
            answer = sampled(samplers[1], 4, seed=0).result()
            assert len({each.sequence_id for each in answer.sequences}) == 4
            again = (
                sampled(service.create_sampling_client(model_path=named).result(), seed=1)
                .result()
                .sequences[0]
            )
            whole = trainers_logprobs_of(samplers[-1], PROMPT + list(again.tokens))
            assert list(again.logprobs) == pytest.approx(whole, abs=1e-5)

        await with_sdk(up.server, program)


async def test_a_sampler_that_is_used_at_once_is_not_read_from_its_file_and_is_the_same_later(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        worker = up.dispatches[0]._policy
        worker.load_adapters = mock.Mock(side_effect=worker.load_adapters)

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            losses_of(client, [FIRST], 2)
            sampler = client.save_weights_and_get_sampling_client().result()
            expected = trainers_logprobs(client, PROMPT)
            at_once = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
            assert (
                at_once[1:] == pytest.approx(expected, abs=1e-5) and not worker.load_adapters.called
            )
            losses_of(client, [FIRST], 1)
            sampled(service.create_sampling_client(base_model=model).result()).result()
            assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result() == at_once
            assert worker.load_adapters.call_count == 1

        await with_sdk(up.server, program)


def trainers_logprobs_of(sampler: Any, tokens: list[int]) -> list[float]:
    return sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[len(PROMPT) :]


async def test_stops_lengths_and_the_last_prompt_tokens(model: str, tmp_path: Path) -> None:
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            sampler = service.create_sampling_client(base_model=model).result()
            first = sampled(sampler, temperature=0.0).result().sequences[0]
            assert first.stop_reason == "length" and len(first.tokens) == 6
            stopped = (
                sampled(sampler, temperature=0.0, stop=[int(first.tokens[2])]).result().sequences[0]
            )
            assert stopped.stop_reason == "stop"
            end = list(first.tokens).index(first.tokens[2]) + 1
            assert list(stopped.tokens) == list(first.tokens[:end])
            never = sampled(sampler, 8, max_tokens=None, stop=[], seed=3).result().sequences
            assert {len(each.tokens) for each in never} == {64 - len(PROMPT)}, (
                "to the end of the context"
            )
            ended = sampled(sampler, 64, max_tokens=60, temperature=4.0, seed=0).result().sequences
            assert any(each.stop_reason == "stop" and each.tokens[-1] == EOS for each in ended)
            last = sampler.compute_logprobs(
                types.ModelInput.from_ints(PROMPT), prompt_logprobs_last_n=1
            ).result()
            assert last[:2] == [None, None] and np.isfinite(last[2])

        await with_sdk(up.server, program)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (
            PROMPT,
            {"topk_prompt_logprobs": 2},
            "topk_prompt_logprobs is not supported: the engines return",
        ),
        (
            PROMPT,
            {"topk_sample_logprobs": 2},
            "topk_sample_logprobs is not supported: the engines return",
        ),
        (PROMPT, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ([5, 999], {}, "there is no token 999: the model has 260"),
        ([5] * 64, {}, "the prompt has 64 tokens"),
        (PROMPT, {"num_samples": 0}, "num_samples is 0"),
        (
            PROMPT,
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3},
            "prompt_logprobs_last_n is 3, not from 1 to 2",
        ),
        (
            PROMPT,
            {"sampling_params": types.SamplingParams(temperature=1e-40)},
            "temperature is 1e-40",
        ),
        (
            PROMPT,
            {"sampling_params": types.SamplingParams(stop=["a"] * 65)},
            "stop has more than 64 entries",
        ),
    ],
)
async def test_what_cannot_be_sampled_says_why(
    served: Any, prompt: list[int], options: dict[str, Any], says: str
) -> None:
    def program(service: Any) -> None:
        sampler = service.create_sampling_client(base_model=served.model).result()
        params = types.SamplingParams(max_tokens=2)
        asked = {"num_samples": 1, "sampling_params": params, **options}
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=says):
            sampler.sample(types.ModelInput.from_ints(prompt), **asked).result()

    await with_sdk(served.server, program)


@pytest.fixture
async def served(model: str, tmp_path: Path) -> Any:
    async with tinker_server(model, tmp_path) as up:
        up.model = model
        yield up


async def test_the_oldest_snapshot_without_a_name_is_removed_and_its_sampler_says_so(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SNAPSHOTS", 2)
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(3)]
            with pytest.raises(tinker.RequestFailedError, match=r"has expired or was deleted"):
                sampled(samplers[0]).result()
            assert (
                sampled(samplers[1]).result().sequences and sampled(samplers[2]).result().sequences
            )

        await with_sdk(up.server, program)
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def lose_ranks(up: Any) -> None:
    group = up.dispatches[-1]._groups["policy"]
    group.lost = RuntimeError("the rank is lost")

    async def lost(*args: object) -> Any:
        raise group.lost

    group.call_first = group.on_rows = group.call = lost


async def test_ranks_that_are_lost_while_engines_answer_publish_their_weights_again(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        loop = asyncio.get_running_loop()

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            losses_of(client, [FIRST], 1)
            sampler = client.save_weights_and_get_sampling_client().result()
            expected = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
            answers = sampled(sampler, 16, max_tokens=50)
            loop.call_soon_threadsafe(lose_ranks, up)
            client.optim_step(types.AdamParams(**ADAM)).result()
            assert len(answers.result().sequences) == 16
            assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result() == expected

        await with_sdk(up.server, program)
        assert len(up.dispatches) == 2


async def test_ranks_that_are_lost_while_no_request_needs_them_are_replaced(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starting engine would wait for the ranks, and its requests for the engine."""
    monkeypatch.setattr(worker, "WATCH_S", 0.01)
    async with tinker_server(model, tmp_path) as up:
        replaced, load_again = asyncio.Event(), up.snapshots.load_again

        async def loaded(dispatch: Any) -> None:
            await load_again(dispatch)
            replaced.set()

        up.snapshots.load_again = loaded
        lose_ranks(up)
        async with asyncio.timeout(60):
            await replaced.wait()
        assert len(up.dispatches) == 2


async def test_a_name_that_is_used_again_is_another_snapshot(model: str, tmp_path: Path) -> None:
    """``overwrite``, and a checkpoint that is deleted and saved again: the engines still hold the first."""
    async with tinker_server(model, tmp_path) as up:
        tokens = types.ModelInput.from_ints(PROMPT)

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            rest = tinker.RestClient(base_url=up.server.base_url, api_key=KEY)

            def saved(kind: str) -> str:
                if kind == "weights":
                    return client.save_state("latest", overwrite=True).result().path
                return client.save_weights_for_sampler("best").result().path

            for kind in ("weights", "sampler_weights"):
                samplers = []
                for turn in range(2):
                    losses_of(client, [FIRST], 2)
                    path = saved(kind)
                    samplers.append(service.create_sampling_client(model_path=path).result())
                    expected = trainers_logprobs(client, PROMPT)
                    assert samplers[-1].compute_logprobs(tokens).result()[1:] == pytest.approx(
                        expected, abs=1e-5
                    )
                    if kind == "sampler_weights" and not turn:
                        rest.delete_checkpoint_from_tinker_path(path).result()
                with pytest.raises(tinker.RequestFailedError, match="or another one has its name"):
                    samplers[0].compute_logprobs(tokens).result()

        await with_sdk(up.server, program)


async def test_ranks_are_replaced_after_the_engines_checkpoint_was_deleted(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        loop = asyncio.get_running_loop()

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            rest = tinker.RestClient(base_url=up.server.base_url, api_key=KEY)
            path = client.save_weights_for_sampler("best").result().path
            sampled(service.create_sampling_client(model_path=path).result()).result()
            rest.delete_checkpoint_from_tinker_path(path).result()
            loop.call_soon_threadsafe(lose_ranks, up)
            losses_of(client, [FIRST], 1)
            assert (
                sampled(service.create_sampling_client(base_model=model).result())
                .result()
                .sequences
            )

        await with_sdk(up.server, program)
        assert len(up.dispatches) == 2 and not up.turns.ended.done()
