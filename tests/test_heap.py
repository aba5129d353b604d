"""A process that requested it keeps freed memory until it returns it."""

import ctypes
import os
import subprocess
import sys

import pytest

from skyasync.heap import use_fixed_segments

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="C's library is not GNU's"
)

PAGES = 8192
SCRIPT = f"""
import resource
from pathlib import Path
from skyasync.heap import give_back, keep_freed

def faulted():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (4096 * {PAGES})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held():
    return int(Path("/proc/self/statm").read_text().split()[1])

given_back = faulted()
keep_freed()
faulted()
again, before = faulted(), held()
give_back()
print(given_back, again, before - held())
"""


def test_what_is_freed_is_allocated_again_without_new_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    given_back, again, returned = map(int, done.stdout.split())
    assert again < 100 < PAGES // 2 < min(given_back, returned)


@pytest.mark.parametrize(
    ("setting", "remaining"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        ("max_split_size_mb:64, expandable_segments:False", "max_split_size_mb:64"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_a_policy_whose_memory_engines_map_has_no_expandable_segments(
    setting: str, remaining: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    use_fixed_segments()
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == remaining
