"""Plays tasks of verifiers 0.4 (its ``v1`` interface) in the sessions of a run, which trains the
model that they call.

    skyasync --config examples/hubs/verifiers.yaml trainer.run_name=hub          # in one terminal
    python examples/hubs/verifiers_player.py runs/hub env.json                   # with the Python of verifiers

``env.json`` is the ``env`` of verifiers' own configuration: a taskset with its settings, and each
player's runtime. Every session is one rollout, whose reward and metrics become those of the
session. A rollout that fails fails the session. By default verifiers does not retry: a retry would
be a second episode of the same session.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import resolve_env_config

AT_ONCE = 4  # sessions that are played at the same time


async def play(env: Any, task: Any, http: httpx.AsyncClient, sessions_key: str) -> None:
    """One session: a rollout of the task, and its reward."""
    opened = await http.post(
        "sessions",
        headers={"Authorization": f"Bearer {sessions_key}"},
        json={"wait_s": 600, "task": task.data.name},
    )
    if opened.status_code == 503:
        return  # the run needs none at present
    session = opened.raise_for_status().json()
    variable = f"SESSION_KEY_{id(session)}"  # verifiers reads keys from the process's environment
    os.environ[variable] = session["api_key"]
    try:
        client = EvalClientConfig(base_url=session["base_url"], api_key_var=variable)
        episode = await env.run_slot(
            env.slots(task)[0], ModelContext(model="policy", client=client)
        )
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces:
        ending: dict[str, Any] = {"error": str(errors[-1] if errors else "no trace")[:1000]}
    else:
        (trace,) = episode.traces  # of one player
        rewards = {
            name: reward.value for name, reward in trace.rewards.items() if reward is not None
        }
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        ending = {"reward": sum(rewards.values()), "metrics": {**metrics, **rewards}}
    await http.post(
        "sessions/end", headers={"Authorization": f"Bearer {session['api_key']}"}, json=ending
    )


async def play_all(folder: Path, config: dict[str, Any]) -> None:
    """Session after session, task after task, until the run's endpoint is gone."""
    endpoint = json.loads(
        (folder / "endpoint.json").read_text()
    )  # it exists once the run has started
    env = vf.load_environment(resolve_env_config(config))
    tasks = list(itertools.islice(env.taskset.load(), 1000))
    samples = int(
        os.environ.get("SAMPLES", "4")
    )  # generator.n_samples_per_prompt: the sessions of one task
    turns = (task for task in itertools.cycle(tasks) for _ in range(samples))
    async with env.serving(), httpx.AsyncClient(base_url=endpoint["base_url"], timeout=700) as http:

        async def player() -> None:
            for task in turns:
                try:
                    await play(env, task, http, endpoint["sessions_key"])
                except httpx.TransportError:
                    return

        await asyncio.gather(*(player() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(play_all(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
