"""Access to the server, and its errors, without the SDK's client."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.interop.tinker.experiment import Address, TinkerExperiment
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


async def test_a_key_is_required_if_there_is_one_and_errors_have_the_protocols_form(model: str, tmp_path: Path) -> None:
    mine = {"X-API-Key": "tml-mine"}
    async with tinker_server(model, tmp_path, key="tml-mine") as up:
        for headers in ({}, {"X-API-Key": "tml-other"}, {"Authorization": "Bearer tml-mine-not"}):
            status, body = await ask(up.server, "GET", "get_server_capabilities", headers=headers)
            assert status == 401 and body["category"] == "user"
        status, body = await ask(up.server, "GET", "get_server_capabilities", headers=mine)
        assert (status, body["supported_models"][0]["model_name"]) == (200, model)
        status, body = await ask(up.server, "POST", "create_model", headers=mine, json={"session_id": 5})
        assert status == 400 and "session_id" in body["error"]
        status, body = await ask(up.server, "POST", "forward_backward", headers=mine, data=b"{}")
        assert status == 415
        protobuf = {**mine, "Content-Type": "application/x-protobuf"}
        status, body = await ask(up.server, "POST", "forward_backward", headers=protobuf, data=b"\xff\xff")
        assert status == 400 and "ForwardBackwardRequest" in body["error"]
        status, body = await ask(
            up.server, "POST", "telemetry", headers={**mine, "Content-Encoding": "gzip"}, data=b"\x1f\x8b" * 100
        )
        assert status == 415, "nothing is decompressed"
        status, body = await ask(up.server, "GET", "sessions", headers={**mine, "Host": "evil.com"})
        assert status == 403
        status, body = await ask(up.server, "POST", "retrieve_future", headers=mine, json={"request_id": "nothing"})
        assert status == 410
        status, body = await ask(up.server, "GET", "nowhere", headers=mine)
        assert status == 404


async def test_the_next_request_of_a_model_does_not_wait_for_one_that_was_not_accepted(
    model: str, tmp_path: Path
) -> None:
    async with tinker_server(model, tmp_path) as up:
        session = (await ask(up.server, "POST", "create_session", json={}))[1]["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 2}}
        name = (await ask(up.server, "POST", "create_model", json=new))[1]["model_id"]
        wrong = {"model_id": name, "seq_id": 1, "adam_params": {}, "unknown": 1}
        for _ in range(2):
            status, body = await ask(up.server, "POST", "optim_step", json=wrong)
            assert status == 400 and body["error"].startswith("unknown: ")
        status, _ = await ask(up.server, "POST", "forward_backward", json={"model_id": name, "seq_id": 2})
        assert status == 415
        status, _ = await ask(up.server, "POST", "save_weights", json={"model_id": "no model", "seq_id": 3, "paths": 1})
        assert status == 400
        saves = {"model_id": name, "seq_id": 3, "path": "third"}
        status, body = await ask(up.server, "POST", "save_weights", json=saves)
        status, body = await ask(up.server, "POST", "retrieve_future", json={"request_id": body["request_id"]})
        assert (status, body.get("path")) == (200, f"tinker://{name}/weights/third")
        status, body = await ask(up.server, "POST", "retrieve_future", json={"request_id": f"{name}:1"})
        assert body["category"] == "user" and body["error"].startswith("unknown: ")


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
