"""vLLM's own arguments: ``generator.engine_kwargs`` is checked before a model loads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.options import (
    RESERVED,
    check_options,
    reserved_options,
    without_adapters,
)
from skyasync.inference.backends.vllm.setup import check_adapters, engine_arguments
from skyasync.inference.interface import EngineConfig

pytestmark = pytest.mark.vllm

RIGHT = [
    {"enforce_eager": True},
    {"quantization": "fp8"},
    {"quantization": None},
    {"enable_prefix_caching": False, "block_size": 16},
    {"pipeline_parallel_size": 2},
    {"enable_expert_parallel": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    {"enable_lora": True, "max_loras": 1},
    {"cpu_offload_gb": 2},
    {"kv_cache_dtype": "fp8"},
    {"load_format": "safetensors"},
    {"attention_backend": "CPU_ATTN"},
    {"compilation_config": {"mode": 0}},
]


def config(options: dict[str, object]) -> Config:
    cfg = Config()
    cfg.generator.backend, cfg.generator.engine_kwargs = "vllm", options
    return cfg


@pytest.mark.parametrize("options", RIGHT)
def test_any_argument_of_vllm_is_taken_and_reaches_it(options: dict[str, object]) -> None:
    check_options(options)
    assert list(reserved_options(options)) == []
    told = engine_arguments(EngineConfig("m", extra={"engine_kwargs": options}), cpu=True)
    assert {name: told[name] for name in options} == options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"enforce_eagre": True},
            "engine_kwargs.enforce_eagre is not an argument of vLLM's AsyncEngineArgs: did you mean",
        ),
        ({"enforce_eager": 1}, "engine_kwargs.enforce_eager=1 must be bool, found int"),
        ({"block_size": "many"}, "engine_kwargs.block_size='many' must be int | None, found str"),
        (
            {"max_model_len": 9},
            "engine_kwargs.max_model_len is not taken: use generator.max_model_len",
        ),
        (
            {"quantization": "fp99"},
            "engine_kwargs.quantization='fp99' is not a value that vLLM accepts: did you mean fp8",
        ),
        (
            {"kv_cache_dtype": "fp99"},
            "engine_kwargs.kv_cache_dtype='fp99' is not a value that vLLM accepts: did you mean fp8",
        ),
        (
            {"mm_encoder_tp_mode": "x"},
            "mm_encoder_tp_mode='x' is not a value that vLLM accepts: it is one of weights, data",
        ),
        (
            {"speculative_config": {"methd": "ngram"}},
            "config.methd is not a setting of vLLM: did you mean method",
        ),
        (
            {"speculative_config": {"method": "ngrm"}},
            "config.method='ngrm' is not a value that vLLM accepts",
        ),
        (
            {"compilation_config": {"levl": 3}},
            "engine_kwargs.compilation_config.levl is not a setting of vLLM",
        ),
        (
            {"load_format": "dummy"},
            "load_format='dummy' is not taken: the engine would compute with random",
        ),
        ({"trust_remote_code": True}, "no code of a model's folder is run"),
    ],
)
def test_a_wrong_one_is_refused_with_what_is_right(options: dict[str, object], said: str) -> None:
    """Arguments that a run has a setting for are rejected before anything starts, all others when an engine starts."""
    problems = check_config(config(options))
    if not problems:
        with pytest.raises(UserError) as error:
            check_options(options)
        problems.append(str(error.value))
    (problem,) = problems
    assert said in problem


def test_reserved_arguments_are_those_of_vllm_and_are_known_without_it() -> None:
    code = (
        "import sys; from skyasync.inference.backends.vllm.options import RESERVED, reserved_options as r; "
        "print(*r({'seed': 3, 'load_format': 'dummy'}), sep='\\n'); print('vllm' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = ran.stdout.splitlines()
    assert len(lines) == 2 and imported == "False"
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(RESERVED) <= {field.name for field in fields(AsyncEngineArgs)}


@pytest.mark.parametrize(
    ("architecture", "able"),
    [
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),
        ("Phi3ForCausalLM", True),
        ("GPT2LMHeadModel", False),
    ],
)
def test_a_model_takes_adapters_if_vllms_class_says_so(architecture: str, able: bool) -> None:
    assert (without_adapters([architecture]) == "") is able


def test_a_model_without_adapters_is_refused_when_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    check_adapters(EngineConfig(str(tmp_path)))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*trainer\.policy\.lora\.sync=merged"):
        check_adapters(EngineConfig(str(tmp_path), extra={"adapter_rank": 4}))


def test_what_vllm_does_not_list_is_left_to_it() -> None:
    assert without_adapters(["Mine"]) == without_adapters([]) == ""


def test_stages_of_a_pipeline_count_as_devices() -> None:
    cfg = config({"pipeline_parallel_size": 2})
    cfg.generator.inference_engine_tensor_parallel_size = 2
    assert cfg.generator.devices_per_engine == 4
    cfg.trainer.placement.colocate_all = True
    assert any(
        "pipeline" in problem or "tensor_parallel" in problem for problem in check_config(cfg)
    )
