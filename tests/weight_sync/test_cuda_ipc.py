"""Weights by CUDA IPC, without a GPU: two ranks, a real vLLM engine, host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm import setup
from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.interface import EngineConfig
from skyasync.weight_sync.tensors import bytes_of, chunks_of, specs_of, sum_of
from skyasync.weight_sync.transfers import cuda_ipc
from skyasync.weight_sync.transfers.cuda_ipc import (
    CudaIPCSender,
    CudaIPCTransfer,
    Packed,
    message,
    own_part,
)
from skyasync.weight_sync.update import BROKEN_OFF, PART_BYTES, WeightUpdate, is_whole
from skyasync.workers.policy import PolicyWorker
from tests.weight_sync import cpu_ipc
from tests.workers.processes import Rank, Ranks

CHUNK = 30_000
PROBES = [[5, 6, 7, 8, 9, 10, 11], list(range(2, 90))]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    odd = torch.randn(7, 3, generator=generator).bfloat16()
    return {
        "odd": odd,
        "wide": torch.randn(9, generator=generator),
        "one": torch.tensor(3),
        "none": torch.zeros(0, 2),
    }


class Tensors:
    """In place of ``FullTensors``, with several dtypes."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.specs, self._weights = specs_of(weights), weights

    def __iter__(self):
        return iter(self._weights.items())


def test_parts_are_small_unless_a_tensor_is_large_and_no_tensor_lies_where_it_cannot_be_looked_at() -> (
    None
):
    specs = {f"{i}": (torch.bfloat16, (size,)) for i, size in enumerate([8, 24, 1, 100, 1])}
    assert chunks_of(specs, 64) == [["0", "1"], ["2"], ["3"], ["4"]]
    for part in chunks_of(specs_of(weights()), 64):
        ends = [
            sum(bytes_of(specs_of(weights())[name]) for name in part[:i]) for i in range(len(part))
        ]
        assert all(
            end % weights()[name].itemsize == 0 for name, end in zip(part, ends, strict=True)
        )


def test_a_model_of_8b_takes_few_parts() -> None:
    """Each part costs one call of the ranks and three of the engines."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = {name: (torch.bfloat16, tuple(p.shape)) for name, p in model.named_parameters()}
    assert len(chunks_of(specs, PART_BYTES)) <= 20
    assert max(p.numel() for p in model.parameters()) * 2 > PART_BYTES, (
        "no more memory than one tensor takes anyway"
    )


@pytest.mark.parametrize("engines", [[], [1], [0, 2]])
def test_a_rank_packs_part_after_part_and_exports_its_buffer_once_per_colocated_engine(
    monkeypatch, engines
) -> None:
    exports: list[torch.Tensor] = []
    monkeypatch.setattr(cuda_ipc, "PART_BYTES", 32)
    monkeypatch.setattr(
        cuda_ipc, "handle_of", lambda buffer: exports.append(buffer) or {"gpu": f"{len(exports)}"}
    )
    sent = weights()
    sender = CudaIPCSender(lambda: Tensors(sent), 0, torch.device("cpu"))  # type: ignore[arg-type,return-value]
    sender.begin([engines])
    found: dict[str, torch.Tensor] = {}
    last = False
    while not last:
        packed = sender.pack()
        last, end = packed.last, 0
        assert [own["handle"]["gpu"] for own in packed.engines.values()] == [
            str(i + 1) for i in range(len(engines))
        ]
        for name, dtype, shape, size in zip(
            packed.names, packed.dtype_names, packed.shapes, packed.sizes, strict=True
        ):
            if exports:
                piece = exports[0][end : end + size].clone()
                found[name] = piece.view(getattr(torch, dtype)).view(shape)
                end += size
        for own in packed.engines.values():
            assert own["sums"] == [int(sum_of(found[name])) for name in packed.names]
    assert len(exports) == len(engines)
    assert not engines or all(torch.equal(found[name], sent[name]) for name in sent)
    sender.end()


def test_a_sum_shows_every_element_and_its_place() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        tensor = torch.arange(4, 60).to(dtype).view(7, 8)
        other, swapped = tensor.clone(), tensor.flatten()[torch.arange(56).roll(1)].view(7, 8)
        other[3, 4] += 1
        assert len({int(sum_of(each)) for each in (tensor, other, swapped)}) == 3
        assert int(sum_of(tensor.T)) == int(sum_of(tensor.T.contiguous()))


def test_an_engine_gets_its_own_handle_and_one_without_a_colocated_rank_is_rejected() -> None:
    ranks = [
        Packed(
            0, True, ["a"], ["float32"], [[1]], [4], {e: {"handle": {"gpu": str(e)}, "sums": [e]}}
        )
        for e in (0, 1)
    ]
    info = message(ranks)
    assert own_part(info, 1) == {"part": 0, "last": True, "names": ["a"], "dtype_names": ["float32"],
                                 "shapes": [[1]], "sizes": [4], "handle": {"gpu": "1"}, "sums": [1]}  # fmt: skip
    with pytest.raises(RuntimeError, match=r"engine 2.*weight_sync_backend=shared_memory"):
        own_part(info, 2)
    assert own_part(BROKEN_OFF, 2) == BROKEN_OFF
    assert [is_whole(WeightUpdate(1, "cuda_ipc", i)) for i in (info, info | {"last": False}, BROKEN_OFF)] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.vllm
def test_a_part_goes_through_vllms_own_messages_without_a_pickle(monkeypatch) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from skyasync.weight_sync.transfers.vllm_worker import ipc_update_info

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    buffer = torch.arange(4, dtype=torch.uint8)
    handle = cpu_ipc.share(buffer)
    packed = Packed(
        0, True, ["a"], ["float32"], [[1]], [4], {0: {"handle": handle, "sums": [-(2**62)]}}
    )
    sent = own_part(message([packed]), 0)
    came = MsgpackDecoder().decode(MsgpackEncoder().encode({"update_info": sent}))["update_info"]
    assert came == sent
    theirs = ipc_update_info(came)
    (arguments,) = theirs.ipc_handles.values()  # type: ignore[union-attr]
    assert cpu_ipc.opened(*arguments).tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda _: (None, arguments))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: type("Properties", (), {"uuid": handle["gpu"]}),
    )
    assert cuda_ipc.handle_of(torch.zeros(4)) == handle, "torch's arguments survive the round trip"


class Policy:
    """Two ranks of a real policy."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    async def call(self, method: str, *args: object) -> list[Any]:
        return await asyncio.to_thread(self._ranks.call, ask, method, args)

    async def call_first(self, method: str, *args: object) -> object:
        return (await self.call(method, *args))[0]


def ask(rank: Rank, method: str, args: tuple[Any, ...]) -> Any:
    if rank.rank and args[1:] in (("prove",), ("free",)):  # of the first rank alone
        return None
    return getattr(rank.worker, method)(*args)


def step(rank: Rank, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in rank.worker.backend.model.parameters():
            local = getattr(parameter, "_local_tensor", parameter)
            local += 0.02 * torch.randn(local.shape)


@pytest.mark.matrix
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True])
async def test_a_vllm_engine_computes_with_what_two_ranks_hand_it_in_parts(
    engines_session: None,
    fork_socket: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
) -> None:
    from tests.inference.backends.vllm.models import save_model

    save_model(tmp_path, tied=tied)
    monkeypatch.setattr(setup, "WORKER_EXTENSION", "tests.weight_sync.cpu_ipc.WorkerExtension")
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = str(tmp_path), "vllm"
    ranks = Ranks(2, fork_socket)
    engine = VLLMEngine(EngineConfig(
        str(tmp_path), max_model_len=256, max_num_seqs=64, threads=1, kv_cache_gb=0.25, weight_sync_backend="cuda_ipc"
    ))  # fmt: skip
    try:
        ranks.set_up(PolicyWorker, cfg)
        ranks.call(cpu_ipc.in_rank, CHUNK)
        await engine.start()
        policy = Policy(ranks)
        transfer = CudaIPCTransfer(policy, 2, lambda: [0])

        async def hand_over(version: int, most: int = 1000) -> int:
            parts, taken = transfer.parts(await transfer.publish(version)), 0
            async for part in parts:
                await engine.update_weights(part)
                taken += 1
                assert engine.version == (version if part.info["last"] else version - 1)
                if taken == most:
                    break
            await parts.aclose()
            return taken

        async def gap() -> float:
            found = await engine.score(PROBES)
            expected = await policy.call_first("score", PROBES)
            return max(
                abs(a - b)
                for e, f in zip(expected, found, strict=True)
                for a, b in zip(e, f, strict=True)
            )

        assert await gap() < 1e-4
        for version in (1, 2):
            ranks.call(step, version)
            assert await gap() > 1e-2
            assert await hand_over(version) > 3
            assert await gap() < 1e-4

        ranks.call(step, 3)
        await hand_over(3, most=2)
        await engine.update_weights(WeightUpdate(3, "cuda_ipc", BROKEN_OFF))
        assert engine.version == 2
        await hand_over(3)
        assert await gap() < 1e-4, "the interrupted transfer is forgotten"

        ranks.call(step, 4)
        alone = await transfer.for_late_engine(4)
        await engine.update_weights(alone)
        await transfer.release(alone)
        assert await gap() < 1e-4, "as a late-joining engine does"

        parts = transfer.parts(await transfer.publish(5))
        part = await anext(parts)
        part.info["engines"][0]["sums"][0] += 1
        with pytest.raises(Exception, match="received other weights than the trainer sent in "):
            await engine.update_weights(part)
        await parts.aclose()
    finally:
        ranks.close()
        await engine.shutdown()
