"""Names, shapes, weights and KV cache of engines, by vLLM's own model without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.plan import QWEN3_8B
from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.settings import engine_config
from skyasync.planning import command, estimate, vllm_report
from skyasync.planning.measure import vllm_request
from skyasync.planning.memory import GIB, EngineMemory
from skyasync.planning.plan import make_plan
from skyasync.planning.shape import read_shape
from skyasync.planning.vllm_report import VLLMReport, ask_vllm
from skyasync.utils.machine import Machine
from tests.inference.backends.vllm.models import save_model
from tests.planning.models import MODELS
from tests.planning.test_plan import EIGHT, QWEN_7B, place, reckoned, settings

CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip
BIG = {"architectures": ["Qwen3ForCausalLM"]} | QWEN3_8B
ENGINE = EngineMemory(weights=0, workspace=0, cache=GIB, least_cache=0, tokens=0)
FORKS = """
import json, os, sys
from skyasync.planning.vllm_model import examine
for name, request in json.load(sys.stdin).items():
    if not (child := os.fork()):
        try: answer = examine(**request)
        except Exception as error: answer = {"unknown": str(error)}
        print(json.dumps({name: answer}), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
pytestmark = [pytest.mark.matrix, pytest.mark.vllm, pytest.mark.slow]


def request(
    folder: Path, config: dict[str, Any], *, gpus: bool = False, **generator: Any
) -> dict[str, Any]:
    """Of a run whose model has this config.json, and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = str(folder), "vllm"
    cfg.trainer.max_prompt_length, cfg.generator.max_model_len = 128, 512
    for name, value in generator.items():
        setattr(cfg.generator, name, value)
    return vllm_request(cfg, ENGINE, read_shape(str(folder)), gpus=gpus)


def tiny(name: str) -> dict[str, Any]:
    return {
        "model_type": name,
        "architectures": [CLASSES[name]],
        "max_position_embeddings": 512,
    } | MODELS[name]


def changed(request: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(request))
    change(copied["specs"])
    return copied


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VLLMReport]:
    """vLLM is imported once."""
    folder = tmp_path_factory.mktemp("configs")
    requests = {name: request(folder / name, tiny(name)) for name in CLASSES}
    layer, key = "model.layers.1.self_attn", "model.layers.1.self_attn.k_proj.weight"
    llama, moe = requests["llama"], requests["qwen3_moe"]
    requests |= {
        "renamed": changed(llama, lambda specs: specs.update({f"{layer}.k.weight": specs.pop(key)})),
        "dropped": changed(llama, lambda specs: specs.pop(f"{layer}.v_proj.weight")),
        "shape": changed(llama, lambda specs: specs.update({"model.norm.weight": ["float32", [63]]})),
        "expert": changed(moe, lambda specs: specs.pop("model.layers.0.mlp.experts.2.up_proj.weight")),
        "quantized": request(folder / "fp8", tiny("llama"), gpus=True, engine_kwargs={"quantization": "fp8"}),
        "two ranks": request(folder / "llama2", tiny("llama"), inference_engine_tensor_parallel_size=2),
        "pipeline": request(folder / "llama3", tiny("llama"), gpus=True, engine_kwargs={"pipeline_parallel_size": 2}),
        "too small": llama | {"cache": 100_000},
        "8B": request(folder / "8B", BIG, gpus=True) | {"share": 60 * GIB},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        answers |= json.loads(line) if line.startswith('{"') else {}
    return {name: VLLMReport(**answer) for name, answer in answers.items()}


@pytest.mark.parametrize("name", [*CLASSES, "two ranks", "8B"])
def test_every_tensor_of_the_trainer_is_taken_and_fills_all_of_vllms(
    name: str, reports: dict[str, VLLMReport]
) -> None:
    report = reports[name]
    assert (report.unknown, report.refused, list(report.missing), report.problem) == (
        "",
        {},
        [],
        "",
    )
    assert report.tensors == {
        "8B": 399,
        "llama": 21,
        "qwen2": 27,
        "qwen3": 24,
        "two ranks": 21,
    }.get(name, report.tensors)


def test_what_a_weight_sync_would_fail_at_is_named(reports: dict[str, VLLMReport]) -> None:
    layer = "model.layers.1.self_attn"
    renamed = reports["renamed"]
    assert list(renamed.refused) == [f"{layer}.k.weight"] and renamed.missing == [
        f"{layer}.qkv_proj.weight"
    ]
    assert (
        f"vLLM does not take {layer}.k.weight (There is no module or parameter named"
        in renamed.problem
    )
    assert "[63]" in reports["shape"].refused["model.norm.weight"]


def test_a_part_of_a_fused_layer_that_no_tensor_fills_is_named(
    reports: dict[str, VLLMReport],
) -> None:
    dropped, expert = reports["dropped"], reports["expert"]
    assert not dropped.refused and dropped.missing == ["model.layers.1.self_attn.qkv_proj.weight"]
    assert (
        not expert.refused
        and len(expert.missing) == 1
        and "layers.0.mlp.experts" in expert.missing[0]
    )


def test_weights_are_those_of_the_model_and_its_rotary_table(
    reports: dict[str, VLLMReport],
) -> None:
    report = reports["8B"]
    scales = 36 * 4 * 4  # of quantized keys and values, four numbers a layer
    assert report.weights == 2 * 8_190_735_360 + 2 * 40_960 * 128 + scales
    assert report.cache == 60 * GIB - report.weights
    assert report.least_cache == 512 * 2 * 36 * 8 * 128 * 2  # keys and values in bfloat16
    assert (
        0
        <= report.cache - report.tokens * report.least_cache // 512
        < 128 * report.least_cache // 512
    )
    llama, halves = reports["llama"], reports["two ranks"]
    assert (
        llama.weights / 2 < halves.weights < 0.6 * llama.weights
        and halves.least_cache == llama.least_cache // 2
    )


def test_what_vllm_cannot_build_here_is_not_called_wrong(reports: dict[str, VLLMReport]) -> None:
    for name in ("quantized", "pipeline"):
        assert reports[name] == VLLMReport(
            "quantized weights, expert parallelism and pipelines need workers on devices"
        )


def test_a_cache_without_room_for_one_sequence_does_not_fit(reports: dict[str, VLLMReport]) -> None:
    report = reports["too small"]
    assert report.tokens == 0 and report.least_cache > report.cache == 100_000


@pytest.mark.matrix
@pytest.mark.timeout(900)
async def test_planned_tokens_of_the_cache_are_those_of_a_real_engine(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = str(tmp_path), "vllm"
    cfg.trainer.max_prompt_length, cfg.generator.max_model_len, cfg.generator.kv_cache_gb = (
        128,
        512,
        0.25,
    )
    plan = estimate(cfg, Machine(0, 0, 64 * GIB)).plan
    engine = VLLMEngine(replace(engine_config(cfg, gpus=False), threads=1))
    await engine.start()
    cache = engine.llm.vllm_config.cache_config
    await engine.shutdown()
    assert cache.num_gpu_blocks and not plan.vllm.problem
    assert plan.engine.tokens == plan.vllm.tokens == cache.num_gpu_blocks * cache.block_size


@pytest.mark.matrix
def test_without_an_answer_the_plan_has_formulas_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "model", tiny("llama"))
    assert ask_vllm(asked, 1, limit_s=0.2).unknown == "vLLM has not answered within 0 s"
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError('No module named vllm')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = ask_vllm(asked, 1)
    assert report == VLLMReport("vLLM's process failed: ModuleNotFoundError: No module named vllm")
    plain, known = (
        make_plan(settings(), QWEN_7B, EIGHT, reckoned(), r)
        for r in (vllm_report.NO_REPORT, report)
    )
    assert plain.engine == known.engine and "names are not checked" in "\n".join(
        command._summary(known, None)
    )


def test_vllms_numbers_replace_the_formulas_and_wrong_names_end_the_plan_with_an_error() -> None:
    report, cfg = (
        VLLMReport("", 2, weights=20 * GIB, cache=30 * GIB, least_cache=GIB, tokens=3000),
        settings(),
    )
    cfg.trainer.policy.gradient_checkpointing = "true"
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned(), report)
    engines = place(plan, "engines")
    assert engines.lines["weights"] == 20 * GIB and plan.engine.least_cache == GIB
    assert plan.engine.tokens == plan.engine.cache * 100 // GIB
    assert command.conclusion(plan, {}) == "fits"
    wrong = replace(plan, vllm=replace(report, refused={"a": "why"}, missing=["b"]))
    assert command.conclusion(wrong, {}).startswith(
        "fits, but weights do not arrive: vLLM does not take a (why); no "
    )


@pytest.mark.matrix
def test_full_size_needs_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AutoConfig.for_model(**BIG).to_dict()))
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = str(tmp_path), "vllm"
    (
        cfg.generator.inference_engine_tensor_parallel_size,
        cfg.trainer.placement.policy_num_gpus_per_node,
    ) = 2, 4
    assert command.show_plan(cfg, command.Options(gpus=8, card="H100", host_memory=1024 * GIB))
    assert (
        "399 tensors of the trainer's weights, all of them taken by vLLM" in capsys.readouterr().out
    )
