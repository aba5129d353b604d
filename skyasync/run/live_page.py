"""The report's page while runs go on, and their newest metrics for Prometheus, from a server on
this machine.

Invariant: the server only reads the runs' folders, so it may start, fail and end without any effect
on a run. A page is drawn when somebody asks and a run has written something since the last one.
Pages of other sites are rejected; a server that other machines can reach answers only requests with
its token. Prometheus gets no series twice, and only names and labels that it accepts.

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
READ = (
    "metrics.jsonl",
    "samples.jsonl",
    "eval_samples.jsonl",
    "status.json",
    "restarts.jsonl",
)  # what changes a page
WAITING_CONNECTIONS = 64
END_S = 10.0  # for a page that is being drawn
LOG = "live_page.log"  # in the run's folder
_SCRIPT = base64.b64encode(hashlib.sha256(LIVE_SCRIPT.encode()).digest()).decode()
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
        UserError: for an address or a port that cannot be had.
    """
    if not 0 <= port < 1 << 16:  # the resolver would take the rest of it
        raise UserError(f"--port {port}: a port is a number up to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=WAITING_CONNECTIONS)
    except OSError as error:
        raise UserError(f"the live page cannot listen at {host}, port {port}: {error}") from error


class LivePage:
    """The pages of some runs on a socket.

    Args:
        folders: of the runs; several are laid over one another.
        listening: as ``listen`` makes it.

    Attributes:
        token: what requests must give; "" on the loopback.
        pages_drawn: how often a page was drawn so far.
    """

    def __init__(self, folders: Sequence[Path], listening: socket.socket) -> None:
        self._folders = list(folders)
        self._listening = listening
        self._host, self._port = listening.getsockname()[:2]
        self._loopback = is_loopback(self._host)
        self.token = "" if self._loopback else secrets.token_urlsafe(24)
        self._cached_page = ("", "")  # the state of the files, and the page of it
        self._drawing = asyncio.Lock()
        self.pages_drawn = 0

    @property
    def url(self) -> str:
        if self._host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        else:
            host = self._host
        token = f"?token={self.token}" if self.token else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/{token}"

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
        token = request.query.get("token") or request.headers.get("Authorization", "").removeprefix(
            "Bearer "
        )
        sent = token.encode(errors="surrogateescape")  # a header may be any bytes
        if self.token and not hmac.compare_digest(sent, self.token.encode()):
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
            if self._cached_page[0] != state:
                self._cached_page = state, await asyncio.to_thread(page, self._folders, live=True)
                self.pages_drawn += 1
        return web.Response(
            text=self._cached_page[1], content_type="text/html", headers={"ETag": state}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await asyncio.to_thread(
            exposition, dict(zip(labels(self._folders), self._folders, strict=True))
        )
        return web.Response(
            text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def _state(self) -> str:
        """Differs as soon as a page would: of files' times and sizes, and of whether the runs'
        processes live."""
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
        newest = {name: value for row in rows for name, value in row.items() if value is not None}
        for name, value in sorted(newest.items()):
            entry = entry_of(name)
            meanings.setdefault(
                series_name(name), entry.meaning if entry else f"{name}, of this run's own parts."
            )
            families.setdefault(series_name(name), {}).setdefault(label, float(value))
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
        lines += [f"{name}{{{labels}}} {value!r}" for labels, value in values.items()]
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
    """Serve a run's page from a process of its own while the block goes on; yields the address.

    The process ends with the block, or with this program, whose end of a pipe it holds.
    """
    with listen() as listening:
        url = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "skyasync.run.live_page",
                    str(folder),
                    str(listening.fileno()),
                ],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[listening.fileno()],
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
    asyncio.get_running_loop().add_reader(0, until.set)  # nothing is ever sent: the pipe has ended
    await serve(LivePage([folder], listening), until)


if __name__ == "__main__":
    os.nice(10)
    asyncio.run(_of_a_run(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
