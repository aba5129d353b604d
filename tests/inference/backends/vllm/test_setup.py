"""How vLLM is started: its arguments and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.backends.vllm.setup import engine_arguments, prepare_environment
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from tests.inference.backends.vllm.models import save_model


def test_an_engine_over_several_devices_starts_its_workers_itself() -> None:
    """Ray's executor rejects a bundle of several GPUs. vLLM chooses for one device; on a GPU that is one process."""
    assert (
        engine_arguments(EngineConfig("m", tensor_parallel_size=2), cpu=False)[
            "distributed_executor_backend"
        ]
        == "mp"
    )
    assert "distributed_executor_backend" not in engine_arguments(EngineConfig("m"), cpu=False)


@pytest.mark.parametrize("cpu", [False, True])
def test_tokens_per_step_are_said_and_never_left_to_vllm(cpu: bool) -> None:
    def batched_tokens(**settings: int) -> int:
        return engine_arguments(EngineConfig("m", **settings), cpu=cpu)["max_num_batched_tokens"]

    assert batched_tokens() == 8192
    assert batched_tokens(max_num_seqs=10_000) == 10_000
    assert batched_tokens(max_num_batched_tokens=4096) == 4096
    long = batched_tokens(max_model_len=20_000)
    assert long == (20_000 if cpu else 8192), "vLLM computes prompts whole on a CPU"


@pytest.mark.parametrize(("threads", "workers", "each"), [(8, 1, "8"), (8, 4, "2"), (2, 4, "1")])
def test_the_workers_of_an_engine_divide_its_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, workers: int, each: str
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "before")
    prepare_environment(EngineConfig("m", threads=threads, tensor_parallel_size=workers))
    assert os.environ["OMP_NUM_THREADS"] == each


def test_on_a_gpu_the_dtype_follows_the_policy_and_not_the_files() -> None:
    assert engine_arguments(EngineConfig("m"), cpu=False)["dtype"] == "bfloat16"
    assert engine_arguments(EngineConfig("m", dtype="float32"), cpu=False)["dtype"] == "float32"


@pytest.mark.parametrize(("requests", "captured"), [(512, None), (1024, 1024), (4096, 1024)])
def test_full_batches_of_a_gpu_run_as_graphs(requests: int, captured: int | None) -> None:
    """vLLM captures graphs of up to 512 requests on most GPUs."""
    arguments = engine_arguments(EngineConfig("m", max_num_seqs=requests), cpu=False)
    expected = {"max_cudagraph_capture_size": captured} if captured else None
    assert arguments.get("compilation_config") == expected
    assert "compilation_config" not in engine_arguments(EngineConfig("m"), cpu=True)
    own = {"engine_kwargs": {"compilation_config": {"level": 0}}}
    config = EngineConfig("m", max_num_seqs=requests, extra=own)
    assert engine_arguments(config, cpu=False)["compilation_config"] == {"level": 0}


@pytest.mark.parametrize("float32", [False, True])
def test_the_head_has_the_dtype_of_the_trainers(float32: bool) -> None:
    config = EngineConfig("m", extra={"float32_head": float32})
    overrides = engine_arguments(config, cpu=False)["hf_overrides"]
    assert overrides.get("head_dtype") == ("float32" if float32 else None)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", None)])
def test_float32_attention_is_not_computed_in_tf32(
    monkeypatch: pytest.MonkeyPatch, dtype: str, precision: str | None
) -> None:
    for name in ("TRITON_F32_DEFAULT", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    prepare_environment(EngineConfig("m", dtype=dtype))
    assert os.environ.get("TRITON_F32_DEFAULT") == precision


@pytest.mark.matrix
@pytest.mark.vllm
@pytest.mark.slow
async def test_the_first_prompt_in_bfloat16_may_be_short(
    engines_session: None, tmp_path: Path
) -> None:
    """On processors with tile registers (AMX), which a process must ask Linux for."""
    save_model(tmp_path, tied=True)
    engine = VLLMEngine(
        EngineConfig(
            str(tmp_path),
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=4,
            threads=1,
            kv_cache_gb=0.1,
        )
    )
    await engine.start()
    try:
        request = GenerationRequest(
            "short", [2, 3, 4], SamplingParams(max_tokens=4, ignore_eos=True)
        )
        answers = [output async for outputs in engine.generate([request]) for output in outputs]
        assert [len(answer.token_ids) for answer in answers] == [4]
    finally:
        await engine.shutdown()
