"""The documentation's pictures of a run's page, taken in a real browser without a window (Debian:
chromium).

    uv run -m benchmarks.screenshots runs/NAME [--live] [--out docs]

Writes report.png (light, 1280 px wide), report-dark.png and report-phone.png (500 px wide); with
--live those of the live page, live-page.png and so on.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOTS = (("", 1280, 1500, False), ("-dark", 1280, 1500, True), ("-phone", 500, 1500, False))


def browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def ask(
    page: Path | str, *flags: str, width: int = 1280, height: int = 900, dark: bool = False
) -> str:
    """Open a page, a file or an address; returns what the browser prints.

    Raises:
        FileNotFoundError: if there is no browser.
        RuntimeError: with its output, if it fails.
    """
    program = browser()
    if program is None:
        raise FileNotFoundError(
            f"no browser here (one of {', '.join(BROWSERS)}): apt-get install chromium"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--force-device-scale-factor=1", f"--user-data-dir={profile}", f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=2000", *flags,
            page if isinstance(page, str) else page.resolve().as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{program} failed on {page}: {done.stderr[-500:]}")
    return done.stdout


def shoot(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """A picture of the upper part of a page."""
    ask(page, f"--screenshot={picture.resolve()}", width=width, height=height, dark=dark)


def _shrink(picture: Path) -> None:
    """256 colours: a third of the bytes, without a visible difference."""
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(256)
    small.save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    from skyasync.observability.report.page import page

    name = "live-page" if given.live else "report"
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "page.html"
        # Without its script, which would look for the server of the page.
        made.write_text(
            re.sub(r"<script>.*?</script>", "", page([given.run], live=given.live), flags=re.DOTALL)
        )
        for suffix, width, height, dark in SHOTS:
            picture = given.out / f"{name}{suffix}.png"
            shoot(made, picture, width, height, dark=dark)
            _shrink(picture)
            print(picture)


if __name__ == "__main__":
    main()
