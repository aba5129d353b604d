"""Progress of requests that continue while an engine is asked for it."""

from __future__ import annotations

import asyncio

from skyasync.inference.inflight import InflightRequest, InflightTable
from skyasync.inference.interface import GenerationOutput, GenerationRequest, SamplingParams
from skyasync.inference.router import Charge


def piece(name: str) -> InflightRequest:
    return InflightRequest(
        GenerationRequest(name, [1], SamplingParams()),
        name,
        asyncio.get_running_loop().create_future(),
        0,
    )


def output_of(name: str, *tokens: int) -> GenerationOutput:
    return GenerationOutput(name, list(tokens), [0.0] * len(tokens), [0] * len(tokens))


async def test_what_began_while_an_engine_was_asked_is_heard_of_from_its_first_token() -> None:
    """Streams ask engines often; the progress of other requests in the same report must not be lost."""
    unanswered = InflightTable()
    old = unanswered["old"] = piece("old")
    asked = unanswered.at(0)
    unanswered["new"] = piece("new")
    unanswered.receive(asked, [output_of("old", 5), output_of("new", 6), output_of("gone", 7)])
    unanswered.receive(unanswered.at(0), [output_of("new", 8)])
    assert old.so_far.token_ids.tolist() == [5]
    assert unanswered.so_far(["new"])["new"].token_ids.tolist() == [6, 8]


async def test_progress_that_may_belong_to_an_earlier_request_of_the_same_name_is_ignored() -> None:
    for asked, leaving in (({"a": piece("a")}, set[str]()), ({}, {"a"})):
        unanswered = InflightTable()
        unanswered["a"] = piece("a")
        unanswered.receive(asked, [output_of("a", 5)], leaving)
        unanswered.receive(unanswered.at(0), [output_of("a", 6)])
        assert not len(unanswered["a"].so_far.token_ids)


async def test_a_heartbeat_costs_no_look_at_the_requests_of_other_engines(monkeypatch) -> None:
    table = InflightTable()
    for index, name in enumerate("abcd"):
        table[name] = InflightRequest(
            GenerationRequest(name, [1], SamplingParams()),
            name,
            asyncio.get_running_loop().create_future(),
        )
        table.send(table[name], Charge(index % 2, 1.0))
    with monkeypatch.context() as patch:
        patch.setattr(InflightTable, "items", None)
        assert set(table.at(0)) == {"a", "c"} and table.at(7) == {}
    del table["a"]
    assert set(table.at(0)) == {"c"} and set(table) == {"b", "c", "d"}
