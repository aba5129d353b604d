"""The processes behind the server: the policy's ranks and the engines of a run, without a plan.

Invariant: they are made by the factories of ``BasePPOExp``. Lost ranks are replaced, at most
``trainer.max_restarts`` times an hour, and engines by their supervisor; after that the server ends
with the first error. Accepted requests are in its folder, and the same command continues with them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from skyasync.config.schema import Config
from skyasync.errors import MissingExtraError, UserError
from skyasync.inference.client import InferenceClient
from skyasync.models.config import load_config
from skyasync.observability.run_dir import OWNER_ALONE, RunDirectory, lock_run, unlock_run
from skyasync.preflight.parts import check_parts
from skyasync.preflight.prepare import check_writable, settle_models, settle_references
from skyasync.run.experiment import BasePPOExp
from skyasync.run.recovery import Restarts
from skyasync.weight_sync.sync import WeightSync
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY, ROLES, Role, register_role

try:
    from skyasync.interop.tinker.sampling import SamplingQueue, SnapshotTurns
    from skyasync.interop.tinker.server import KEY_VARIABLE, Address, TinkerServer
    from skyasync.interop.tinker.store import Store
    from skyasync.interop.tinker.training import TrainingQueue
    from skyasync.interop.tinker.worker import PolicyTurns, Replace
except ModuleNotFoundError as error:
    package, _, _ = (error.name or "").partition(".")
    if package not in ("tinker", "google", "pydantic"):
        raise  # a module of the library
    raise MissingExtraError("Tinker's SDK, whose messages the server reads,", "tinker") from error

FOLDER = "tinker"
RANK = 32
"""The rank of adapters if ``trainer.policy.lora.rank`` is not set: the default of clients."""


@asynccontextmanager
async def served(
    folder: Path,
    cfg: Config,
    dispatch: Dispatch,
    client: InferenceClient,
    weights: WeightSync,
    replace_ranks: Replace,
    most_tokens: int,
    address: Address,
) -> AsyncIterator[tuple[TinkerServer, PolicyTurns, SnapshotTurns]]:
    """A server over processes that have started."""
    model = cfg.trainer.policy.model
    store = Store(folder)
    try:
        model_config = load_config(model.path, model.config_kwargs)
        vocabulary = int(model_config.get_text_config().vocab_size)
        turns = PolicyTurns(dispatch, replace_ranks)
        snapshots = SnapshotTurns(store, turns, weights, client)
        server = TinkerServer(
            store,
            TrainingQueue(store, turns, vocabulary, most_tokens),
            SamplingQueue(store, client, snapshots, vocabulary, most_tokens),
            model.path,
            cfg.trainer.policy.lora.rank,
            most_tokens,
            address,
        )
        # The supervisor replaces engines from the first weight sync on.
        async with snapshots.at(""):
            pass
        await server.start()
        watch = asyncio.create_task(turns.watch())
        watch.add_done_callback(turns.task_ended)
        try:
            yield server, turns, snapshots
        finally:
            watch.cancel()
            await server.close()
    finally:
        store.close()


class TinkerExperiment(BasePPOExp):
    """Policy and engines, for clients of the Tinker API.

    Args:
        folder: the folder of the store, which the next server continues.

    Raises:
        UserError: for the first setting that does not fit, before any process starts.
    """

    def __init__(self, cfg: Config, folder: Path, address: Address) -> None:
        super().__init__(cfg)
        self._folder = folder
        self._address = address
        address.check()
        trainer = cfg.trainer
        lora = cfg.trainer.policy.lora
        optimizer = cfg.trainer.policy.optimizer_config
        trainer.placement.colocate_all = False  # clients sample while others train
        if not lora.rank:
            lora.rank = RANK
            lora.alpha = float(RANK)
        if lora.dropout:
            raise UserError(
                "trainer.policy.lora.dropout is not supported here: the protocol's losses have none"
            )
        if optimizer.name != "adamw" or optimizer.bf16_stochastic_round:
            raise UserError(
                f"trainer.policy.optimizer_config.name={optimizer.name} is not supported here: clients set "
                f"AdamW's settings with every step"
            )
        if not cfg.generator.own_engines or cfg.generator.weight_sync_mode == "delta":
            raise UserError(
                "engines of a run's own, which load whole weights, are needed: remove generator.engines, "
                "and generator.weight_sync_mode=delta"
            )
        settle_references(cfg)
        # The checks of a run before its processes start.
        check_parts(cfg, [])
        check_writable("--folder", str(folder))
        settle_models(cfg, [ROLES[POLICY]], own_tokenizer=False)
        worker = "skyasync.interop.tinker.worker:MultiAdapterWorker"
        register_role(replace(ROLES[POLICY], worker=worker))

    def roles(self) -> list[Role]:
        return [ROLES[POLICY]]

    def run(self) -> None:
        """Serve until the process is ended."""
        from skyasync.run.launch import run_without_controller

        self._folder.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
        lock_run(self._folder)
        # A server that runs again in the folder has a new directory for its processes' logs.
        name = f"processes-{uuid4().hex[:8]}"
        run_dir = RunDirectory(self._folder, name)
        self.run_dir = run_dir
        try:
            run_without_controller(self, run_dir, self._serve)
        finally:
            if not run_dir.error.exists():
                run_dir.discard()
            unlock_run(self._folder)

    async def _serve(self) -> None:
        from skyasync.observability.timeline import Timeline

        cfg = self.cfg
        components = self.components
        assert self.run_dir is not None
        budget = Restarts(self.run_dir.path, cfg.trainer.max_restarts, time.time())
        stopped = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
                asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
        try:
            components.placement = await asyncio.to_thread(
                self.get_colocate_pg, cfg.trainer.placement.timeout_s
            )
            components.client = self.get_inference_client()
            components.dispatch = self.get_dispatch()
            # Ranks and engines start at the same time.
            components.share_threads(True)
            await asyncio.gather(components.client.start(), components.dispatch.start())
            components.weight_sync = self.get_weight_sync(
                components.dispatch, components.client, ()
            )
            components.supervisor = self.get_engine_supervisor(
                components.weight_sync, Timeline(None)
            )
            if components.supervisor is not None:
                components.supervisor.begin()

            async def replace_ranks(role: str, error: BaseException) -> Dispatch:
                # New ranks may be lost while they start: each loss takes from the budget.
                while True:
                    if not budget.take(f"a process of the {role}", 0, error):
                        raise error
                    await components.dispatch.shutdown()
                    components.dispatch = await asyncio.to_thread(self.get_dispatch)
                    try:
                        await components.dispatch.start()
                        await snapshots.load_again(components.dispatch)
                        dispatch: Dispatch = components.dispatch
                        return dispatch
                    except Exception as start_error:
                        if components.dispatch.lost is None:
                            raise
                        error = start_error

            most_tokens = self.engine_config().max_model_len
            async with served(
                self._folder,
                cfg,
                components.dispatch,
                components.client,
                components.weight_sync,
                replace_ranks,
                most_tokens,
                self._address,
            ) as (server, turns, snapshots):
                print(f"TINKER_BASE_URL={server.base_url}", flush=True)
                print(f"base_model={cfg.trainer.policy.model.path}", flush=True)
                turns.ended.add_done_callback(lambda _: stopped.set())
                await stopped.wait()
                if turns.ended.done():
                    turns.ended.result()  # raises its error
        finally:
            await self.close()


def serve(cfg: Config, folder: str, host: str, port: int) -> TinkerExperiment:
    """The experiment, which ``run`` serves; the key is in the environment."""
    address = Address(host, port, os.environ.get(KEY_VARIABLE, ""))
    path = Path(folder or FOLDER).expanduser()
    return TinkerExperiment(cfg, path.resolve(), address)
