"""``skyasync report RUN [RUN ...]``: a page about runs, as a file or served."""

from __future__ import annotations

import asyncio
import contextlib
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
    values = {"--out": "page.html", "--every": "30", "--host": "0.0.0.0", "--port": "9100"}
    options, names = take_options(argv, values, ("--live",))
    every_s = 0.0
    if "--every" in options:
        with contextlib.suppress(ValueError):  # it stays 0, which is rejected too
            every_s = float(options["--every"])
        if not 0 < every_s < float("inf"):
            raise UserError(f"--every {options['--every']}: not a number of seconds above 0")
    folders = [Path(name) for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}: name a run's folder, for example runs/NAME (skyasync runs)"
            )
        if not (folder / "metrics.jsonl").is_file() and not (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder} is not a run's folder: it has neither metrics.jsonl nor config.yaml"
            )
    if not folders:
        raise UserError("skyasync report needs the folder of a run: skyasync report runs/NAME")
    if "--live" in options:
        useless_options = options.keys() & {"--out", "--every"}
        if useless_options:
            raise UserError(
                f"{min(useless_options)} has no effect with --live: the page is served, not written"
            )
        _serve(folders, options.get("--host", ""), options.get("--port", "0"))
        return
    useless_options = options.keys() & {"--host", "--port"}
    if useless_options:
        raise UserError(f"{min(useless_options)} needs --live")
    from skyasync.observability.jsonl import replace_text
    from skyasync.observability.report.page import NAME, page
    from skyasync.observability.run_dir import read_status

    default = folders[0] / NAME if len(folders) == 1 else COMPARISON
    path = Path(options.get("--out") or default)
    while True:
        # Before the page is made: the last page then has the end of each run.
        over = all(read_status(folder).over for folder in folders)
        try:
            replace_text(path, page(folders, refresh_s=every_s))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
        print(path, flush=True)  # flushed, for a program that waits for the first page
        if over or not every_s:
            return
        time.sleep(every_s)


def _serve(folders: Sequence[Path], host: str, port: str) -> None:
    """Serve the page until Ctrl-C."""
    from skyasync.run.live_page import LOOPBACK, LivePage, listen, serve

    live = LivePage(folders, listen(host or LOOPBACK, whole_number(port, "--port", 0)))
    print(f"live page: {live.url}\nCtrl-C ends it.", flush=True)
    asyncio.run(serve(live, asyncio.Event()))
