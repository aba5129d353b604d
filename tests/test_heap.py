"""A process that requested it keeps freed memory until it returns it."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="C's library is not GNU's")

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
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    given_back, again, returned = map(int, done.stdout.split())
    assert again < 100 < PAGES // 2 < min(given_back, returned)
