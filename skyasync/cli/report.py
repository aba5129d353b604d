"""``skyasync report RUN [RUN ...]``: the arguments, and what is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from skyasync.cli.commands import take_options, whole_number
from skyasync.errors import UserError

HELP = """\
usage: skyasync report RUN [RUN ...] [--out FILE.html] [--every SECONDS]
       skyasync report RUN [RUN ...] --live [--host ADDRESS] [--port PORT]

Writes report.html to a run's folder, a page without scripts or network access. For several runs it writes
comparison.html to the current folder. A run writes its report at its end (trainer.report).

--out    another file
--every  write the page again every SECONDS during the run; the browser reloads it
--live   serve the page at a free port of 127.0.0.1 instead; it updates itself, and /metrics is for Prometheus
--host   serve to other machines; the printed address then contains a token
"""
COMPARISON = "comparison.html"


def report(argv: Sequence[str]) -> None:
    """Write the page, and print its path."""
    options, names = take_options(
        argv,
        {"--out": "page.html", "--every": "30", "--host": "0.0.0.0", "--port": "9100"},
        ("--live",),
    )
    every_s = 0.0
    if "--every" in options:
        try:
            every_s = float(options["--every"])
        except ValueError:
            every_s = 0.0
        if not 0 < every_s < float("inf"):
            raise UserError(f"--every {options['--every']}: not a number of seconds above 0")
    folders = [Path(name) for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}: name a run's folder, for example runs/NAME (skyasync runs)"
            )
        if not any((folder / file).is_file() for file in ("metrics.jsonl", "config.yaml")):
            raise UserError(
                f"{folder} is not a run's folder: it has neither metrics.jsonl nor config.yaml"
            )
    if not folders:
        raise UserError("skyasync report needs the folder of a run: skyasync report runs/NAME")
    if "--live" in options:
        other = options.keys() & {"--out", "--every"}
        if other:
            raise UserError(
                f"{min(other)} has no effect with --live: the page is served, not written"
            )
        _serve(folders, options.get("--host", ""), options.get("--port", "0"))
        return
    other = options.keys() & {"--host", "--port"}
    if other:
        raise UserError(f"{min(other)} needs --live")
    from skyasync.observability.jsonl import replace_text
    from skyasync.observability.report.page import NAME, page
    from skyasync.observability.run_dir import read_status

    path = Path(options.get("--out") or (folders[0] / NAME if len(folders) == 1 else COMPARISON))
    while True:
        over = all(read_status(folder).over for folder in folders)
        try:
            replace_text(path, page(folders, refresh_s=every_s))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
        print(path, flush=True)
        if over or not every_s:
            return
        time.sleep(every_s)


def _serve(folders: Sequence[Path], host: str, port: str) -> None:
    """Serve the page until Ctrl-C."""
    from skyasync.run.live_page import LOOPBACK, LivePage, listen, serve

    live = LivePage(folders, listen(host or LOOPBACK, whole_number(port, "--port", 0)))
    print(f"live page: {live.url}\nCtrl-C ends it.", flush=True)
    asyncio.run(serve(live, asyncio.Event()))
