"""Train the tiny model for a few steps in environments of other programs, all in one run; prints
the rewards of each.

    python -m examples.hubs.try_all --openenv VENV --envs OPENENV_REPOSITORY/envs --nemo-gym VENV
    [NAME ...]

See README.md for how to make the two Python environments. This program starts and ends every
server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PORT = 9300 + os.getpid() % 1000 * 20  # of the first server
START_S = 300


class Trial(NamedTuple):
    """An environment: its hub, and the columns of its row; without any, the first row of the
    server's own data."""

    hub: str
    row: dict[str, Any] = {}  # noqa: RUF012  (of a tuple, never changed)


SORTING = {"dataset_name": "number_sorting", "dataset_config": {"max_numbers": 4}, "size": 8}
TRIALS = {
    "echo_env": Trial("openenv", {"prompt": "Play."}),
    "grid_world_env": Trial("openenv", {"show": ["message"], "prompt": "Play."}),
    "connect4_env": Trial("openenv", {"show": ["legal_actions"], "prompt": "Play."}),
    "maze_env": Trial("openenv", {"seed": 1, "execution_errors": "show", "prompt": "Play."}),
    "reasoning_gym_env": Trial("openenv", {"seed": 1, "reset": SORTING, "prompt": "Play."}),
    "wildfire_env": Trial(
        "openenv",
        {
            "show": ["burning_count", "remaining_water"],
            "action_with": {"x": 1, "y": 1},
            "prompt": "Play.",
        },
    ),
    "string_match": Trial("nemo_gym"),
    "mcqa": Trial("nemo_gym"),
    "blackjack": Trial("nemo_gym"),
    "reasoning_gym": Trial("nemo_gym"),
    "example_single_tool_call": Trial("nemo_gym"),
    "example_session_state_mgmt": Trial("nemo_gym"),
    "example_multi_turn_gymnasium": Trial("nemo_gym"),
    "GuessTheNumber-v0": Trial("textarena", {"prompt": "", "textarena_id": "GuessTheNumber-v0"}),
    "FrozenLake-v1": Trial("gymnasium", {"prompt": "", "gym_id": "FrozenLake-v1"}),
    "game:GuessTheNumber-v0-easy": Trial(
        "gem", {"prompt": "", "gem_env": "game:GuessTheNumber-v0-easy"}
    ),
    "rg:chain_sum": Trial("gem", {"prompt": "", "gem_env": "rg:chain_sum"}),
}
SERVED = ("openenv", "nemo_gym")


class Servers(ExitStack):
    """The environments' servers, each in its own Python; they end with the block."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__()
        self._options = options
        self._folder = folder
        self._count = 0

    def serve(self, name: str) -> tuple[str, subprocess.Popen[bytes]]:
        """The address that will answer, and the server."""
        port = PORT + self._count
        self._count = self._count + 1
        where: dict[str, Any] = {}
        if TRIALS[name].hub == "nemo_gym":
            command = [
                f"{self._options.nemo_gym}/bin/python",
                str(HERE / "serve_nemo_gym.py"),
                name,
                str(port),
            ]
        else:
            command = [
                f"{self._options.openenv}/bin/python",
                "-m",
                "uvicorn",
                f"{name}.server.app:app",
            ]
            command += ["--port", str(port)]
            environ = {**os.environ, "PYTHONPATH": str(self._options.envs)}
            where = {"cwd": self._options.envs / name, "env": environ}
        log = self.enter_context((self._folder / f"{name}.server.log").open("wb"))
        server = subprocess.Popen(command, stdout=log, stderr=log, **where)
        self.callback(server.wait)
        self.callback(server.terminate)
        return f"http://127.0.0.1:{port}", server


def own_data(name: str, options: argparse.Namespace) -> Path:
    """The rows that NeMo Gym's wheel has for a server."""
    return next(
        options.nemo_gym.glob(
            f"lib/python*/site-packages/resources_servers/{name}/data/example.jsonl"
        )
    )


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/openapi.json", timeout=60):
                return
        except urllib.error.HTTPError:
            return  # it answers; the run checks what it serves
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {server.args!r}")


def train(
    config: str, run: Path, options: argparse.Namespace, *settings: str
) -> list[dict[str, float]]:
    """The metrics of each step."""
    command = [
        sys.executable, "-m", "skyasync", "--config", str(HERE / config),
        f"trainer.runs_dir={run.parent}", f"trainer.run_name={run.name}", *settings, *options.settings,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    run.with_suffix(".log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit((done.stderr or done.stdout)[-2000:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def try_environments(names: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    """Each step has a group of each environment."""
    with Servers(options, folder) as started:
        servers = {name: started.serve(name) for name in names if TRIALS[name].hub in SERVED}
        sources = []
        for name in names:
            trial = TRIALS[name]
            row = trial.row or json.loads(own_data(name, options).read_text().splitlines()[0])
            if name in servers:
                env_class = f"{trial.hub}:{servers[name][0]}"
            else:
                env_class = trial.hub
            sources.append(folder / f"{name.replace(':', '_')}.jsonl")
            sources[-1].write_text(json.dumps({**row, "env_class": env_class, "domain": name}))
        for url, server in servers.values():
            wait_for(url, server)
        steps = train("trial.yaml", folder / "trial", options, f"data.train_data=[{','.join(map(str, sources))}]",
                      f"trainer.train_batch_size={len(sources)}")  # fmt: skip
    for name in names:
        rewards = " ".join(f"{step[f'reward/mean/{name}']:6.2f}" for step in steps)
        print(f"{TRIALS[name].hub:10} {name:30} {rewards}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="environments; without any, all of them",
    )
    parser.add_argument("--openenv", type=Path, help="the virtual environment that has openenv")
    parser.add_argument("--envs", type=Path, help="the folder envs of OpenEnv's repository")
    parser.add_argument("--nemo-gym", type=Path, help="the virtual environment that has nemo-gym")
    parser.add_argument("--folder", type=Path, help="where logs go; without it, a temporary folder")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="key=value, for the run"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try_environments(options.names or list(TRIALS), options, folder)
    print(f"logs: {folder}")


if __name__ == "__main__":
    main()
