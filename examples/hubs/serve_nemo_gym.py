"""Serve one resources server of an installed nemo-gym, unchanged.

    python serve_nemo_gym.py blackjack 8000

Run it in the Python environment of nemo-gym, which does not need skyasync. NeMo Gym's own command
``ng_run`` starts agents and models too, which the trainer replaces.
"""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import uvicorn
import yaml
from nemo_gym.base_resources_server import BaseResourcesServer
from nemo_gym.server_utils import ServerClient


def main(name: str, port: int) -> None:
    module = importlib.import_module(f"resources_servers.{name}.app")
    server_class = find_server_class(module)
    settings = read_settings(Path(module.__file__).parent / "configs")
    settings |= {"host": "127.0.0.1", "port": port, "name": name}
    config_class = server_class.model_fields["config"].annotation
    config = config_class.model_validate(settings)
    # The client is for calls of other servers, which a resources server does not make.
    server = server_class(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")


def find_server_class(module: ModuleType) -> type[BaseResourcesServer]:
    """The resources server that the module defines."""
    for _, candidate in inspect.getmembers(module, inspect.isclass):
        # Not one that the module only imports, such as the base class.
        is_defined_here = candidate.__module__ == module.__name__
        if is_defined_here and issubclass(candidate, BaseResourcesServer):
            return candidate
    raise SystemExit(f"{module.__name__} defines no resources server")


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the first resources server in the configurations of a folder."""
    for file in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(file.read_text()).values():
            if "resources_servers" in entry:
                return next(iter(entry["resources_servers"].values()))
    raise SystemExit(f"{folder} has no configuration of a resources server")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
