"""Play tasks of verifiers 0.4 (its ``v1`` interface) in the sessions of a run.

The run trains the model that the tasks call.

    skyasync --config examples/hubs/verifiers.yaml trainer.run_name=hub   # in one terminal
    python examples/hubs/verifiers_player.py runs/hub env.json            # verifiers' Python

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
    """Play one session: a rollout of the task, and its reward."""
    response = await http.post(
        "sessions",
        headers={"Authorization": f"Bearer {sessions_key}"},
        json={"wait_s": 600, "task": task.data.name},
    )
    if response.status_code == 503:
        return  # the run needs no session at present
    session = response.raise_for_status().json()
    variable = f"SESSION_KEY_{id(session)}"  # verifiers reads keys from the process's environment
    os.environ[variable] = session["api_key"]
    try:
        client = EvalClientConfig(base_url=session["base_url"], api_key_var=variable)
        model = ModelContext(model="policy", client=client)
        episode = await env.run_slot(env.slots(task)[0], model)
    finally:
        del os.environ[variable]
    await http.post(
        "sessions/end",
        headers={"Authorization": f"Bearer {session['api_key']}"},
        json=result_of(episode),
    )


def result_of(episode: Any) -> dict[str, Any]:
    """The reward and metrics of a session, or the error that fails it."""
    errors = list(episode.errors)
    for trace in episode.traces:
        errors += trace.errors
    if errors:
        return {"error": str(errors[-1])[:1000]}
    if not episode.traces:
        return {"error": "no trace"}
    (trace,) = episode.traces  # of the only player
    rewards = {}
    for name, reward in trace.rewards.items():
        if reward is not None:
            rewards[name] = reward.value
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": sum(rewards.values()), "metrics": {**metrics, **rewards}}


async def play_all(folder: Path, config: dict[str, Any]) -> None:
    """Play session after session, task after task, until the run's endpoint is closed."""
    file = folder / "endpoint.json"  # the run writes it when it starts
    endpoint = json.loads(file.read_text())
    env = vf.load_environment(resolve_env_config(config))
    tasks = list(itertools.islice(env.taskset.load(), 1000))
    # Sessions of one task, which the run compares: generator.n_samples_per_prompt.
    samples = int(os.environ.get("SAMPLES", "4"))
    # One generator for all players: each takes the next task.
    turns = (task for task in itertools.cycle(tasks) for _ in range(samples))
    async with env.serving(), httpx.AsyncClient(base_url=endpoint["base_url"], timeout=700) as http:

        async def play_turns() -> None:
            for task in turns:
                try:
                    await play(env, task, http, endpoint["sessions_key"])
                except httpx.TransportError:
                    return  # the endpoint is closed: the run has ended

        await asyncio.gather(*(play_turns() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(play_all(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
