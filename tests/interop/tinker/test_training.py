"""Training through the SDK's client: steps, order, several tenants, and the state after lost servers and ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import pytest
import torch

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import tinker
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient

from skyasync.interop.tinker import training
from skyasync.interop.tinker.server import CLIENT_CONFIG
from skyasync.interop.tinker.store import Store
from tests.inference.tiny_llama import save_tiny_llama
from tests.interop.tinker.local_server import tinker_server, with_sdk
from tests.interop.tinker.test_losses import encoded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


def datum(*tokens: int, **inputs: list[float]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **inputs},
    )


FIRST, SECOND = datum(5, 6, 7, 8, 9), datum(30, 20, 10)
ADAM = {"learning_rate": 1e-2}


def losses_of(client: Any, rows: list[Any], steps: int) -> list[float]:
    """Of each step; the log-probabilities of all tokens would differ if anything else did."""
    values = []
    for _ in range(steps):
        future = client.forward_backward(rows, "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        values += [each for out in future.result().loss_fn_outputs for each in out["logprobs"].data]
    return values


def trained(model: str, seed: int, rows: list[Any], steps: int) -> Callable[[Any], list[float]]:
    """A program of one tenant."""
    return lambda service: losses_of(
        service.create_lora_training_client(model, 4, seed).result(), rows, steps
    )


def resumed(service: Any, name: str, requests: int) -> TrainingClient:
    """A client of a model that has had so many requests, as the one whose server ended."""
    client = TrainingClient(service.holder, 0, name, info=None)
    client._request_id_counter = client._turn_counter = requests
    return client


async def test_gradients_add_up_until_the_step_and_its_settings_are_those_of_torch(
    model: str, tmp_path: Path
) -> None:
    settings = {"learning_rate": 3e-2, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "weight_decay": 0.1}
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=3).result()
            for _ in range(2):
                client.forward_backward([FIRST], "cross_entropy").result()
                client.forward([SECOND], "cross_entropy").result()
                client.forward_backward([SECOND], "cross_entropy", None).result()
                client.optim_step(types.AdamParams(**settings, grad_clip_norm=0.5)).result()

        worker = up.dispatches[0]._policy
        worker.activate("alone", 4, 3)
        parameters = [p for p in worker.backend.model.parameters() if p.requires_grad]
        initial = [p.detach().clone() for p in parameters]
        worker.activate("")
        await with_sdk(up.server, program)
        after = [p.detach().clone() for p in parameters]
        worker.activate("alone")
        assert all(torch.equal(p, before) for p, before in zip(parameters, initial, strict=True)), (
            "another model's files stay"
        )
        options = {
            "lr": settings["learning_rate"],
            "betas": (0.8, 0.7),
            "eps": 1e-6,
            "weight_decay": 0.1,
        }
        optimizer = torch.optim.AdamW(parameters, **options)
        for _ in range(2):
            for tokens in ((5, 6, 7, 8, 9), (30, 20, 10)):
                logits = worker.backend.model.model(torch.tensor([tokens[:-1]])).logits
                torch.nn.functional.cross_entropy(
                    logits[0], torch.tensor(tokens[1:]), reduction="sum"
                ).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(after, parameters, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-4)
        assert not torch.equal(after[1], initial[1])


async def test_requests_come_in_any_order_and_twice_and_are_carried_out_once_in_order(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        alone = await with_sdk(up.server, trained(model, 1, [FIRST, SECOND], 3))

        one_by_one = {
            "fwdbwd_max_chunk_len": 1
        }  # two requests for one batch, of which the first is sent last
        with mock.patch.dict(CLIENT_CONFIG, one_by_one):
            chunked = await with_sdk(up.server, trained(model, 1, [FIRST, SECOND], 3))
        assert chunked == pytest.approx(alone, abs=1e-4)
        [stored] = [r for r in up.server._store.models() if r["id"].endswith(":0")][:1]
        training = up.server._training
        requests = [up.server._store.request(f"{stored['id']}:{seq}") for seq in (1, 2, 3)]
        again = [training.submit(stored["id"], r.seq, r.kind, b"never read") for r in requests]
        assert again == [r.id for r in requests]
        assert [(await training.result(name, 1.0)).result for name in again] == [
            r.result for r in requests
        ]


async def test_eight_tenants_at_once_train_bitwise_as_each_alone(
    model: str, tmp_path: Path
) -> None:
    rows = {seed: [datum(seed, 6, 7 + seed, 8, 9), SECOND] for seed in range(1, 9)}
    async with tinker_server(model, tmp_path / "alone") as up:
        alone = {
            seed: await with_sdk(up.server, trained(model, seed, rows[seed], 3)) for seed in rows
        }

    async with tinker_server(model, tmp_path / "together") as up:

        def program(service: Any) -> dict[int, list[float]]:
            clients = {
                s: service.create_lora_training_client(model, rank=4, seed=s).result() for s in rows
            }
            futures: dict[int, list[Any]] = {seed: [] for seed in rows}
            for _ in range(3):  # without waiting: gradients and steps of all alternate
                for seed, client in clients.items():
                    futures[seed].append(client.forward_backward(rows[seed], "cross_entropy"))
                for client in clients.values():
                    client.optim_step(types.AdamParams(**ADAM))
            return {
                seed: [
                    v
                    for f in own
                    for out in f.result().loss_fn_outputs
                    for v in out["logprobs"].data
                ]
                for seed, own in futures.items()
            }

        assert await with_sdk(up.server, program) == alone
    assert len({tuple(values) for values in alone.values()}) == len(rows)


async def test_lost_ranks_and_a_new_server_change_nothing(model: str, tmp_path: Path) -> None:
    """A rank fails with a gradient that waits for its step; then the server ends, and another one resumes."""
    async with tinker_server(model, tmp_path / "whole") as up:
        whole = await with_sdk(up.server, trained(model, 1, [FIRST], 5))
    loop, progress = asyncio.get_running_loop(), list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training, "STEPS_PER_STATE", 2
        )  # one state is saved, and steps after it are repeated
        async with tinker_server(model, tmp_path / "cut") as up:

            def lose_a_rank() -> None:
                group = up.dispatches[-1]._groups["policy"]
                call = group.call_first

                async def lost(method: str, *args: object) -> Any:
                    group.call_first, group.lost = call, RuntimeError("the rank is lost")
                    raise group.lost

                group.call_first = group.on_rows = lost

            def begin(service: Any) -> tuple[Any, Any]:
                client = service.create_lora_training_client(model, rank=4, seed=1).result()
                progress.extend(losses_of(client, [FIRST], 3))
                future = client.forward_backward([FIRST], "cross_entropy")
                progress.extend(future.result().loss_fn_outputs[0]["logprobs"].data)
                loop.call_soon_threadsafe(lose_a_rank)
                return client.model_id, client.optim_step(types.AdamParams(**ADAM)).result()

            name, _ = await with_sdk(up.server, begin)
            assert len(up.dispatches) == 2
        async with tinker_server(model, tmp_path / "cut") as up:
            before = up.server._store.request(f"{name}:1")
            assert (await up.server._training.result(before.id, 0.1)).result == before.result, (
                "a future survives it"
            )

            def go_on(service: Any) -> list[float]:
                assert service.create_rest_client().get_training_run(name).result().lora_rank == 4
                return losses_of(resumed(service, name, 8), [FIRST], 1)

            progress += await with_sdk(up.server, go_on)
    assert progress == whole


async def test_a_wrong_request_is_its_own_error_and_the_next_one_goes_on(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            wrong = [datum(1, 2, 3, weights=[1.0])]
            with pytest.raises(tinker.RequestFailedError, match="datum 0: weights has the shape"):
                client.forward_backward(wrong, "cross_entropy").result()

        await with_sdk(up.server, program)
        [row] = up.server._store.models()
        wrong_settings = (
            {"beta2": 1.0},
            {"eps": 0.0},
            {"learning_rate": 1e300},
            {"grad_clip_norm": 1e300},
        )
        queue = up.server._training
        for seq, settings in enumerate(wrong_settings, 2):
            request = types.OptimStepRequest(
                optim_params=types.AdamParams(**settings), model_id=row["id"], seq_id=seq
            )
            name = queue.submit(row["id"], seq, "optim_step", request.model_dump_json().encode())
            answer = json.loads((await queue.result(name, 20.0)).result)
            assert answer["category"] == "user" and next(iter(settings)) in answer["error"]
        name = queue.submit(
            row["id"],
            len(wrong_settings) + 2,
            "forward_backward",
            encoded([FIRST], "cross_entropy"),
        )
        assert (await queue.result(name, 20.0)).ok


async def test_a_checkpoint_is_loaded_with_its_optimizer_state_or_without(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            losses_of(client, [FIRST], 2)
            path = client.save_state("two").result().path
            goes_on = losses_of(client, [FIRST], 3)
            whole = service.create_training_client_from_state_with_optimizer(path).result()
            assert losses_of(whole, [FIRST], 3) == goes_on
            fresh = service.create_training_client_from_state(path).result()
            again = losses_of(fresh, [FIRST], 3)
            assert again[:4] == goes_on[:4] and again[4:] != goes_on[4:], (
                "the same weights, another first step"
            )
            client.load_state_with_optimizer(path).result()
            assert losses_of(client, [FIRST], 3) == goes_on

        await with_sdk(up.server, program)


async def test_a_custom_loss_has_the_gradient_of_the_same_loss_on_the_server(
    model: str, tmp_path: Path
) -> None:
    rows = [datum(5, 6, 7, weights=[0.25, 2.0])]

    def custom(
        data: list[Any], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -(logprobs[0] * torch.tensor([0.25, 2.0])).sum(), {"mine": 1.0}

    async with tinker_server(model, tmp_path) as up:

        def program(service: Any, own: bool) -> tuple[float, dict[str, float]]:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            future = client.forward_backward_custom(rows, custom) if own else client.forward_backward(
                rows, "cross_entropy")  # fmt: skip
            step = client.optim_step(types.AdamParams(**ADAM)).result()
            return step.metrics["grad_norm:mean"], future.result().metrics

        here, mine = await with_sdk(up.server, lambda service: program(service, True))
        there, theirs = await with_sdk(up.server, lambda service: program(service, False))
    assert here == pytest.approx(there, rel=1e-5)
    assert mine["mine"] == 1.0 and mine["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-5)


async def test_what_the_server_cannot_carry_out_is_left_to_the_next_one(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        await with_sdk(up.server, trained(model, 1, [FIRST], 1))
        [row] = up.server._store.models()
        up.turns._replace = AsyncMock(side_effect=RuntimeError("no more restarts"))
        group = up.dispatches[0]._groups["policy"]
        group.lost = RuntimeError("lost")
        group.call = group.on_rows = AsyncMock(side_effect=group.lost)
        name = up.server._training.submit(
            row["id"], 3, "forward_backward", encoded([FIRST], "cross_entropy")
        )
        with pytest.raises(RuntimeError, match="no more restarts"):
            await asyncio.wait_for(asyncio.shield(up.turns.ended), 60)
        assert up.server._store.request(name).result is None
    async with tinker_server(model, tmp_path) as up:
        assert (await up.server._training.result(name, 60.0)).ok


async def test_a_gradient_that_was_dropped_stays_dropped_in_a_new_server(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        whole = await with_sdk(up.server, trained(model, 1, [FIRST], 3))

        def program(service: Any) -> tuple[str, list[float]]:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            before = losses_of(client, [FIRST], 1)
            bad = datum(
                5, 6, 7, logprobs=[-2000.0, -2000.0], advantages=[-1.0, -1.0]
            )  # a ratio beyond float32
            client.forward_backward([bad], "importance_sampling")
            with pytest.raises(
                tinker.RequestFailedError, match="there was no step, and the gradient is dropped"
            ):
                client.optim_step(types.AdamParams(**ADAM)).result()
            return client.model_id, before + losses_of(client, [FIRST], 1)

        name, progress = await with_sdk(up.server, program)
    async with tinker_server(model, tmp_path) as up:
        progress += await with_sdk(
            up.server, lambda service: losses_of(resumed(service, name, 6), [FIRST], 1)
        )
    assert progress == whole


@pytest.mark.parametrize("method", ["accumulate", "save"])
async def test_a_request_that_fails_within_the_ranks_changes_nothing(
    model: str, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out after a part of the gradient; a disk that takes no state after the step."""
    monkeypatch.setattr(training, "STEPS_PER_STATE", 2)
    async with tinker_server(model, tmp_path) as up:
        whole = await with_sdk(up.server, trained(model, 1, [FIRST], 3))
        worker = up.dispatches[0]._policy
        works = getattr(worker, method)

        def fails(*args: Any) -> Any:
            setattr(worker, method, works)
            works(*args)
            raise RuntimeError("there is no more room")

        def program(service: Any) -> list[float]:
            client = service.create_lora_training_client(model, rank=4, seed=1).result()
            progress = losses_of(client, [FIRST], 1)
            if method == "accumulate":
                worker.accumulate = fails
                with pytest.raises(tinker.RequestFailedError, match="no more room"):
                    client.forward_backward([FIRST], "cross_entropy").result()
                return progress + losses_of(client, [FIRST], 2)
            future, worker.save = client.forward_backward([FIRST], "cross_entropy"), fails
            progress += list(future.result().loss_fn_outputs[0]["logprobs"].data)
            with pytest.raises(tinker.RequestFailedError, match="no more room"):
                client.optim_step(types.AdamParams(**ADAM)).result()
            same = (
                client.forward([FIRST], "cross_entropy")
                .result()
                .loss_fn_outputs[0]["logprobs"]
                .data
            )
            assert list(same) == progress[len(same) :], "there was no step"
            client.optim_step(types.AdamParams(**ADAM)).result()
            return progress + losses_of(client, [FIRST], 1)

        assert await with_sdk(up.server, program) == whole


async def test_passes_since_the_last_step_are_counted_for_each_model(
    model: str, tmp_path: Path
) -> None:
    """The stages of a pipeline decide by the count whether there is a gradient."""
    async with tinker_server(model, tmp_path) as up:

        def program(service: Any) -> None:
            one, other = (
                service.create_lora_training_client(model, rank=4, seed=s).result() for s in (1, 2)
            )
            one.forward_backward([FIRST], "cross_entropy").result()
            other.forward_backward([FIRST], "cross_entropy").result()
            other.optim_step(types.AdamParams(**ADAM)).result()
            one.forward([FIRST], "cross_entropy").result()

        await with_sdk(up.server, program)
        assert up.dispatches[0]._policy.backend.passes == 1


async def test_a_request_that_has_lost_servers_is_given_up_and_the_next_goes_on(
    model: str, tmp_path: Path
) -> None:
    """A copy of a server's folder while it works is what a killed server leaves."""

    def begin(service: Any) -> str:
        client = service.create_lora_training_client(model, 4, 1).result()
        client.forward_backward([FIRST], "cross_entropy").result()
        return str(client.model_id)

    def outcomes(service: Any, name: str) -> tuple[str, list[float]]:
        client = resumed(service, name, 1)
        lost = client.forward_backward([SECOND], "cross_entropy")
        following = client.forward_backward([FIRST], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError) as raised:
            lost.result()
        return str(raised.value), following.result().loss_fn_outputs[0]["logprobs"].data

    folders = [tmp_path / str(number) for number in range(training.MOST_ATTEMPTS + 1)]
    name = ""
    for number, (folder, copy) in enumerate(itertools.pairwise(folders)):
        async with tinker_server(model, folder) as up:
            if not name:
                name = await with_sdk(up.server, begin)
            working = asyncio.Event()

            async def works_for_ever(batch: Any, working: asyncio.Event = working) -> None:
                working.set()
                await asyncio.Event().wait()

            with mock.patch.object(up.dispatches[0], "forward_backward", works_for_ever):
                up.server._training.submit(
                    name, 2, "forward_backward", encoded([SECOND], "cross_entropy")
                )
                await asyncio.wait_for(working.wait(), 60)
                await asyncio.to_thread(shutil.copytree, folder, copy)
        store = Store(folder)
        assert store.request(f"{name}:2").attempts == number, (
            "a server that ends as it should is not counted"
        )
        store.close()
    async with tinker_server(model, folders[-1]) as up:
        problem, logprobs = await with_sdk(up.server, lambda service: outcomes(service, name))
    assert "given up: 3 servers were lost while they worked on it" in problem
    assert len(logprobs) == 4
