"""A model of the hub is downloaded before anything loads it, however long that takes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyasync.config import Config
from skyasync.run.model_downloads import hub_models
from skyasync.workers.roles import roles_with_ranks
from tests.end_to_end.runs import Trained, arguments, outside_environment

NAME = "owner/tiny"
COMMIT = "c" * 40


def test_models_in_folders_are_not_downloaded_and_a_shared_one_is_downloaded_once(
    tmp_path: Path,
) -> None:
    cfg = Config()
    cfg.trainer.policy.model.path = NAME
    cfg.trainer.ref.model.path = NAME
    cfg.trainer.algorithm.use_kl_loss = True
    cfg.trainer.reward.models = {
        "local": {"path": str(tmp_path)},
        "remote": {"path": "owner/reward"},
    }
    assert hub_models(cfg, roles_with_ranks(cfg)) == [NAME, "owner/reward"]


def test_without_a_connection_a_cache_with_the_configuration_alone_is_an_error(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    program = (
        "from skyasync.run.model_downloads import download; print(bool(download('owner/tiny')))"
    )
    environment = outside_environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    problems = []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        problems.append(ended.stdout.strip())
        (snapshot / "model.safetensors").touch()
    assert problems == ["True", "False"]


@pytest.fixture
def hub(models: dict[str, str]) -> Iterator[SimpleNamespace]:
    """A server with the hub's protocol and one model; it sends the weights for ``seconds``."""
    folder = Path(models["tied"])
    state = SimpleNamespace(url="", seconds=0.0, weights=0)

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            if self.path.startswith("/api/models/"):
                files = sorted(file.name for file in folder.iterdir())
                entries = [
                    {"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in files
                ]
                siblings = [{"rfilename": name} for name in files]
                model = {"id": NAME, "sha": COMMIT, "siblings": siblings}
                self.send(
                    200, json.dumps(entries if "/tree/" in self.path else model).encode(), body
                )
                return
            file = folder / self.path.rpartition("/")[2].partition("?")[0]
            if NAME not in self.path or not file.is_file():
                self.send(404, b"", body)
                return
            slow = body and file.suffix == ".safetensors"
            self.send(200, file.read_bytes(), body, state.seconds if slow else 0.0)
            state.weights += slow

        def send(self, status: int, content: bytes, body: bool, seconds: float = 0.0) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if not body:
                return
            piece = max(1, len(content) // 20)
            for start in range(0, len(content), piece):
                self.wfile.write(content[start : start + piece])
                time.sleep(seconds / 20)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()


@pytest.mark.slow
@pytest.mark.matrix
def test_a_download_does_not_count_against_the_start_limit_of_the_engines(
    hub: SimpleNamespace, tmp_path: Path
) -> None:
    hub.seconds = 75.0
    settings = arguments(
        "trainer.max_training_steps=1",
        "generator.engine_start_timeout_s=70",
        runs=tmp_path,
        model=NAME,
    )
    environment = outside_environment() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "skyasync", *settings]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(Trained(tmp_path / "run").metrics) == 1
    assert hub.weights == 1
