"""Remote engines, without a server: settings, the server's properties, and how its answers are converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.cli.serve import command_line
from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.server import (
    ARGUMENTS,
    BACKEND,
    VLLMServerEngine,
    cache_share,
)
from skyasync.inference.backends.vllm.setup import WORKER_EXTENSION, sampling_fields
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from skyasync.inference.remote import RemoteRequest, check_servers, versions_of
from skyasync.run.placement import plan_slots, share_threads
from skyasync.workers.roles import roles_with_ranks

CONFIG = EngineConfig("model", dtype="float32", max_model_len=512)
URL = "http://127.0.0.1:1"


def info(**changed: object) -> dict:
    model = {"logprobs_mode": "processed_logprobs", "max_model_len": 512, "dtype": "torch.float32"}
    settings = {
        "model_config": {k: changed.get(k, v) for k, v in model.items()},
        "weight_transfer_config": {"backend": changed.get("backend", BACKEND)},
        "parallel_config": {"worker_extension_cls": changed.get("extension", WORKER_EXTENSION)},
    }
    return {"vllm_config": settings}


def test_a_server_that_is_fit_has_nothing_against_it() -> None:
    assert VLLMServerEngine.complaint(URL, info(), CONFIG) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"backend": "nccl"}, "backend nccl"),
        ({"extension": ""}, "takes no weights"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 256}, "--max-model-len 512"),
        ({"dtype": "torch.bfloat16"}, "--dtype float32"),
    ],
)
def test_what_keeps_a_server_from_being_an_engine_is_one_line(changed: dict, said: str) -> None:
    problem = VLLMServerEngine.complaint(URL, info(**changed), CONFIG)
    assert said in problem and URL in problem and "\n" not in problem


def test_a_server_that_is_not_there_or_no_address_is_refused(tmp_path: Path) -> None:
    for urls, folder, said in (
        ([URL], "", "does not answer .*skyasync serve"),
        (["localhost:8000"], "", "is not the address of a server"),
        ([URL], str(tmp_path / "none"), "weight_sync_dir=.*is not a writable folder"),
    ):
        with pytest.raises(UserError, match=said):
            check_servers(urls, CONFIG, folder)


def with_engines() -> Config:
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.engines = "model", [URL]
    return cfg


def test_a_run_with_servers_starts_no_engine_of_its_own() -> None:
    cfg = with_engines()
    assert not check_config(cfg)
    assert backend(cfg) == "vllm_server"
    slots = plan_slots(cfg, gpus=False, roles=roles_with_ranks(cfg))
    assert slots.by_role["engines"] == () and len(slots.bundles) == 1
    assert share_threads(cfg, 2, overlap=True)[0] == 2, "the policy has the cores"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "vllm"),
        ("num_inference_engines", 2),
        ("max_num_seqs", 8),
        ("kv_cache_gb", 2.0),
        ("weight_sync_backend", "nccl"),
        ("inference_engine_tensor_parallel_size", 2),
        ("engine_kwargs", {"enforce_eager": True}),
    ],
)
def test_what_a_server_was_started_with_is_not_said_by_the_run(key: str, value: object) -> None:
    cfg = with_engines()
    setattr(cfg.generator, key, value)
    assert any(f"generator.{key}=" in line for line in check_config(cfg))


def test_a_backend_of_servers_without_servers_is_refused() -> None:
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = "model", "vllm_server"
    assert any("needs generator.engines=" in line for line in check_config(cfg))
    cfg.generator.engines = [URL]
    assert not check_config(cfg)


def test_versions_are_of_this_run_or_none() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert versions_of(spans, 4).tolist() == [3, 3, 4, 4]  # type: ignore[union-attr]
    assert versions_of([{"version": "default", "start": 0, "end": 2}], 2) is None
    assert versions_of(spans, 6) is None and versions_of(None, 1) is None
    assert versions_of([], 0).tolist() == []  # type: ignore[union-attr]


def test_progress_has_one_version_also_after_an_update() -> None:
    request = RemoteRequest(GenerationRequest("r", [1], SamplingParams()), 7)
    request.receive([5], [-1.0])
    request.receive([5], [-1.0])
    progress = request.progress()
    assert (
        progress is not None
        and progress.token_ids.tolist() == [5, 5]
        and progress.versions.tolist() == [7, 7]
    )
    request.certain = 2
    request.receive([5], [-1.0])
    assert request.progress() is None


def test_how_full_a_cache_is_stands_among_the_metrics_of_a_server() -> None:
    lines = [
        "# TYPE vllm:kv_cache_usage_perc gauge",
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
    ]
    assert (
        cache_share(
            "\n".join([*lines, 'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 7.5e-1', ""])
        )
        == 0.5
    )
    assert cache_share("") is None


def test_sampling_is_told_as_json() -> None:
    told = sampling_fields(
        SamplingParams(stop=("a",), logit_bias={3: 1.0}, top_k=-1, seed=5), json=True
    )
    assert json.loads(json.dumps(told)) == told
    assert (told["stop"], told["logit_bias"], told["top_k"], told["seed"]) == (
        ["a"],
        {"3": 1.0},
        0,
        5,
    )
    assert told["detokenize"] is True and "bad_words" not in told


def test_a_server_is_started_with_what_its_check_asks_for() -> None:
    words = command_line("model", ["--port", "1"], cpu=False)
    assert words[:2] == ["--model", "model"] and words[-2:] == ["--port", "1"]
    assert set(ARGUMENTS) <= set(words) and "" not in words
