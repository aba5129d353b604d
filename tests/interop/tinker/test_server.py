"""Access to the server, and its errors, without the SDK's client."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker.proto import tinker_public_pb2 as pb

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.interop.tinker.experiment import Address, TinkerExperiment
from skyasync.interop.tinker.server import MOST_BYTES
from tests.inference.tiny_llama import save_tiny_llama
from tests.interop.tinker.local_server import tinker_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


async def ask(server: Any, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(method, f"{server.base_url}/api/v1/{path}", **options) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_key_is_required_if_there_is_one_and_errors_have_the_protocols_form(
    model: str, tmp_path: Path
) -> None:
    mine = {"X-API-Key": "tml-mine"}
    async with tinker_server(model, tmp_path, key="tml-mine") as up:
        for headers in ({}, {"X-API-Key": "tml-other"}, {"Authorization": "Bearer tml-mine-not"}):
            status, body = await ask(up.server, "GET", "get_server_capabilities", headers=headers)
            assert status == 401 and body["category"] == "user"
        status, body = await ask(up.server, "GET", "get_server_capabilities", headers=mine)
        assert (status, body["supported_models"][0]["model_name"]) == (200, model)
        status, body = await ask(
            up.server, "POST", "create_model", headers=mine, json={"session_id": 5}
        )
        assert status == 400 and "session_id" in body["error"]
        status, body = await ask(up.server, "POST", "forward_backward", headers=mine, data=b"{}")
        assert status == 415
        protobuf = {**mine, "Content-Type": "application/x-protobuf"}
        status, body = await ask(
            up.server, "POST", "forward_backward", headers=protobuf, data=b"\xff\xff"
        )
        assert status == 400 and "ForwardBackwardRequest" in body["error"]
        status, body = await ask(
            up.server,
            "POST",
            "telemetry",
            headers={**mine, "Content-Encoding": "gzip"},
            data=b"\x1f\x8b" * 100,
        )
        assert status == 415, "nothing is decompressed"
        status, body = await ask(up.server, "GET", "sessions", headers={**mine, "Host": "evil.com"})
        assert status == 403
        status, body = await ask(
            up.server, "POST", "retrieve_future", headers=mine, json={"request_id": "nothing"}
        )
        assert status == 410
        status, body = await ask(up.server, "GET", "nowhere", headers=mine)
        assert status == 404


async def test_the_next_request_of_a_model_does_not_wait_for_one_that_was_not_accepted(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        session = (await ask(up.server, "POST", "create_session", json={}))[1]["session_id"]
        new = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": model,
            "lora_config": {"rank": 2},
        }
        name = (await ask(up.server, "POST", "create_model", json=new))[1]["model_id"]
        wrong = {"model_id": name, "seq_id": 1, "adam_params": {}, "unknown": 1}
        for _ in range(2):
            status, body = await ask(up.server, "POST", "optim_step", json=wrong)
            assert status == 400 and body["error"].startswith("unknown: ")
        status, _ = await ask(
            up.server, "POST", "forward_backward", json={"model_id": name, "seq_id": 2}
        )
        assert status == 415
        status, _ = await ask(
            up.server,
            "POST",
            "save_weights",
            json={"model_id": "no model", "seq_id": 3, "paths": 1},
        )
        assert status == 400
        saves = {"model_id": name, "seq_id": 3, "path": "third"}
        status, body = await ask(up.server, "POST", "save_weights", json=saves)
        status, body = await ask(
            up.server, "POST", "retrieve_future", json={"request_id": body["request_id"]}
        )
        assert (status, body.get("path")) == (200, f"tinker://{name}/weights/third")
        status, body = await ask(
            up.server, "POST", "retrieve_future", json={"request_id": f"{name}:1"}
        )
        assert body["category"] == "user" and body["error"].startswith("unknown: ")


def rows_of(name: str, seq: int, lengths: list[int]) -> bytes:
    """A request of rows with so many tokens."""
    message = pb.ForwardBackwardRequest(model_id=name, seq_id=seq, loss_fn="cross_entropy")
    for length in lengths:
        datum = message.data.add()
        tokens = np.ones(length, dtype=np.int32).tobytes()
        datum.model_input.add().encoded_text.tokens = tokens
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense = tokens
        target.dtype = pb.DTYPE_INT32
        target.shape.append(length)
    return bytes(message.SerializeToString())


async def test_requests_that_would_swell_the_server_are_rejected_before_they_are_stored(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        big = {"tags": ["x" * (1 << 15)]}
        status, body = await ask(up.server, "POST", "create_session", json=big)
        assert status == 400 and "16384 are the most" in body["error"]
        session = (await ask(up.server, "POST", "create_session", json={"tags": ["x"]}))[1][
            "session_id"
        ]
        status, body = await ask(up.server, "GET", f"sessions/{session}")
        assert status == 200
        new = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": model,
            "lora_config": {"rank": 2},
        }
        status, body = await ask(
            up.server, "POST", "create_model", json={**new, "user_metadata": {"x": "x" * 20_000}}
        )
        assert status == 400 and "user_metadata" in body["error"]
        name = (await ask(up.server, "POST", "create_model", json=new))[1]["model_id"]

        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
        status, body = await ask(up.server, "POST", "create_sampling_session", json=sampler)
        sampling = {"sampling_session_id": body["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": []},
                    "sampling_params": {}}  # fmt: skip
        for number in (0, 1025, 3_000_000, 10**9):
            status, body = await ask(
                up.server, "POST", "asample", json={**sampling, "num_samples": number}
            )
            assert status == 400 and "not from 1 to 1024" in body["error"]

        protobuf = {"Content-Type": "application/x-protobuf"}
        padded = rows_of(name, 1, [60, *[1] * 140_000])  # the padding of a longer context
        assert len(padded) < MOST_BYTES
        status, body = await ask(
            up.server, "POST", "forward_backward", headers=protobuf, data=padded
        )
        assert status == 400 and "send long rows in a request of their own" in body["error"]
        for seq, kind in (
            (2, "save_weights"),
            (3, "save_weights_for_sampler"),
            (4, "save_weights_external"),
        ):
            saves = {"model_id": name, "seq_id": seq, "path": "a", "ttl_seconds": 10**15}
            status, body = await ask(up.server, "POST", kind, json=saves)
            assert status == 400 and "ttl_seconds" in body["error"], kind
        saves = {"model_id": name, "seq_id": 5, "path": "b", "ttl_seconds": 2**31 - 1}
        request = (await ask(up.server, "POST", "save_weights", json=saves))[1]["request_id"]
        status, body = await ask(up.server, "POST", "retrieve_future", json={"request_id": request})
        assert body.get("path") == f"tinker://{name}/weights/b", (
            "the rejected ones have used their sequence ids"
        )
        for path in ("checkpoints", "training_runs", "sessions"):
            status, body = await ask(up.server, "GET", path)
            assert status == 200, path
        status, body = await ask(
            up.server, "POST", "retrieve_future", data=b'{"request_id": "\\ud800"}'
        )
        assert status == 400 and "Unicode" in body["error"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_another_address_than_the_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(UserError, match="set SKYASYNC_TINKER_KEY"):
        Address(host).check()


def test_an_address_that_cannot_be_listened_on_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} cannot be listened on"):
            Address(port=port, key="tml-key").check()
    Address(port=port).check()
    with pytest.raises(UserError, match="--host nowhere is not an address"):
        Address("nowhere").check()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lora.dropout", 0.1, "lora.dropout is not supported"),
        ("optimizer_config.name", "muon", "optimizer_config.name=muon is not supported"),
    ],
)
def test_settings_that_do_not_fit_are_rejected_before_anything_starts(
    model: str, tmp_path: Path, key: str, value: Any, says: str
) -> None:
    cfg = Config()
    cfg.trainer.policy.model.path = model
    section, name = key.split(".")
    setattr(vars(cfg.trainer.policy)[section], name, value)
    with pytest.raises(UserError, match=says):
        TinkerExperiment(cfg, tmp_path / "folder", Address())
    assert not (tmp_path / "folder").exists()
