"""Ranks connect at addresses that only this machine can reach."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from skyasync.config.schema import Config
from skyasync.workers.model_worker import LOOPBACK, ModelWorker

LISTENING = "0A"


def addresses_listening_on(port: int) -> list[str]:
    """In the kernel's notation, of IPv4 and IPv6."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    addresses = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return [address for address, number in addresses if int(number, 16) == port]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_the_rendezvous_listens_on_the_loopback_only() -> None:
    first = ModelWorker(Config(), rank=0, world_size=2, role="policy")
    port = first.open_rendezvous(LOOPBACK)
    assert addresses_listening_on(port) == [socket.inet_aton(LOOPBACK)[::-1].hex().upper()]
    dist.TCPStore(LOOPBACK, port, 2, is_master=False).set("found", "yes")
    assert first._store.get("found") == b"yes"
