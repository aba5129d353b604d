"""Streams of a vLLM engine: sent as it generates, recorded as generated, and ended when the client stops reading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tests.agents.endpoints import real_endpoint
from tests.agents.test_streaming import (
    quick,
    test_a_stream_says_in_pieces_what_the_engine_makes_and_the_record_is_whole,
    test_who_breaks_off_a_stream_ends_the_call_and_what_was_read_is_recorded,
)

__all__ = [
    "quick",
    "test_a_stream_says_in_pieces_what_the_engine_makes_and_the_record_is_whole",
    "test_who_breaks_off_a_stream_ends_the_call_and_what_was_read_is_recorded",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(model: str, tokenizer: Any, engines_session: None) -> AsyncIterator[SimpleNamespace]:
    async with real_endpoint(model, tokenizer, "vllm") as found:
        yield found
