"""A server of the report's page during runs, and of their newest metrics for Prometheus.

Invariant: the server only reads the runs' folders, so it may start, fail and end without any effect
on a run. A page is drawn for a request if a run has written something since the last one. Requests
by pages of other sites are rejected; a server that other machines can reach answers only requests
with its token. Prometheus gets each series once, and only names and labels that it accepts.

| who waits   | for what                           | woken by                                           |
|-------------|------------------------------------|----------------------------------------------------|
| a request   | the page of what is written now    | the thread that draws, one page at a time          |
| the browser | the next page                      | its script, every few seconds                      |
| ``serve``   | its end                            | Ctrl-C; with ``stdin``, the end of the run's program |
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from skyasync.errors import UserError
from skyasync.inference.origin_check import foreign_origin, is_loopback
from skyasync.observability import jsonl
from skyasync.observability.alarms import RESTARTS, alarms
from skyasync.observability.metric_names import entry_of
from skyasync.observability.plots import labels
from skyasync.observability.report.page import LIVE_SCRIPT, page
from skyasync.observability.run_dir import RUNNING, read_status

LOOPBACK = "127.0.0.1"
#: Files whose changes change a page.
READ = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "status.json", "restarts.jsonl")
WAITING_CONNECTIONS = 64
END_S = 10.0  # for a page that is being drawn
LOG = "live_page.log"  # in the run's folder
_SCRIPT = base64.b64encode(hashlib.sha256(LIVE_SCRIPT.encode()).digest()).decode()
# The page may run its own script only, and load nothing: it shows text that a model wrote.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    f"script-src 'sha256-{_SCRIPT}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens; port 0 is a free one.

    Raises:
        UserError: for an invalid address, or a port that is in use.
    """
    if not 0 <= port < 1 << 16:  # the resolver would take it modulo 65536
        raise UserError(f"--port {port}: a port is a number up to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        return socket.create_server(address[:2], family=family, backlog=WAITING_CONNECTIONS)
    except OSError as error:
        raise UserError(f"the live page cannot listen at {host}, port {port}: {error}") from error


class LivePage:
    """The pages of some runs on a socket.

    Args:
        folders: of the runs; plots of several runs are in one figure.
        listening: a socket of ``listen``.

    Attributes:
        token: the secret that requests must have; "" on the loopback.
        pages_drawn: the number of drawn pages.
    """

    def __init__(self, folders: Sequence[Path], listening: socket.socket) -> None:
        self._folders = list(folders)
        self._listening = listening
        self._host, self._port = listening.getsockname()[:2]
        self._loopback = is_loopback(self._host)
        self.token = "" if self._loopback else secrets.token_urlsafe(24)
        self._cached_state = ""  # of the files when the cached page was drawn
        self._cached_page = ""
        self._drawing = asyncio.Lock()
        self.pages_drawn = 0

    @property
    def url(self) -> str:
        host = self._host
        if host in ("0.0.0.0", "::"):  # all interfaces: no address to open
            host = socket.gethostname()
        if ":" in host:  # IPv6
            host = f"[{host}]"
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host}:{self._port}/{query}"

    async def start(self) -> web.AppRunner:
        """Answer requests until the runner is cleaned up."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._listening).start()
        return runner

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        problem = foreign_origin(host, origin, loopback=self._loopback)
        if problem:
            return web.Response(status=403, text=problem, headers=HEADERS)
        authorization = request.headers.get("Authorization", "")
        token = request.query.get("token") or authorization.removeprefix("Bearer ")
        token_bytes = token.encode(errors="surrogateescape")  # a header may be any bytes
        # In constant time, so that a wrong token does not tell how much of it is right.
        if self.token and not hmac.compare_digest(token_bytes, self.token.encode()):
            return web.Response(
                status=401,
                text="this page needs its token: open the address that was printed, with ?token=...",
                headers=HEADERS,
            )
        answer = await handler(request)
        answer.headers.update(HEADERS)
        return answer

    async def _page(self, request: web.Request) -> web.Response:
        async with self._drawing:
            state = self._state()
            if request.headers.get("If-None-Match") == state:
                return web.Response(status=304)
            if self._cached_state != state:
                # In a thread: requests of Prometheus do not wait for a drawing.
                self._cached_page = await asyncio.to_thread(page, self._folders, live=True)
                self._cached_state = state
                self.pages_drawn += 1
            text = self._cached_page
        return web.Response(text=text, content_type="text/html", headers={"ETag": state})

    async def _metrics(self, _: web.Request) -> web.Response:
        folders = dict(zip(labels(self._folders), self._folders, strict=True))
        text = await asyncio.to_thread(exposition, folders)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text=text, headers=headers)

    def _state(self) -> str:
        """A digest that changes if a page would: of files' times and sizes, and the runs' states."""
        digest = hashlib.sha256()
        for folder in self._folders:
            digest.update(read_status(folder).state.encode())
            for name in READ:
                with suppress(FileNotFoundError):
                    stat = (folder / name).stat()
                    digest.update(f"{name} {stat.st_mtime_ns} {stat.st_size};".encode())
        return f'"{digest.hexdigest()[:32]}"'


def series_name(metric: str) -> str:
    """``reward/mean`` as ``skyasync_reward_mean``."""
    return "skyasync_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def exposition(folders: Mapping[str, Path]) -> str:
    """The newest value of each metric of runs, by the runs' names, in Prometheus' text format."""
    families: dict[str, dict[str, float]] = {}  # series' names, with their labels and values
    meanings: dict[str, str] = {}
    for run, folder in folders.items():
        rows = jsonl.read_rows(folder / "metrics.jsonl")
        escaped = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        label = f'run="{escaped}"'
        newest: dict[str, float] = {}
        for row in rows:
            for name, value in row.items():
                if value is not None:
                    newest[name] = value
        for name, value in sorted(newest.items()):
            series = series_name(name)
            entry = entry_of(name)
            meanings.setdefault(
                series, entry.meaning if entry else f"{name}, of this run's own parts."
            )
            # Two metrics may have one series name: the first one counts.
            families.setdefault(series, {}).setdefault(label, float(value))
        running = families.setdefault("skyasync_running", {})
        running[label] = float(read_status(folder).state == RUNNING)
        for alarm in alarms(rows, jsonl.read_rows(folder / RESTARTS)):
            families.setdefault("skyasync_alarm", {})[f'{label},alarm="{alarm.name}"'] = 1.0
    meanings |= {
        "skyasync_running": "1 during the run.",
        "skyasync_alarm": "1 for each alarm that is raised.",
    }
    lines = []
    for name, values in families.items():
        help_text = meanings[name].replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for series_labels, value in values.items():
            lines.append(f"{name}{{{series_labels}}} {value!r}")
    return "\n".join(lines) + "\n"


async def serve(live: LivePage, until: asyncio.Event) -> None:
    """Answer until the event, SIGTERM or Ctrl-C."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, until.set)
    runner = await live.start()
    try:
        await until.wait()
    finally:
        await runner.cleanup()


@contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """Serve a run's page from a separate process during the block; yields the address.

    The process ends with the block, or with this program: its standard input is a pipe, which ends
    then.
    """
    with listen() as listening:
        url = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        descriptor = listening.fileno()
        command = [sys.executable, "-m", "skyasync.run.live_page", str(folder), str(descriptor)]
        # The process finds the modules that this one finds; "" is the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run
            )
    try:
        yield url
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


async def _of_a_run(folder: Path, listening: socket.socket) -> None:
    until = asyncio.Event()
    # Nothing is ever sent: standard input is readable when the pipe has ended.
    asyncio.get_running_loop().add_reader(0, until.set)
    await serve(LivePage([folder], listening), until)


if __name__ == "__main__":
    os.nice(10)  # drawing pages must not slow the run down
    asyncio.run(_of_a_run(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
