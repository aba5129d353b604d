"""A separate program that trains the model it talks to: it opens a session, asks, and sends a
reward for the answer.

    uv run -m skyasync --config examples/online/config.yaml trainer.run_name=online   # in one terminal
    python -m examples.online.player runs/online                                      # in another

It needs neither this library nor another one: sessions are three requests over HTTP. It ends when
the run does.
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
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=700) as answer:
        decoded: dict[str, Any] = json.load(answer)
        return decoded


def play(base_url: str, sessions_key: str) -> None:
    """One session: a row of the run's data, one answer, one reward."""
    session = post(f"{base_url}/sessions", sessions_key, wait_s=600)
    key = session["api_key"]
    row = session["data"]
    answer = post(f"{base_url}/chat/completions", key, messages=row["prompt"])
    text = answer["choices"][0]["message"]["content"]
    post(f"{base_url}/sessions/end", key, reward=float(text.strip() == row["answer"]))


def play_on(base_url: str, sessions_key: str) -> None:
    """Session after session, until the endpoint is closed."""
    while True:
        try:
            play(base_url, sessions_key)
        except urllib.error.HTTPError as error:
            if error.code not in (
                401,
                503,
            ):  # the session timed out; the trainer needs none at present
                raise RuntimeError(error.read().decode()) from error
        except OSError:
            return


def endpoint_of(folder: Path) -> dict[str, str]:
    """The endpoint's address, which the run writes to its folder."""
    file = folder / "endpoint.json"
    while not (file.exists() and file.read_text()):
        time.sleep(0.2)
    endpoint: dict[str, str] = json.loads(file.read_text())
    return endpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's")
    endpoint = endpoint_of(parser.parse_args().folder)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for player in [threads.submit(play_on, **endpoint) for _ in range(AT_ONCE)]:
            player.result()


if __name__ == "__main__":
    main()
