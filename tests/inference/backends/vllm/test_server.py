"""A separate vLLM server as an engine: one untied tiny Llama on one server for the whole file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from skyasync.errors import UserError
from skyasync.inference.backends.vllm.server import VLLMServerEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.elastic import ElasticEngines, write_engine_list
from skyasync.inference.interface import (
    EngineConfig,
    EngineFailedError,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.origin_check import KEY_VARIABLE
from skyasync.inference.remote import check_servers
from skyasync.inference.supervisor import EngineSupervisor
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.weight_sync.delta import DeltaEncoder, Encoded
from skyasync.weight_sync.tensors import specs_of
from skyasync.weight_sync.transfers.file import remove_weights, write_encoded
from skyasync.weight_sync.update import WeightMismatchError, WeightSyncError, WeightUpdate
from tests.fork_server import interpreter
from tests.inference.backends.vllm.models import perturb, publish, token_logprobs
from tests.inference.output_lists import Listed, listed
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, RecordingClient, check_tokens
from tests.trainer.plans.local_run import config as run_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
KEY = "a key of twenty letters"
SERVE = "import sys; from skyasync.cli.serve import serve; serve(sys.argv[1:])"


@dataclass
class Running:
    """A server, and the model that it was started with."""

    url: str
    folder: str
    model: LlamaForCausalLM


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(
    fork_socket: Path, folder: Path, port: int, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    settings = [
        "--port",
        str(port),
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        "--stream-interval",
        "4",
    ]
    settings += ["--kv-cache-memory-bytes", "134217728", "--uvicorn-log-level", "error", *more]
    command = [interpreter(fork_socket, vllm=True), "-c", SERVE, str(folder), *settings]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(command, env=quiet, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def serving_with(
    patch: pytest.MonkeyPatch, fork_socket: Path, folder: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The server requires a key, which the tests have."""
    patch.setenv(KEY_VARIABLE, KEY)
    with serving(fork_socket, folder, port) as process:
        yield process


async def until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise RuntimeError("the server has ended")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    fork_socket: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("untied")
    model = LlamaForCausalLM.from_pretrained(save_tiny_llama(folder, tied=False, head_dim=32))
    port = free_port()
    with (
        pytest.MonkeyPatch.context() as patch,
        serving_with(patch, fork_socket, folder, port) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        await until_it_answers(url, process)
        yield Running(url, str(folder), model)


def config(server: Running, **changed: object) -> EngineConfig:
    extra = {"url": server.url, "start_s": 60, "key": KEY}
    return EngineConfig("", max_model_len=512, version=3, extra=extra, **changed)  # type: ignore[arg-type]


class Engine(VLLMServerEngine):
    model: LlamaForCausalLM

    async def answer(self, *requests: GenerationRequest) -> list[Listed]:
        answers = {
            output.request_id: listed(output)
            async for batch in self.generate(requests)
            for output in batch
        }
        return [answers[request.request_id] for request in requests]

    async def sync(self) -> int:
        version = self.version + 1
        perturb(self.model, seed=version)
        update = publish(self.model, version)
        await self.update_weights(update)
        remove_weights(update.info["path"])
        return version


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server: Running) -> AsyncIterator[Engine]:
    engine = Engine(config(server))
    engine.model = server.model
    await engine.start()
    yield engine
    await engine.shutdown()
    await engine.shutdown()  # safe to call twice


def request(name: str, prompt: list[int] | None = None, **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, prompt or [2, 3, 4, 5], SamplingParams(**sampling))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (another process brings it about)
            await asyncio.sleep(0.001)


def gap(output: Listed, model: LlamaForCausalLM, prompt: list[int]) -> float:
    expected = token_logprobs(model, prompt + output.token_ids)[len(prompt) - 1 :]
    return (torch.tensor(output.logprobs) - expected).abs().max().item()


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)


async def test_tokens_logprobs_and_versions_are_those_of_the_weights_that_were_handed_over(
    engine: Engine,
) -> None:
    version = await engine.sync()
    requests = [request(f"many-{i}", [2 + i % 9, 5], max_tokens=1 + i % 20) for i in range(40)]
    outputs = await engine.answer(*requests)
    assert all(len(o.token_ids) == len(o.logprobs) == len(o.versions) > 0 for o in outputs)
    assert {v for o in outputs for v in o.versions} == {version}
    worst = max(
        gap(o, engine.model, r.prompt_token_ids.tolist())
        for o, r in zip(outputs, requests, strict=True)
    )
    assert worst < TOLERANCE
    sequence = [2, 3, *outputs[19].token_ids]
    (scores,) = await engine.score([sequence])
    assert torch.tensor(scores).sub(token_logprobs(engine.model, sequence)).abs().max() < TOLERANCE


@pytest.mark.matrix
async def test_requests_in_flight_live_through_an_update_and_their_tokens_say_so(
    engine: Engine,
) -> None:
    before = engine.version
    answers = asyncio.create_task(
        engine.answer(*(GenerationRequest(f"l{i}", [2, 3 + i], LONG) for i in range(24)))
    )
    await until(lambda: sum(bool(b.tokens) for b in engine._requests.values()) >= 16)
    told = {news.request_id: listed(news) for news in await engine.progress()}
    said = await engine.stats()
    assert said.cache_used is not None and 0 < said.cache_used < said.cache_tokens
    await engine.pause("keep")
    after = await engine.sync()
    await engine.resume()
    outputs = await answers
    begun, late = outputs[:16], outputs[16:]
    assert all(
        o.versions == sorted(o.versions) and set(o.versions) == {before, after} for o in begun
    )
    assert all(set(o.versions) == {after} and gap(o, engine.model, [2, 3 + i]) < TOLERANCE
               for i, o in enumerate(late, 16)), "without a token, requests begin with the new weights"  # fmt: skip
    assert all(o.finish_reason == "length" and len(o.token_ids) == 300 for o in outputs)
    for output in begun:
        news = told[output.request_id]
        assert news.token_ids and output.token_ids[: len(news.token_ids)] == news.token_ids
        assert set(news.versions) == {before}


@pytest.mark.matrix
async def test_what_is_cut_or_aborted_comes_back_with_its_tokens(
    server: Running, engine: Engine
) -> None:
    answers = asyncio.create_task(
        engine.answer(*(GenerationRequest(f"a{i}", [2, 3 + i], LONG) for i in range(18)))
    )
    await until(lambda: sum(bool(b.tokens) for b in engine._requests.values()) >= 16)
    await engine.abort(["a0", "a17"])  # one running, and one waiting
    await engine.pause("abort")
    cut = await answers
    assert {o.finish_reason for o in cut} == {"abort"}
    assert (
        all(len(o.token_ids) == len(o.versions) for o in cut)
        and cut[1].token_ids
        and not cut[17].token_ids
    )
    await engine.resume()
    client = InferenceClient([engine])
    whole = asyncio.create_task(client.generate(GenerationRequest("cut", [2, 3], LONG)))
    await until(lambda: any(b.tokens for b in engine._requests.values()))
    await client.cut()
    after = await engine.sync()
    await client.resume()
    output = listed(await whole)
    assert len(output.token_ids) == 300 and output.versions[-1] == after > output.versions[0]


async def test_a_server_that_another_uses_meanwhile_is_no_engine_any_more(
    server: Running, engine: Engine
) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as another:
        await another.post(f"{server.url}/update_weight_version", json={"new_version": "default"})
    with pytest.raises(EngineFailedError, match="it was restarted"):
        await engine.answer(request("foreign", max_tokens=3))


@pytest.mark.asyncio(loop_scope="function")
async def test_a_server_is_refused_in_one_line_that_says_why(server: Running) -> None:
    def refusal(url: str, **changed: object) -> str:
        with pytest.raises(UserError) as found:
            check_servers([url], config(server, **changed))
        assert "\n" not in str(found.value)
        return str(found.value)

    check_servers([server.url], config(server))
    assert "does not answer" in refusal(f"http://127.0.0.1:{free_port()}")
    assert "is not the address of a server" in refusal("127.0.0.1:8000")
    assert "--dtype bfloat16" in refusal(server.url, dtype="bfloat16")


async def test_requests_without_the_key_change_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession() as http:
        for headers, status in [({}, 401), ({"Authorization": "Bearer x"}, 401), (right, 200),
                                (right | {"Origin": "https://evil.example"}, 403),
                                (right | {"Host": "evil.example"}, 403)]:  # fmt: skip
            for route in ("/pause", "/update_weight_version", "/resume"):
                async with http.post(
                    server.url + route, json={"new_version": "3"}, headers=headers
                ) as answer:
                    assert answer.status == status, (route, headers)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(UserError, match=f"needs a key: set {KEY_VARIABLE}"):
        check_servers([server.url], config(server))


class Remembering(Memory, FullyAsyncRayPPOTrainer): ...


class Way:
    """A proxy to a server; while it is closed, no bytes pass."""

    def __init__(self, url: str) -> None:
        self._to = int(url.rpartition(":")[2])
        self._open: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server
        self.port = free_port()

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def close(self) -> None:
        self._listener.close()
        for writer in self._open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        self._open -= {writer, back}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


class Seeing(VLLMServerEngine):
    folders: ClassVar[set[Path]] = set()  # the folder of weights that it loaded

    async def _load(self, update: WeightUpdate) -> None:
        self.folders.add(Path(update.info["path"]).parent)
        await super()._load(update)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder outside of shared memory, as if the server were on another machine."""
    folder = Path(tempfile.mkdtemp(prefix="skyasync-weights-", dir="/var/tmp"))
    assert folder.stat().st_dev != Path("/dev/shm").stat().st_dev
    yield folder
    shutil.rmtree(folder)


@pytest.mark.fault
async def test_a_run_goes_on_when_its_server_leaves_and_comes_back(
    server: Running, on_disk: Path
) -> None:
    """Weights go through a folder that both can read."""
    way = Way(server.url)
    await way.open()
    extra = config(server).extra | {"url": f"http://127.0.0.1:{way.port}"}
    engine = Seeing(replace(config(server), extra=extra))
    await engine.start()
    cfg = run_config(server.folder, steps=8, max_staleness=2, train_length=48)
    cfg.generator.engines, cfg.generator.weight_sync_dir = [extra["url"]], str(on_disk)
    run = LocalRun(Remembering, cfg, client=RecordingClient, engine=engine)
    sync: Any = run.trainer.weight_updates.weight_sync
    sync.expects_late_engines = True
    supervisor = EngineSupervisor(
        run.client, sync, max_restarts=3, heartbeat_s=0.2, heartbeat_timeout_s=30, limit_s=30
    )
    run.trainer.extensions.append(supervisor)

    async def leave_and_come_back() -> None:
        await until(lambda: len(run.tracker.rows) >= 3 and len(engine._requests) > 4)
        await way.close()
        await until(lambda: supervisor.failures == 1)
        await way.open()

    await asyncio.gather(run.train(), leave_and_come_back())
    await supervisor.close()
    await run.client.shutdown()
    await way.close()
    assert (supervisor.failures, supervisor.restarts) == (1, 1)
    assert check_tokens(run) > 0, (
        "no trajectory was in flight during a weight update, so the test checks nothing"
    )
    gaps = [
        row["sync/logprob_gap_mean"]
        for row in run.tracker.rows.values()
        if "sync/logprob_gap_mean" in row
    ]
    assert gaps and max(gaps) < 1e-3
    assert Seeing.folders == {on_disk}


@pytest.mark.matrix
async def test_a_server_joins_and_leaves_while_requests_are_under_way(
    server: Running, engine: Engine, tmp_path: Path
) -> None:
    """It joins under another name of the same server, which has capacity for both."""
    version = await engine.sync()
    client, file = InferenceClient([engine]), tmp_path / "engines.txt"

    class FakeSync:
        @asynccontextmanager
        async def between_syncs(self) -> AsyncIterator[WeightUpdate]:
            update = publish(engine.model, version)
            yield update
            remove_weights(update.info["path"])

        def quiet(self) -> AbstractAsyncContextManager[None]:
            return nullcontext()

    async def make(name: str) -> VLLMServerEngine:
        return VLLMServerEngine(replace(config(server), extra=config(server).extra | {"url": name}))

    supervisor = EngineSupervisor(
        client, FakeSync(), max_restarts=1, heartbeat_s=0.1, heartbeat_timeout_s=30, limit_s=30
    )
    another = server.url.replace("127.0.0.1", "localhost")
    members = ElasticEngines(
        client, FakeSync(), supervisor, make, [server.url], file, interval_s=0.05, limit_s=30
    )
    supervisor.begin()
    members.on_start(None)  # type: ignore[arg-type]
    await until(file.exists)
    write_engine_list(file, [server.url, another])
    await until(lambda: members.joined == 1)
    joined: Any = client.engines[1]
    asked = [
        asyncio.create_task(client.generate(request(f"both-{i}", max_tokens=300, ignore_eos=True)))
        for i in range(8)
    ]
    await until(lambda: sum(len(begun.tokens) > 2 for begun in joined._requests.values()) >= 3)
    write_engine_list(file, [server.url])
    await until(lambda: members.left == 1)
    answers = [listed(answer) for answer in await asyncio.gather(*asked)]
    await members.close()
    await supervisor.close()
    assert all(
        len(answer.token_ids) == 300 and set(answer.versions) == {version} for answer in answers
    )
    gaps = [gap(answer, engine.model, request("x").prompt_token_ids.tolist()) for answer in answers]
    # Some of 2,400 sampled tokens have low probabilities, which this engine computes less exactly.
    assert max(gaps) < 10 * TOLERANCE, "also for responses that two engines generated in turn"
    assert client.pool.router.in_flight.tolist() == [0, 0] and supervisor.failures == 0


async def test_what_has_changed_alone_leaves_a_server_with_the_weights_of_the_trainer(
    engine: Engine,
) -> None:
    """One element in fifty changes; an engine with other weights reports an error and keeps its weights."""
    changed, sequence, draw = (
        DeltaEncoder(),
        [2, 3, *range(5, 60)],
        torch.Generator().manual_seed(0),
    )

    def handed(sent: Encoded, path: str) -> WeightUpdate:
        return WeightUpdate(
            engine.version + 1, "shared_memory", {"path": path}, sent.content, sent.header.base
        )

    async def far() -> float:
        (scores,) = await engine.score([sequence])
        return torch.tensor(scores).sub(token_logprobs(engine.model, sequence)).abs().max().item()

    bases = []
    for number in range(4):
        for weight in engine.model.parameters():
            weight.data += torch.rand(weight.shape, generator=draw).lt(0.02) * 0.3
        assert await far() > TOLERANCE
        weights = {name: weight.detach() for name, weight in engine.model.named_parameters()}
        sent = changed.encode(specs_of(weights), weights.items())
        bases.append(bool(sent.header.base))
        path = write_encoded(sent)
        if number == 3:
            engine._content.content = "other"
            with pytest.raises(WeightMismatchError):
                await engine.update_weights(handed(sent, path))
            remove_weights(path)
            sent = changed.whole(fell_back=True)
            path = write_encoded(sent)
        await engine.update_weights(handed(sent, path))
        remove_weights(path)
        assert await far() < TOLERANCE
    assert bases == [False, True, True, True]


async def test_a_server_that_does_not_take_the_weights_says_so(engine: Engine) -> None:
    """The last test of the file: such a server cannot be used any more."""
    update = publish(engine.model, engine.version + 1)
    flip_a_bit(Path(update.info["path"]))
    with pytest.raises(WeightSyncError, match="has rejected the weights of version"):
        await engine.update_weights(update)
    remove_weights(update.info["path"])
