"""Makes the committed ``uv.lock``: names, versions and markers only, no addresses and no file lists.

    python .ci/lock.py            lock again within pyproject.toml, then strip
    python .ci/lock.py --strip    strip what is there (after ``uv run`` has filled in this machine's index)
    python .ci/lock.py --check    fail if the lock in the last commit names an address
    python .ci/lock.py --check-staged    the same of what the next commit would hold

uv takes the versions of a stripped lock as preferences and fills in the addresses of whatever package index
the user's machine has, so the lock serves mirrors and offline registries alike.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "uv.lock"


def strip(text: str) -> str:
    """The lock without addresses, hashes and file lists."""
    text = re.sub(r'source = \{ registry = "[^"]*" \}', 'source = { registry = "index" }', text)
    text = re.sub(r"^sdist = \{.*\}\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^wheels = \[\n(?:    .*\n)*\]\n", "", text, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    if arguments in (["--check"], ["--check-staged"]):
        at = "HEAD" if arguments == ["--check"] else ""
        committed = subprocess.run(
            ["git", "show", f"{at}:uv.lock"], capture_output=True, text=True, check=True
        ).stdout
        if "://" in committed:
            print(
                "uv.lock as committed names an address; run: python .ci/lock.py --strip, and commit it again"
            )
            return 1
        return 0
    if arguments != ["--strip"]:
        subprocess.run(["uv", "lock"], cwd=LOCK.parent, check=True)
    LOCK.write_text(strip(LOCK.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
