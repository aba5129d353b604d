"""Whether servers of ``generator.engines`` can be engines of a run: how they are asked.

Invariant: a complaint is one line that names the server and the way out. Imports nothing heavy: it is asked before
anything starts.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from skyasync.engines.protocol import EngineConfig
from skyasync.errors import UserError

KEY_VARIABLE = "SKYASYNC_ENGINES_KEY"  # what server and run have to have alike, where the server asks for a key
ANSWER_S = 30.0  # the first time it is asked, a server looks its machine over, for seconds


@dataclass(frozen=True)
class Kind:
    """Servers of one maker.

    Args:
        complaint: by its address, what it says of itself, and what an engine of the run's own would be started with:
            what keeps it from being an engine; empty if nothing does.
        what: they are, in messages.
        way: how one is started that can be an engine.
    """

    complaint: Callable[[str, Mapping[str, Any], EngineConfig], str]
    what: str
    way: str

    def foreign(self, url: str, found: str) -> str:
        return f"generator.engines: {url} is no {self.what} ({found}); {self.way}"


#: Where the kinds are, by generator.backend.
KINDS = {"vllm_server": "skyasync.engines.vllm.server_check", "sglang_server": "skyasync.engines.sglang.server_check"}


def check_servers(
    urls: list[str], config: EngineConfig, weight_sync_dir: str = "", backend: str = "vllm_server"
) -> None:
    """Raises UserError, in one line, for the first one that does not answer or cannot be an engine."""
    kind: Kind = import_module(KINDS[backend]).KIND
    if weight_sync_dir and not os.access(weight_sync_dir, os.W_OK):
        raise UserError(f"generator.weight_sync_dir={weight_sync_dir} is no folder that can be written to")
    for url in urls:
        if problem := address_complaint(url) or kind.complaint(url, server_info(kind, url), config):
            raise UserError(problem)


def address_complaint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return ""
    return f"generator.engines: {url!r} is not the address of a server, such as http://127.0.0.1:8000"


def server_info(kind: Kind, url: str) -> dict[str, Any]:
    """What a server says of itself.

    Raises:
        UserError: if nothing answers there, or something else.
    """
    try:
        with urllib.request.urlopen(_question(url), timeout=ANSWER_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            what = "rejected the key in" if os.environ.get(KEY_VARIABLE) else "needs a key: set"
            raise UserError(
                f"generator.engines: {url} {what} {KEY_VARIABLE} (HTTP 401): use the value that the server has"
            ) from None
        raise UserError(kind.foreign(url, f"/server_info answers {error.code}")) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"generator.engines: {url} does not answer ({reason}); {kind.way}") from None
    except ValueError:
        raise UserError(kind.foreign(url, "/server_info is not JSON")) from None
    return dict(found) if isinstance(found, dict) else {}


def _question(url: str) -> urllib.request.Request:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return urllib.request.Request(f"{url.rstrip('/')}/server_info?config_format=json", headers=headers)
