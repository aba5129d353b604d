"""What this machine is said to have."""

from __future__ import annotations

import socket
import sys

import pytest

from skyasync.utils import machine


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("1", 1), ("0,1,2", 2), ("", 0), ("-1", 0)]
)
def test_gpus_that_are_hidden_are_not_counted(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_gpus", lambda: [(80 << 30, "NVIDIA H100")] * 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = machine.this_machine()
    assert (here.gpus, here.gpu_memory, here.card) == (
        (count, 80 << 30, "NVIDIA H100") if count else (0, 0, "")
    )


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for as on Linux")
def test_the_interface_towards_another_node_is_the_one_of_the_route_and_not_of_the_own_name() -> (
    None
):
    assert machine.interface_towards("127.0.0.1") == "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            connection.connect(("192.0.2.1", 9))  # a network for documentation: nothing is sent
        except OSError:
            pytest.skip("this machine has no route to another one")
        address = connection.getsockname()[0]
    name = machine.interface_towards("192.0.2.1")
    assert name not in ("", "lo")
    assert machine.interface_towards(address) == name  # the first rank's own address


def test_without_a_route_no_interface_is_named() -> None:
    assert machine.interface_towards("no-such-host.invalid") == ""
