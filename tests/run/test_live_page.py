"""The live page's server: its responses, its access rules, and that it ends with its run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession

from benchmarks.screenshots import ask, browser
from skyasync.errors import UserError
from skyasync.run.live_page import LivePage, listen
from tests.observability.report.folders import make_run, metrics

Serve = Callable[..., Awaitable[LivePage]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners = []

    async def start(*folders: Path, host: str = "127.0.0.1") -> LivePage:
        live = LivePage(folders, listen(host))
        runners.append(await live.start())
        return live

    yield start
    for runner in runners:
        await runner.cleanup()


def log_step(folder: Path, row: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.mark.matrix
async def test_the_page_is_of_what_is_written_now_and_drawn_once_for_it(
    tmp_path: Path, serve: Serve
) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    async with ClientSession() as browser:
        url = (await serve(folder)).url
        async with browser.get(url) as first:
            text, seen = await first.text(), first.headers["ETag"]
        assert "No alarms." in text and "<script>" in text and "<svg" in text
        async with browser.get(url, headers={"If-None-Match": seen}) as same:
            assert same.status == 304
        for step in range(4, 18):
            log_step(folder, {**metrics(step), "off_policy/effective_sample_size": 0.2})
        async with browser.get(url, headers={"If-None-Match": seen}) as later:
            text = await later.text()
            assert later.status == 200 and later.headers["ETag"] != seen
        assert "The effective sample size is 20% of the tokens" in text and "No alarms." not in text
        assert "trainer.max_staleness" in text


async def test_the_newest_samples_come_first(tmp_path: Path, serve: Serve) -> None:
    async with (
        ClientSession() as browser,
        browser.get((await serve(make_run(tmp_path / "run"))).url) as page,
    ):
        text = await page.text()
    at = [text.index(f"<h3>step {step}</h3>") for step in (12, 11, 10)]
    assert at == sorted(at) and "<h3>step 9</h3>" not in text


async def test_several_runs_are_laid_over_one_another(tmp_path: Path, serve: Serve) -> None:
    live = await serve(make_run(tmp_path / "one"), make_run(tmp_path / "two"))
    async with ClientSession() as browser, browser.get(live.url) as page:
        text = await page.text()
    assert "2 runs compared" in text and "<script>" in text


async def test_a_run_without_a_step_has_a_page(tmp_path: Path, serve: Serve) -> None:
    async with ClientSession() as browser, browser.get((await serve(tmp_path)).url) as page:
        assert page.status == 200
        assert "No step has been logged yet." in await page.text()


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_other_sites_read_nothing(
    tmp_path: Path, serve: Serve, header: dict[str, str]
) -> None:
    async with (
        ClientSession() as browser,
        browser.get((await serve(tmp_path)).url, headers=header) as page,
    ):
        assert page.status == 403
        assert "svg" not in await page.text()


async def test_other_machines_need_the_token(tmp_path: Path, serve: Serve) -> None:
    live = await serve(make_run(tmp_path / "run"), host="0.0.0.0")
    port = live.url.rpartition(":")[2].partition("/")[0]
    base = f"http://127.0.0.1:{port}"
    assert live.token in live.url and len(live.token) > 24
    async with ClientSession() as browser:
        for path in ("/", "/metrics", "/?token=", "/?token=wrong", "/?token=%E2%82%AC"):
            async with browser.get(base + path) as refused:
                assert refused.status == 401
                assert live.token not in await refused.text()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        async with browser.get(f"{base}/?token={live.token}") as page:
            assert page.status == 200
        async with browser.get(
            f"{base}/metrics", headers={"Authorization": f"Bearer {live.token}"}
        ) as page:
            assert page.status == 200


async def test_prometheus_gets_the_newest_value_of_each_metric(
    tmp_path: Path, serve: Serve
) -> None:
    live = await serve(make_run(tmp_path / "one"), make_run(tmp_path / "two"))
    async with ClientSession() as browser, browser.get(f"{live.url}metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await answer.text()
    assert 'skyasync_step{run="one"} 12.0' in text and 'skyasync_eval_score{run="two"} 0.6' in text


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with (
        listen() as taken,
        pytest.raises(UserError, match=r"the live page cannot listen at 127\.0\.0\.1, port"),
    ):
        listen(port=taken.getsockname()[1])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="there is no chromium here: apt-get install chromium")
async def test_the_browser_shows_what_is_new_by_itself(tmp_path: Path, serve: Serve) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    live = await serve(folder)
    shown = asyncio.create_task(
        asyncio.to_thread(ask, live.url, "--dump-dom", "--virtual-time-budget=9000")
    )
    while not live.pages_drawn:  # noqa: ASYNC110  (the browser asks)
        await asyncio.sleep(0.05)
    for step in range(4, 18):
        log_step(folder, {**metrics(step), "idle/engines": 0.95})
    text = await shown
    assert "The engines are idle 95% of the time" in text and "No alarms." not in text
    assert live.pages_drawn >= 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["block", "kill"])
def test_the_server_of_a_run_ends_with_it(tmp_path: Path, end: str) -> None:
    program = f"""
import os, signal, urllib.request
from pathlib import Path
from skyasync.run.live_page import live_page
with live_page(Path({str(tmp_path)!r})) as url:
    assert b"No step has been logged yet" in urllib.request.urlopen(url, timeout=60).read()
    print(url, flush=True)
    if {end == "kill"}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    port = int(done.stdout.rpartition(":")[2].strip("/\n"))
    for _ in range(300):
        try:
            listen(port=port).close()
        except UserError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"port {port} is still listened at")
