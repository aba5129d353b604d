"""The plan of hosts that have engines, but not the policy's first rank."""

from __future__ import annotations

import pytest

from skyasync.config.schema import Config
from skyasync.planning.plan import MemoryUse, make_plan
from skyasync.utils.machine import Machine
from tests.planning.test_plan import QWEN_7B, reckoned

GIB = 1 << 30
SHAPE = QWEN_7B
CPU, GPUS = Machine(0, 0, 64 * GIB), Machine(16, 80 * GIB, 1024 * GIB)


def settings(
    backend: str = "transformers", way: str = "shared_memory", address: str = "auto", nodes: int = 1
) -> Config:
    cfg = Config()
    cfg.ray.address, cfg.trainer.placement.policy_num_nodes = address, nodes
    (
        cfg.generator.backend,
        cfg.generator.weight_sync_backend,
        cfg.generator.num_inference_engines,
    ) = backend, way, 4
    return cfg


def host(cfg: Config, machine: Machine) -> MemoryUse | None:
    devices = make_plan(cfg, SHAPE, machine, reckoned()).devices
    return next((place for place in devices if place.name == "host of remote engines"), None)


@pytest.mark.parametrize("machine", [CPU, GPUS], ids=["cpu", "gpus"])
@pytest.mark.parametrize(("backend", "buffers"), [("transformers", 2), ("vllm", 1)])
def test_every_engine_receives_whole_models_in_the_policys_dtype(
    machine: Machine, backend: str, buffers: int
) -> None:
    cfg = settings(backend)
    cfg.trainer.policy.model.dtype, cfg.generator.dtype = "bfloat16", "float32"
    found = host(cfg, machine)
    assert found and found.when == "weight sync"
    assert found.lines["received weights"] == 4 * buffers * 2 * SHAPE.parameters


@pytest.mark.parametrize(
    ("cfg", "machine"),
    [
        (settings(address=""), CPU),
        (settings(address=""), GPUS),
        (settings("vllm", "nccl", nodes=2), GPUS),
        (settings("vllm", "auto", nodes=2), GPUS),
        (settings("vllm", "cuda_ipc", nodes=2), GPUS),
    ],
)
def test_there_is_no_such_host_on_one_node_or_where_weights_go_from_gpu_to_gpu(
    cfg: Config, machine: Machine
) -> None:
    if cfg.generator.weight_sync_backend == "cuda_ipc":
        cfg.trainer.placement.colocate_all = True
    assert host(cfg, machine) is None


def test_engines_of_a_policy_on_one_node_are_on_that_node_and_servers_have_their_own_hosts() -> (
    None
):
    cfg = settings()
    cfg.trainer.placement.colocate_all = True
    assert host(cfg, GPUS) is None
    cfg = settings()
    cfg.generator.engines = ["http://there:8000"]
    assert host(cfg, CPU) is None


def test_the_policys_other_nodes_hold_what_the_first_does_but_what_it_hands_over() -> None:
    devices = {
        place.name: place
        for place in make_plan(settings(address="", nodes=3), SHAPE, GPUS, reckoned()).devices
    }
    first, others = devices["host"], devices["host of remote engines"]
    assert (first.count, others.count) == (1, 2)
    assert (
        others.lines["batch"] == first.lines["batch"]
        and "weights in shared memory" not in others.lines
    )
    assert others.lines["processes"] == first.lines["processes"]


def test_embedded_engines_without_gpus_compute_on_what_they_receive_unless_their_dtype_is_another() -> (
    None
):
    cfg = settings()
    cfg.trainer.policy.model.dtype = "float32"
    shared, there = host(cfg, CPU), host(settings("vllm"), CPU)
    assert shared and "engines: weights" not in shared.lines and shared.lines["engines: cache"]
    assert there and there.lines["engines: weights"] == 4 * 4 * SHAPE.parameters
    cfg.generator.dtype = "bfloat16"
    copied = host(cfg, CPU)
    assert copied and copied.lines["engines: weights"] == 4 * 2 * SHAPE.parameters


def test_of_adapters_alone_the_adapters_are_received_and_of_changes_all_weights_once() -> None:
    cfg = settings()
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.sync = 4, "adapter"
    alone = host(cfg, GPUS)
    assert alone and 0 < alone.lines["received weights"] < 4 * SHAPE.parameters
    cfg = settings()
    cfg.generator.weight_sync_mode = "delta"
    changes = host(cfg, GPUS)
    assert changes and changes.lines["received weights"] == 4 * 2 * SHAPE.parameters
