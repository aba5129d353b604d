"""A separate program that trains the model that it calls.

It opens a session, asks a question, and sends a reward for the answer.

    # In one terminal, and in another one:
    uv run -m skyasync --config examples/online/config.yaml trainer.run_name=online
    python -m examples.online.player runs/online

It needs no library: a session is three requests over HTTP. It ends when the run does.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 64  # sessions that are played at the same time


def post(url: str, key: str, **body: Any) -> dict[str, Any]:
    """Send a JSON object; returns the JSON object of the answer."""
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    # Longer than ``wait_s`` below, for which the server waits for a free session.
    with urllib.request.urlopen(request, timeout=700) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def play(base_url: str, sessions_key: str) -> None:
    """Play one session: a row of the run's data, one answer, one reward."""
    session = post(f"{base_url}/sessions", sessions_key, wait_s=600)
    key = session["api_key"]
    row = session["data"]
    completion = post(f"{base_url}/chat/completions", key, messages=row["prompt"])
    text = completion["choices"][0]["message"]["content"]
    reward = float(text.strip() == row["answer"])
    post(f"{base_url}/sessions/end", key, reward=reward)


def play_sessions(base_url: str, sessions_key: str) -> None:
    """Play session after session, until the endpoint is closed."""
    while True:
        try:
            play(base_url, sessions_key)
        except urllib.error.HTTPError as error:
            # 401: the session timed out. 503: the trainer needs no session at present.
            if error.code not in (401, 503):
                raise RuntimeError(error.read().decode()) from error
        except OSError:  # the run has ended
            return


def endpoint_of(folder: Path) -> dict[str, str]:
    """The address and the key of the endpoint, which the run writes to its folder."""
    file = folder / "endpoint.json"
    while not (file.exists() and file.read_text()):  # the run has not started yet
        time.sleep(0.2)
    endpoint: dict[str, str] = json.loads(file.read_text())
    return endpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's folder")
    endpoint = endpoint_of(parser.parse_args().folder)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        players = [threads.submit(play_sessions, **endpoint) for _ in range(AT_ONCE)]
        for player in players:
            player.result()  # raises the player's error


if __name__ == "__main__":
    main()
