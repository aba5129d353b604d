"""Train the tiny model in environments of other programs, all in one run; print their rewards.

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
PORT = 9300 + os.getpid() % 1000 * 20  # of the first server; two programs use different ports
START_S = 300  # for a server


class Trial(NamedTuple):
    """An environment to try.

    Args:
        hub: the library or server that has it.
        row: the columns of its row; by default the first row of the server's data.
    """

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
SERVED = ("openenv", "nemo_gym")  # hubs whose environments need a server


class Servers(ExitStack):
    """The environments' servers, in the Python environments of their hubs.

    They end with the block.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__()
        self._options = options
        self._folder = folder
        self._count = 0

    def serve(self, name: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a server; returns its future address, and its process."""
        port = PORT + self._count
        self._count += 1
        folder = None
        environ = dict(os.environ)
        if TRIALS[name].hub == "nemo_gym":
            command = [f"{self._options.nemo_gym}/bin/python", str(HERE / "serve_nemo_gym.py")]
            command += [name, str(port)]
        else:
            command = [f"{self._options.openenv}/bin/python", "-m", "uvicorn"]
            command += [f"{name}.server.app:app", "--port", str(port)]
            # The environments are packages in one folder, and read files of their own folders.
            environ["PYTHONPATH"] = str(self._options.envs)
            folder = self._options.envs / name
        log = self.enter_context((self._folder / f"{name}.server.log").open("wb"))
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environ)
        # Callbacks run in reverse order: first terminate, then wait.
        self.callback(server.wait)
        self.callback(server.terminate)
        return f"http://127.0.0.1:{port}", server


def example_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The first of the rows that NeMo Gym's wheel has for a server."""
    pattern = f"lib/python*/site-packages/resources_servers/{name}/data/example.jsonl"
    file = next(options.nemo_gym.glob(pattern))
    row: dict[str, Any] = json.loads(file.read_text().splitlines()[0])
    return row


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
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
    """Train with a configuration and further settings; returns the metrics of each step."""
    command = [sys.executable, "-m", "skyasync", "--config", str(HERE / config)]
    command += [f"trainer.runs_dir={run.parent}", f"trainer.run_name={run.name}"]
    command += [*settings, *options.settings]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    run.with_suffix(".log").write_text(completed.stdout + completed.stderr)
    if completed.returncode != 0:
        raise SystemExit((completed.stderr or completed.stdout)[-2000:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]  # step 0 is the evaluation before training


def try_environments(names: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    """Train in these environments; each step has a group of each."""
    with Servers(options, folder) as started:
        servers = {}
        for name in names:
            if TRIALS[name].hub in SERVED:
                servers[name] = started.serve(name)
        sources = []  # a file with one row for each environment
        for name in names:
            trial = TRIALS[name]
            env_class = trial.hub
            if name in servers:
                url, _ = servers[name]
                env_class = f"{trial.hub}:{url}"
            row = dict(trial.row or example_row(name, options))
            row |= {"env_class": env_class, "domain": name}  # the domain gives metrics its name
            source = folder / f"{name.replace(':', '_')}.jsonl"
            source.write_text(json.dumps(row))
            sources.append(str(source))
        for url, server in servers.values():
            wait_for(url, server)
        data = f"data.train_data=[{','.join(sources)}]"
        batch_size = f"trainer.train_batch_size={len(sources)}"
        steps = train("trial.yaml", folder / "trial", options, data, batch_size)
    for name in names:
        rewards = [step[f"reward/mean/{name}"] for step in steps]
        columns = " ".join(f"{reward:6.2f}" for reward in rewards)
        print(f"{TRIALS[name].hub:10} {name:30} {columns}")


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
