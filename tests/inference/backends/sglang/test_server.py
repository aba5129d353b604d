"""An SGLang server as an engine: a fake server that answers in the documented schemas, or a real one.

To test a real server, start it (docs/servers.md), and set ``SGLANG_URL`` and ``SGLANG_MODEL`` (its model's folder).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestServer
from transformers import LlamaForCausalLM

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.errors import UserError
from skyasync.inference.backends.sglang.server import SGLangServerEngine, sampling_of
from skyasync.inference.backends.vllm.server import VLLMServerEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.remote import check_servers
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from tests.inference.backends.sglang.fake_server import KEY, FakeServer
from tests.inference.backends.vllm.models import perturb, publish, save_model, token_logprobs

TOLERANCE = 1e-4
REAL = os.environ.get("SGLANG_URL", "")
CONFIG = EngineConfig("model", dtype="float32", max_model_len=507)
INFO = {
    "dtype": "float32",
    "max_req_input_len": 506,
    "internal_states": [{}],
    "json_model_override_args": "{}",
}


class Engine(SGLangServerEngine):
    model: LlamaForCausalLM

    async def answer(self, *requests: GenerationRequest) -> list[GenerationOutput]:
        found = {
            output.request_id: output async for batch in self.generate(requests) for output in batch
        }
        return [found[request.request_id] for request in requests]

    async def sync(self) -> int:
        version = self.version + 1
        perturb(self.model, seed=version)
        update = publish(self.model, version)
        await self.update_weights(update)
        remove_weights(update.info["path"])
        assert not Path(update.info["path"]).with_suffix("").exists()
        return version


@pytest_asyncio.fixture(
    params=[False] if REAL else [False, True], ids=["repeats", "incremental"][: 1 if REAL else 2]
)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    torch.manual_seed(0)
    folder = Path(os.environ["SGLANG_MODEL"]) if REAL else tmp_path
    model = LlamaForCausalLM.from_pretrained(folder) if REAL else save_model(folder, tied=True)
    server = TestServer(
        FakeServer(save_model(tmp_path, tied=True), incremental=request.param).app()
    )
    await server.start_server()
    extra = {"url": REAL or str(server.make_url("")), "key": KEY, "start_s": 10}
    engine = Engine(replace(CONFIG, model_path="", version=3, extra=extra))
    engine.model = model
    await engine.start()
    yield engine
    await engine.shutdown()
    await engine.shutdown()  # safe to call twice
    await server.close()


def request_of(
    name: str, tokens: int = 12, prompt: list[int] | None = None, **sampling: object
) -> GenerationRequest:
    settings = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerationRequest(name, prompt or [2, 3, 4, 5], settings)


async def until_started(engine: Engine, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(bool(request.tokens) for request in engine._requests.values()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def gap(
    model: LlamaForCausalLM, prompt: list[int], output: GenerationOutput, temperature: float = 1.0
) -> float:
    whole = prompt + output.token_ids.tolist()
    expected = token_logprobs(model, whole, temperature)[len(prompt) - 1 :]
    return (torch.tensor(output.logprobs) - expected).abs().max().item()


async def test_tokens_logprobs_and_versions_are_those_of_the_weights_that_were_handed_over(
    engine: Engine,
) -> None:
    version = await engine.sync()
    requests = [request_of(f"r{i}", 1 + 7 * i, [2 + i, 5], temperature=0.7) for i in range(6)]
    outputs = await engine.answer(*requests)
    assert [len(output.token_ids) for output in outputs] == [1 + 7 * i for i in range(6)]
    assert {v for output in outputs for v in output.versions.tolist()} == {version}
    assert (
        max(gap(engine.model, [2 + i, 5], output, 0.7) for i, output in enumerate(outputs))
        < TOLERANCE
    )
    sequence = [2, 3, *outputs[5].token_ids.tolist()]
    (scores, none) = await engine.score([sequence, [5]])
    assert (
        torch.tensor(scores).sub(token_logprobs(engine.model, sequence)).abs().max() < TOLERANCE
        and none == []
    )


async def test_requests_in_flight_live_through_an_update_and_their_tokens_say_so(
    engine: Engine,
) -> None:
    before = engine.version
    answers = asyncio.create_task(
        engine.answer(*(request_of(f"l{i}", 150, [2 + i, 3]) for i in range(4)))
    )
    await until_started(engine, 4)
    progress = {each.request_id: each for each in await engine.progress()}
    said = await engine.stats()
    assert said.cache_tokens == 4096 and said.cache_used is not None and 0 < said.cache_used < 1000
    await engine.pause("keep")
    late = asyncio.create_task(engine.answer(request_of("late", 5)))
    await asyncio.sleep(0.05)
    after = await engine.sync()
    await engine.resume()
    for output in await answers:
        assert len(output.token_ids) == 150 and set(output.versions.tolist()) == {before, after}
        told = progress[output.request_id].token_ids
        assert output.token_ids[: len(told)].tolist() == told.tolist()
    (one,) = await late
    assert one.versions.tolist() == [after] * 5, (
        "a request without tokens begins with the new weights"
    )
    assert gap(engine.model, [2, 3, 4, 5], one) < TOLERANCE


async def test_requests_are_ended_with_what_they_have_and_a_client_goes_on_with_them(
    engine: Engine,
) -> None:
    answers = asyncio.create_task(engine.answer(request_of("a", 400), request_of("b", 60)))
    await until_started(engine, 2)
    await engine.abort(["a", "unknown"])
    cut, whole = await answers
    assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 400
    assert whole.finish_reason == "length" and len(whole.token_ids) == 60
    client = InferenceClient([engine])
    assert not client.proves_weights
    answer = asyncio.create_task(client.generate(request_of("c", 200)))
    await until_started(engine, 1)
    await client.cut()
    version = await engine.sync()
    await client.resume()
    found = await answer
    assert len(found.token_ids) == 200 and sorted(set(found.versions.tolist())) == [
        version - 1,
        version,
    ]


async def test_a_drain_waits_for_what_runs_and_holds_what_comes(engine: Engine) -> None:
    first = asyncio.create_task(engine.answer(request_of("first", 40)))
    await until_started(engine, 1)
    drain = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(engine.answer(request_of("second", 3)))
    await drain
    assert len((await first)[0].token_ids) == 40 and not second.done()
    await engine.resume()
    assert len((await second)[0].token_ids) == 3


async def test_weights_that_the_server_rejects_or_cannot_find_are_an_error(
    engine: Engine, tmp_path: Path
) -> None:
    if REAL:
        pytest.skip("a real server reloads its former weights, whose file is gone, and fails")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(WeightSyncError, match="has rejected the weights of version 9"):
        await engine.update_weights(WeightUpdate(9, "shared_memory", {"path": str(broken)}))
    with pytest.raises(FileNotFoundError, match="is not on"):
        await engine.update_weights(
            WeightUpdate(9, "shared_memory", {"path": str(tmp_path / "none.safetensors")})
        )


async def test_a_server_that_wants_another_key_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = engine.config.extra["url"]
    for key, said in (("", "needs a key"), ("another", "rejected the key")):
        monkeypatch.setenv("SKYASYNC_ENGINES_KEY", key)
        with pytest.raises(UserError, match=said):
            await asyncio.to_thread(check_servers, [url], CONFIG, "", "sglang_server")
    monkeypatch.setenv("SKYASYNC_ENGINES_KEY", KEY)
    await asyncio.to_thread(
        check_servers, [url], replace(CONFIG, model_path=""), "", "sglang_server"
    )
    with pytest.raises(
        UserError, match=r"is an SGLang server: set generator\.backend=sglang_server"
    ):
        await asyncio.to_thread(check_servers, [url], CONFIG, "", "vllm_server")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_req_input_len": 300}, "--context-length 512, or set generator.max_model_len=301"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"json_model_override_args": '{"rope_theta": 5.0}'}, "--json-model-override-args"),
        ({"internal_states": None}, ""),
        ({"vllm_config": {}}, "is a vLLM server: leave generator.backend at auto"),
    ],
)
def test_what_keeps_a_server_from_being_an_engine_is_one_line(changed: dict, said: str) -> None:
    problem = SGLangServerEngine.complaint(
        "http://x:1", INFO | changed, replace(CONFIG, model_path="")
    )
    assert said in problem and bool(problem) == bool(said) and "\n" not in problem
    assert "is no SGLang server" in SGLangServerEngine.complaint("http://x:1", {}, CONFIG)
    assert "is no vLLM server" in VLLMServerEngine.complaint("http://x:1", {}, CONFIG)


def test_what_it_lacks_is_refused_before_the_start_and_in_requests() -> None:
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = "model", "sglang_server"
    assert any(
        "backend=sglang_server needs generator.engines=" in line for line in check_config(cfg)
    )
    cfg.generator.engines = ["http://127.0.0.1:30000"]
    assert backend(cfg) == "sglang_server" and not check_config(cfg)
    cfg.generator.sampling_params.top_p, cfg.generator.weight_sync_mode = 0.9, "delta"
    found = list(check_config(cfg))
    assert any(
        "top_p needs generator.backend=transformers (supported backends: transformers, vllm, vllm_server)"
        in line
        for line in found
    )
    assert any("weight_sync_mode=delta needs" in line for line in found)
    with pytest.raises(UserError, match=r"top_p=0\.9 is not for SGLang"):
        sampling_of(SamplingParams(top_p=0.9))
    assert sampling_of(SamplingParams(top_k=-1, stop=("a",)))["stop"] == ["a"]
