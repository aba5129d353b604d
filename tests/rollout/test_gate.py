"""No rollout is inside while the gate is closed, and all that wait outside get in."""

from __future__ import annotations

import asyncio

import pytest

from skyasync.rollout.generator_api import RolloutGate


class Visits:
    """Records when rollouts enter and leave, and the number inside while the gate is closed."""

    def __init__(self) -> None:
        self.gate, self.events = RolloutGate(), []

    async def rollout(self, name: str, turns: int) -> None:
        async with self.gate.entered():
            self.events.append(f"+{name}")
            for _ in range(turns):
                await asyncio.sleep(0)
            self.events.append(f"-{name}")

    async def hold(self, name: str, turns: int = 3) -> None:
        async with self.gate.closed():
            self.events.append(f"[{name}")
            for _ in range(turns):
                await asyncio.sleep(0)
            self.events.append(f"{name}]")


async def test_closing_waits_for_rollouts_inside_and_keeps_new_ones_outside() -> None:
    visits = Visits()
    await asyncio.gather(
        visits.rollout("a", 5), visits.rollout("b", 2), visits.hold("x"), visits.rollout("c", 1)
    )
    assert visits.events == ["+a", "+b", "-b", "-a", "[x", "x]", "+c", "-c"]


async def test_an_open_gate_is_passed_in_the_same_turn() -> None:
    visits = Visits()
    await asyncio.gather(visits.rollout("a", 0), visits.rollout("b", 0))
    assert visits.events == ["+a", "-a", "+b", "-b"]


async def test_the_gate_opens_when_the_last_holder_has_gone() -> None:
    visits = Visits()
    await asyncio.gather(visits.hold("x", 1), visits.hold("y", 4), visits.rollout("a", 0))
    assert visits.events == ["[x", "[y", "x]", "y]", "+a", "-a"]


async def test_a_rollout_or_a_holder_that_fails_leaves_the_gate_usable() -> None:
    visits = Visits()
    with pytest.raises(ZeroDivisionError):
        async with visits.gate.entered():
            1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError):
        async with visits.gate.closed():
            1 / 0  # noqa: B018
    async with asyncio.timeout(1):
        await visits.hold("x", 0)
        await visits.rollout("a", 0)
    assert visits.events == ["[x", "x]", "+a", "-a"]
