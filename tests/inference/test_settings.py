"""The engines' settings: pure functions of the configuration and of whether there are GPUs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.config import load_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.settings import (
    chosen_backend,
    chosen_engine,
    computes_on_mapped_weights,
    engine_config,
    engines_per_device,
    maps_weights,
    weight_sync_backend,
)
from skyasync.run.placement import plan_slots
from skyasync.workers.roles import roles_with_ranks

SERVER = "generator.engines=[http://127.0.0.1:8000]"
ADAPTER = ["trainer.policy.lora.rank=4", "trainer.policy.lora.sync=adapter"]


def config(
    *,
    backend: str = "vllm",
    asked: str = "auto",
    shared: bool = False,
    engines: int = 1,
    ranks: int = 1,
) -> Config:
    cfg = Config()
    cfg.generator.backend, cfg.generator.weight_sync_backend = backend, asked
    cfg.trainer.placement.colocate_all, cfg.generator.num_inference_engines = shared, engines
    cfg.trainer.placement.policy_num_gpus_per_node = ranks
    return cfg


@pytest.mark.parametrize(
    ("cfg", "gpus", "expected", "said"),
    [
        (config(), True, "nccl", "auto is nccl: weights go to the engines from GPU to GPU"),
        (
            config(shared=True),
            True,
            "cuda_ipc",
            "auto is cuda_ipc: engines read the weights on the GPUs that they share with the policy",
        ),
        (config(shared=True, asked="shared_memory"), True, "shared_memory", ""),
        (config(shared=True, asked="cuda_ipc"), True, "cuda_ipc", ""),
        (
            config(backend="transformers"),
            True,
            "shared_memory",
            "the transformers engine has no other way",
        ),
        (
            config(),
            False,
            "shared_memory",
            "auto is shared_memory: mapped memory, which the vllm engine loads",
        ),
        (
            config(backend="transformers"),
            False,
            "shared_memory",
            "shared_memory: mapped memory, on which the engines",
        ),
        (config(asked="shared_memory"), True, "shared_memory", ""),
        (config(asked="nccl"), True, "nccl", ""),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_vllm_has_gpus_of_its_own(
    cfg: Config, gpus: bool, expected: str, said: str
) -> None:
    assert weight_sync_backend(cfg, gpus=gpus) == expected
    line = chosen_backend(cfg, gpus=gpus)
    assert said in line
    assert bool(line) == bool(said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["generator.backend=vllm"], "mapped memory, which the vllm engine loads"),
        (["generator.backend=transformers"], "mapped memory, on which the engines compute"),
        (
            ["generator.backend=transformers", "generator.dtype=bfloat16"],
            "engines copy (generator.dtype=bfloat16",
        ),
        ([SERVER, "generator.weight_sync_dir=/shared/w"], "a file of the weights in /shared/w"),
        ([SERVER], "a file of the weights in memory of this machine"),
        (
            ["generator.backend=vllm", "generator.weight_sync_mode=delta"],
            "a file of what has changed",
        ),
        (["generator.backend=vllm", *ADAPTER], "a file of the adapters alone"),
        (
            ["generator.backend=transformers", "ray.address=auto"],
            "compute; engines on other nodes get theirs by broadcast",
        ),
    ],
)
def test_a_run_says_by_what_its_weights_travel(overrides: list[str], said: str) -> None:
    line = chosen_backend(load_config(overrides), gpus=False)
    assert line.startswith("generator.weight_sync_backend=auto is shared_memory: ") and said in line
    assert ("other nodes" in line) == ("ray.address=auto" in overrides)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("allowed_token_ids", list(range(1025)), "1025 tokens: on a GPU vLLM takes at most 1024"),
        (
            "logit_bias",
            {str(token): 1.0 for token in range(1025)},
            "1025 tokens: on a GPU vLLM takes at most 1024",
        ),
        ("stop_token_ids", list(range(129)), "129 tokens: with min_tokens vLLM takes at most 128"),
    ],
)
def test_lists_that_would_end_vllm_on_a_gpu_are_rejected_before_it_starts(
    name: str, value: object, limit: str
) -> None:
    cfg = Config()
    cfg.generator.backend = "vllm"
    cfg.generator.sampling_params.min_tokens = 1
    setattr(cfg.generator.sampling_params, name, value)
    with pytest.raises(UserError, match=rf"generator\.sampling_params\.{name} has {limit}"):
        engine_config(cfg, gpus=True)
    engine_config(cfg, gpus=False)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["generator.backend=transformers"], "transformers (generator.backend)"),
        ([SERVER], "vllm_server (generator.engines: 1)"),
    ],
)
def test_a_run_names_its_engine_and_why_it_is_this_one(overrides: list[str], line: str) -> None:
    assert chosen_engine(load_config(overrides)) == line


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (True, "vllm (generator.backend=auto: vLLM is installed)"),
        (False, "transformers (generator.backend=auto: vLLM is not installed)"),
    ],
)
def test_auto_names_what_decides(
    installed: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyasync.config.schema.sampling.find_spec", lambda name: installed or None)
    cfg = Config()
    assert chosen_engine(cfg) == line
    cfg.generator.num_inference_engines = 0
    assert chosen_engine(cfg) == ""


@pytest.mark.parametrize(
    ("backend", "mode", "rank", "sync", "maps", "computed_on"),
    [
        ("transformers", "full", 0, "merged", True, True),
        ("transformers", "full", 4, "merged", True, True),
        ("transformers", "delta", 0, "merged", False, False),
        ("transformers", "full", 4, "adapter", False, False),
        ("vllm", "full", 0, "merged", True, False),
        ("vllm", "delta", 0, "merged", False, False),
    ],
)
def test_weights_that_are_modified_are_not_shared(
    backend: str, mode: str, rank: int, sync: str, maps: bool, computed_on: bool
) -> None:
    cfg = config(backend=backend)
    cfg.generator.weight_sync_mode, cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.sync = (
        mode,
        rank,
        sync,
    )
    assert (maps_weights(cfg), computes_on_mapped_weights(cfg)) == (maps, computed_on)
    cfg.generator.engines = ["http://127.0.0.1:8000"]
    assert not maps_weights(cfg), "a server may belong to anybody"


@given(engines=st.integers(1, 9), ranks=st.integers(1, 4), shared=st.booleans())
def test_engines_that_share_a_device_divide_the_memory_they_may_take(
    engines: int, ranks: int, shared: bool
) -> None:
    cfg = config(shared=shared, engines=engines, ranks=ranks)
    slots = plan_slots(cfg, gpus=True, roles=roles_with_ranks(cfg))
    crowded = max(Counter(slots.by_role["engines"]).values())
    assert engines_per_device(cfg) == crowded
    each = engine_config(cfg, gpus=True).gpu_memory_utilization
    assert crowded * each == pytest.approx(cfg.generator.gpu_memory_utilization)


def test_tokens_per_step_are_at_least_a_token_for_every_sequence() -> None:
    cfg = config()
    assert engine_config(cfg, gpus=True).max_num_batched_tokens == 0
    cfg.generator.max_num_batched_tokens = 16_384
    assert engine_config(cfg, gpus=True).max_num_batched_tokens == 16_384
    cfg.generator.max_num_batched_tokens = 1_000
    with pytest.raises(
        UserError, match=r"max_num_batched_tokens=1000 is less than generator\.max_num_seqs=1024"
    ):
        engine_config(cfg, gpus=True)
