"""A Tinker server over a real policy and a real engine in this process, and the SDK's own client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import tinker

from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.interop.tinker.experiment import Address, served
from skyasync.weight_sync.sync import WeightSync
from skyasync.workers.dispatch import LocalDispatch
from skyasync.workers.roles import POLICY, ROLES

T = TypeVar("T")
RANK = 8
LENGTH = 64
KEY = "tml-local"

# A sampler made from a handle reports for the life of the process that its server is gone (the SDK cannot close it),
# and its warnings would be read by the test that runs at that time. A filter, since ``propagate = False`` did not hold
# in a run of all tests.
logging.getLogger("tinker.lib.internal_client_holder").addFilter(lambda record: False)


def config(model: str) -> Config:
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.trainer.policy.threads = model, 1
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.alpha = RANK, float(RANK)
    return cfg


@asynccontextmanager
async def tinker_server(model: str, folder: Path, **address: Any) -> AsyncIterator[SimpleNamespace]:
    """``server``, with its ``dispatch``, ``client``, ``turns`` and ``snapshots``; another can resume in the folder."""
    cfg = config(model)
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    worker = replace(ROLES[POLICY], worker="skyasync.interop.tinker.worker:MultiAdapterWorker")
    with mock.patch.dict(ROLES, {POLICY: worker}):
        made: list[LocalDispatch] = [LocalDispatch(cfg)]
        client = InferenceClient(
            [ENGINES["transformers"](EngineConfig(model, threads=1, max_model_len=LENGTH))]
        )
        await client.start()
        weights = WeightSync(made[0], client, ())

        async def replace_ranks(role: str, error: BaseException) -> LocalDispatch:
            await made[-1].shutdown()
            made.append(LocalDispatch(cfg))
            await snapshots.load_again(made[-1])
            return made[-1]

        async with served(
            folder,
            cfg,
            made[0],
            client,
            weights,
            replace_ranks,
            LENGTH,
            Address(**{"port": 0, **address}),
        ) as (server, turns, snapshots):
            yield SimpleNamespace(
                server=server, dispatches=made, client=client, turns=turns, snapshots=snapshots
            )
        await client.shutdown()
        await made[-1].shutdown()


async def with_sdk(server: Any, program: Callable[[Any], T], key: str = KEY) -> T:
    """The result of a program of the SDK, run in a thread: it gets a ``ServiceClient``."""

    def run() -> T:
        service = tinker.ServiceClient(base_url=server.base_url, api_key=key)
        try:
            return program(service)
        finally:
            service.close("success").result()

    with mock.patch.dict(os.environ, {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}):
        return await asyncio.to_thread(run)
