"""The groups of a broadcast: each sender with the receivers, and the receivers of a node.

```
one node, or one receiver per node              several nodes
sender s ──▶ every receiver                     sender s ──▶ one receiver of each node, its leader ──▶ the node's others
```

Invariant: each of several nodes receives every byte once. Bytes of different senders come by
different receivers: of n on a node, the one numbered s modulo n is the leader of sender s. Nodes
are told apart by the names of their hosts. If these are not unique, or differ within a machine, the
weights take another way, and arrive as well.

All members start the broadcasts of all groups in the order of the chunks, so that none waits for
one that a member starts later. ``most_in_flight`` chunks are on their way: while one is passed on
in the node and loaded, and while the next one is gathered.

A failure closes what the member is in, by which its other groups fail in the members that wait for
it. A broadcast that is in flight meanwhile cannot be interrupted in gloo: it ends when its sender
sends or closes, or after ``timeout_s``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from socket import gethostname
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from skyasync.errors import headline
from skyasync.weight_sync.update import TransferInterruptedError

POLL_S = 0.005  # short compared to a weight sync
POLLS_PER_S = 10_000  # of all members together, which one process answers


class TensorGroup:
    """Any error of a group closes all of them and is a ``TransferInterruptedError``.

    Args:
        store: of the first sender; what is written to it for these groups is under their ``name``.
        rendezvous: how the other members find the first sender, as it travels in a message.
        sender: this member's number among the senders; None is a receiver.
    """

    def __init__(
        self,
        store: TCPStore,
        rendezvous: Mapping[str, Any],
        device: torch.device,
        sender: int | None = None,
    ) -> None:
        self._store = PrefixStore(rendezvous["name"], store)
        self.rendezvous = dict(rendezvous)
        self._device = device
        self.senders = len(rendezvous["senders"])
        self._sender = sender
        self._joined = False
        self.most_in_flight = max(2, self.senders)
        self._groups: dict[int, Any] = {}  # by sender, the groups that this member is in
        self._in_flight: dict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)  # by senders
        self._node: Any = None  # the group of the node
        self._node_size = 1

    def join(self) -> None:
        """Wait for all members, once."""
        if self._joined:
            return
        try:
            self._meet()
            self._joined = True
            return
        except Exception as error:
            reason = headline(error)
        # Outside the clause: the error's traceback would keep the group and its connections alive.
        self._fail(reason)

    def _meet(self) -> None:
        receivers = self.rendezvous["receivers"]
        host = gethostname()
        number = 0  # of this receiver, or of its node if there are several nodes
        position = 0  # of this receiver on its node
        if self._sender is None:
            number = self._count("receivers", 1) - 1
            position = self._count(f"on {host}", 1) - 1
            if position == 0:
                node_number = self._count("nodes", 1) - 1
                self._store.set(f"number of {host}", str(node_number))
        # Last: who sees all members joined reads the final counts.
        self._count("joined", 1)
        size = self.senders + receivers
        until = time.monotonic() + self.rendezvous["timeout_s"]
        while True:
            if self._store.check(["interrupted"]):
                raise RuntimeError("another member has failed")
            if self._count("joined") == size:
                break
            if time.monotonic() > until:
                raise TimeoutError(
                    f"not all members of the group joined within {self.rendezvous['timeout_s']:g} s"
                )
            time.sleep(max(POLL_S, size / POLLS_PER_S))
        nodes = self._count("nodes")
        tree = nodes > 1
        # With several nodes one receiver of each, its leader.
        members = 1 + (nodes if tree else receivers)
        if self._sender is not None:
            self._groups[self._sender] = self._connect(f"sender {self._sender}", 0, members)
            return
        if tree:
            number = int(self._store.get(f"number of {host}"))
            self._node_size = self._count(f"on {host}")
        for sender in range(self.senders):
            if sender % self._node_size == position or not tree:
                self._groups[sender] = self._connect(f"sender {sender}", 1 + number, members)
        if self._node_size > 1:
            self._node = self._connect(f"node {number}", position, self._node_size)

    def _count(self, counter: str, increment: int = 0) -> int:
        return int(self._store.add(counter, increment))

    def _connect(self, name: str, rank: int, size: int) -> Any:  # noqa: ANN401  (NCCL's or gloo's)
        store = PrefixStore(name, self._store)
        timeout = timedelta(seconds=self.rendezvous["timeout_s"])
        if self._device.type == "cuda":
            # Imported here: builds of torch without CUDA lack it.
            from torch.distributed import ProcessGroupNCCL

            # A rank of the policy sees one GPU, whose number it does not name.
            if self._device.index is not None:
                torch.cuda.set_device(self._device)
            options: Any = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(store, rank, size, options)
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo  # its stub lacks the options
        options = gloo._Options()
        options._timeout = timeout
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        # Loopback is for ranks on one node, and engines may be on others.
        if interface not in ("", "lo", "lo0"):
            options._devices = [gloo.create_device(interface=interface)]
        else:
            address = self.rendezvous["host"]
            if self._sender != 0:
                # A machine may have several addresses: take the one on the way to the first sender.
                sender_address = (address, self.rendezvous["port"])
                with socket.create_connection(sender_address, timeout=10) as connection:
                    address = connection.getsockname()[0]
            options._devices = [gloo.create_device(hostname=str(address))]
        return gloo(store, rank, size, options)

    def start(self, sender: int, tensor: Tensor) -> None:
        """Start the sender's next broadcast, of or into the tensor."""
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            if not self._groups and self._node is None:
                raise RuntimeError("the group has been closed")
            work = None  # of a sender whose chunks come from another receiver of this node
            if sender in self._groups:
                work = self._groups[sender].broadcast([tensor], options)
            self._in_flight[sender].append((work, tensor))
            return
        except Exception as error:
            reason = headline(error)
        self._fail(reason)

    def finish(self, sender: int) -> Tensor:
        """Wait for the sender's earliest broadcast in flight, and pass it on in the node.

        Returns:
            Its tensor, which may be used.
        """
        options = BroadcastOptions()
        _, tensor = self._in_flight[sender][0]
        options.rootRank = sender % self._node_size  # the sender's leader on this node
        try:
            self._wait(sender)
            if self._node is not None:
                self._node.broadcast([tensor], options).wait()
            return tensor
        except Exception as error:
            reason = headline(error)
        self._fail(reason)  # outside the clause, as in ``join``

    def _wait(self, sender: int) -> None:
        work, _ = self._in_flight[sender].popleft()
        if work is not None:
            work.wait()

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise TransferInterruptedError(f"the broadcast of weights was interrupted: {reason}")

    def close(self) -> None:
        """Close the connections, by which the other members see it. Safe to call twice."""
        with suppress(Exception):  # the first sender's process has ended
            self._store.set("interrupted", "")  # for members that still join
        self._close(self._node)
        self._node = None
        # Idle groups first: a broadcast in flight in gloo can only be waited for.
        for sender in sorted(self._groups, key=self._in_flight_count):
            while self._in_flight[sender] and self._device.type != "cuda":
                with suppress(Exception):  # the wait is all that counts here
                    self._wait(sender)
            self._close(self._groups.pop(sender))
        self._in_flight.clear()

    def _in_flight_count(self, sender: int) -> int:
        return len(self._in_flight[sender])

    def _close(self, group: Any) -> None:  # noqa: ANN401
        # A gloo group closes its connections with the last reference to it.
        if group is not None and self._device.type == "cuda":
            group.abort()


def meet(
    former: TensorGroup | None,
    rendezvous: Mapping[str, Any],
    device: torch.device,
    sender: int | None = None,
) -> TensorGroup:
    """The former groups if they have this rendezvous; else close them and make new ones.

    Raises:
        TransferInterruptedError: if the first sender has left.
    """
    if former is not None:
        if former.rendezvous == rendezvous:
            return former
        former.close()
    try:
        store = _connected(rendezvous, rendezvous["timeout_s"])
        return TensorGroup(store, rendezvous, device, sender)
    except Exception as error:
        raise TransferInterruptedError(
            f"the sender of weights is not there: {headline(error)}"
        ) from None


def _connected(rendezvous: Mapping[str, Any], timeout_s: float) -> TCPStore:
    """The first sender's store. Raises OSError at once if the sender's process has ended."""
    host = rendezvous["host"]
    port = rendezvous["port"]
    # ``TCPStore`` would try again until its limit.
    socket.create_connection((host, port), timeout=timeout_s).close()
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def interrupt(rendezvous: Mapping[str, Any]) -> None:
    """Let members that wait for others to join stop waiting. For any process."""
    store = PrefixStore(rendezvous["name"], _connected(rendezvous, 10.0))
    store.set("interrupted", "")


async def interrupt_soon(rendezvous: Mapping[str, Any]) -> None:
    with suppress(Exception):  # the process of the sender has ended, and no member waits for it
        await asyncio.to_thread(interrupt, rendezvous)
