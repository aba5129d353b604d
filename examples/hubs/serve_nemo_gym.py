"""Serve one resources server of an installed nemo-gym, unchanged:
``python serve_nemo_gym.py blackjack 8000``.

Runs in the Python environment of nemo-gym, which this library does not share. Its own ``ng_run``
starts agents and models too, which the trainer replaces.
"""

import importlib
import inspect
import sys
from pathlib import Path
from unittest.mock import MagicMock

import uvicorn
import yaml
from nemo_gym.base_resources_server import BaseResourcesServer
from nemo_gym.server_utils import ServerClient


def main(name: str, port: int) -> None:
    module = importlib.import_module(f"resources_servers.{name}.app")
    classes = [
        candidate
        for _, candidate in inspect.getmembers(module, inspect.isclass)
        if candidate.__module__ == module.__name__
    ]
    server_class = next(
        candidate for candidate in classes if issubclass(candidate, BaseResourcesServer)
    )
    files = sorted((Path(module.__file__).parent / "configs").glob("*.yaml"))
    entries = [entry for file in files for entry in yaml.safe_load(file.read_text()).values()]
    servers = [entry["resources_servers"] for entry in entries if "resources_servers" in entry]
    settings = next(iter(servers[0].values())) | {"host": "127.0.0.1", "port": port, "name": name}
    config = server_class.model_fields["config"].annotation.model_validate(settings)
    server = server_class(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
