"""Train the tiny model for a few steps in environments of other programs, one after another; prints the results.

    python -m examples.hubs.try_all --openenv VENV --envs OPENENV_REPOSITORY/envs --nemo-gym VENV [NAME ...]

See README.md for how to make the two Python environments. This program starts and ends every server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PORT = 9300


class Trial(NamedTuple):
    """An environment: its hub, the columns of its rows, and settings of the run."""

    hub: str
    row: dict[str, Any] = {}  # noqa: RUF012  (of a tuple, never changed)
    settings: tuple[str, ...] = ()


ONE_AT_A_TIME = ("generator.max_concurrent_episodes=1",)  # the limit of most of OpenEnv's servers
TRIALS = {
    "echo_env": Trial("openenv", {}, ONE_AT_A_TIME),
    "grid_world_env": Trial("openenv", {"show": ["message"]}, ONE_AT_A_TIME),
    "connect4_env": Trial("openenv", {"show": ["legal_actions"]}, ONE_AT_A_TIME),
    "maze_env": Trial("openenv", {"seed": 1, "execution_errors": "show"}, ONE_AT_A_TIME),
    "reasoning_gym_env": Trial(
        "openenv",
        {"seed": 1, "reset": {"dataset_name": "number_sorting", "dataset_config": {"max_numbers": 4}, "size": 8}},
        ONE_AT_A_TIME,
    ),
    "wildfire_env": Trial(
        "openenv", {"show": ["burning_count", "remaining_water"], "action_with": {"x": 1, "y": 1}}, ONE_AT_A_TIME
    ),
    "string_match": Trial("nemo_gym"),
    "mcqa": Trial("nemo_gym"),
    "blackjack": Trial("nemo_gym"),
    "reasoning_gym": Trial("nemo_gym"),
    "example_single_tool_call": Trial("nemo_gym"),
    "example_session_state_mgmt": Trial("nemo_gym"),
    "example_multi_turn_gymnasium": Trial("nemo_gym"),
}


def start(name: str, trial: Trial, given: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    """The server of an environment, in its own Python."""
    with log.open("wb") as file:
        if trial.hub == "nemo_gym":
            command = [f"{given.nemo_gym}/bin/python", str(HERE / "serve_nemo_gym.py"), name, str(PORT)]
            return subprocess.Popen(command, stdout=file, stderr=file)
        command = [f"{given.openenv}/bin/python", "-m", "uvicorn", f"{name}.server.app:app", "--port", str(PORT)]
        return subprocess.Popen(
            command, stdout=file, stderr=file, cwd=given.envs / name, env={**os.environ, "PYTHONPATH": str(given.envs)}
        )


def wait_for(path: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers; the run checks what it serves
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("the server did not start")


def rows(name: str, trial: Trial, given: argparse.Namespace, folder: Path) -> Path:
    """The server's own data, or rows that repeat one task."""
    if trial.hub == "nemo_gym":
        found = next(given.nemo_gym.glob(f"lib/python*/site-packages/resources_servers/{name}/data/example.jsonl"))
        return Path(found)
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "Play.", **trial.row}) for _ in range(16)))
    return file


def play(name: str, given: argparse.Namespace, folder: Path) -> str:
    """The line of the table."""
    trial, began = TRIALS[name], time.monotonic()
    server = start(name, trial, given, folder / f"{name}.server.log")
    try:
        wait_for("/schema" if trial.hub == "openenv" else "/openapi.json", server)
        command = [
            sys.executable, "-m", "skyasync", "--config", str(HERE / "trial.yaml"),
            f"environment.env_class={trial.hub}:http://127.0.0.1:{PORT}",
            f"data.train_data=[{rows(name, trial, given, folder)}]",
            f"trainer.runs_dir={folder}/runs", f"trainer.run_name={name}", *trial.settings, *given.settings,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    finally:
        server.terminate()
        server.wait()
    rewards = re.findall(r"reward[^\d-]*(-?\d+\.\d+)", done.stdout + done.stderr)
    result = f"rewards {' '.join(rewards)}" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-200:]
    return f"{trial.hub:9} {name:30} {time.monotonic() - began:4.0f} s  {result}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="environments; without any, all of them")
    parser.add_argument("--openenv", type=Path, help="the virtual environment that has openenv")
    parser.add_argument("--envs", type=Path, help="the folder envs of OpenEnv's repository")
    parser.add_argument("--nemo-gym", type=Path, help="the virtual environment that has nemo-gym")
    parser.add_argument("--folder", type=Path, help="where logs go; without it, a temporary folder")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="key=value, for every run")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or TRIALS:
        print(play(name, given, folder), flush=True)
    print(f"logs: {folder}")


if __name__ == "__main__":
    main()
