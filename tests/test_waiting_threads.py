"""Threads that wait for work use no CPU time."""

import os
import subprocess
import sys


def started(code: str, **env: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = f"import os, sys; import skyasync; {code}; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_openmp_is_told_to_wait_passively_before_torch_is_loaded_unless_the_user_says_otherwise():
    assert started("pass") == "passive False"
    assert started("pass", OMP_WAIT_POLICY="active") == "active False"
