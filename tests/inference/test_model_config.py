"""``config_kwargs``: trainer and engine use the same changed model, exports contain it, and mistakes are rejected."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.server import VLLMServerEngine
from skyasync.inference.backends.vllm.setup import engine_arguments
from skyasync.inference.interface import EngineConfig
from skyasync.inference.settings import engine_config
from skyasync.models.config import complaints, load_config, overrides, overrides_of
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.roles import ROLES
from tests.inference.tiny_llama import save_tiny_llama
from tests.weight_sync.policy_and_engine import running

PROBE = [[*range(1, 200)], [7, 200, 31, 5] * 40]
SCALED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 777.0}
KEY = "trainer.policy.model.config_kwargs"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


def test_older_names_of_rotary_settings_reach_the_place_where_the_model_reads_them(model):
    base = {"rope_theta": 10000.0, "rope_type": "default"}
    for said, expected in (
        ({"rope_theta": 5}, base | {"rope_theta": 5.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        ),
        (SCALED, {"rope_theta": 777.0, "rope_type": "yarn", "factor": 4.0}),
        ({"rope_parameters": {"rope_theta": 9.0}}, base | {"rope_theta": 9.0}),
    ):
        assert overrides_of(model, said) == {"rope_parameters": expected}
        assert expected.items() <= load_config(model, said).rope_parameters.items()
    assert overrides_of(model, {}) == {}
    assert overrides(GPT2Config(), {"max_position_embeddings": 7, "n_inner": 3}) == {
        "n_positions": 7,
        "n_inner": 3,
    }
    assert load_config(model, {"rms_norm_eps": 0.5}).rms_norm_eps == 0.5
    assert load_config(model, {}).to_dict() == AutoConfig.from_pretrained(model).to_dict()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (
            {"rope_teta": 1.0},
            f"{KEY}.rope_teta is no setting of LlamaConfig: did you mean rope_theta",
        ),
        ({"hidden_size": 8}, "would need other weights"),
        ({"dtype": "float32"}, "use trainer.policy.model.dtype"),
        (
            {"rope_scaling": {"rope_type": "yarrn", "factor": 2.0}},
            "unknown rope_type 'yarrn': did you mean yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": 2.0}, "must be settings"),
        ({"rms_norm_eps": "small"}, "expected float, got str"),
    ],
)
def test_a_slip_is_one_line_before_the_start(model, said, problem):
    (line,) = complaints(model, said, "trainer.policy.model")
    assert problem in line and "\n" not in line and line.startswith(KEY)


def test_right_settings_are_not_complained_of(model):
    assert not list(
        complaints(model, {**SCALED, "max_position_embeddings": 64}, "trainer.policy.model")
    )


def test_engines_and_roles_of_the_same_model_follow_the_policy(model):
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.trainer.policy.model.config_kwargs = (
        model,
        {"rope_theta": 5.0},
    )
    cfg.trainer.ref.model.path, cfg.trainer.teacher.model.path = model, "another"
    assert [ROLES[name].config_kwargs(cfg) for name in ("policy", "reference", "critic", "teacher")] == [
        {"rope_theta": 5.0}, {"rope_theta": 5.0}, {"rope_theta": 5.0}, {},
    ]  # fmt: skip
    engine = engine_config(cfg, gpus=False)
    assert engine_arguments(engine, cpu=True)["hf_overrides"] == overrides_of(
        model, {"rope_theta": 5.0}
    )
    cfg.trainer.policy.model.config_kwargs = {"max_position_embeddings": 32}
    cfg.trainer.max_prompt_length = cfg.generator.sampling_params.max_generate_length = 8
    assert engine_config(cfg, gpus=False).max_model_len == 32


def test_a_server_must_have_been_started_with_the_same(model):
    said = {
        "max_model_len": 64,
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
        "hf_overrides": {},
    }
    info = {
        "model_config": said,
        "weight_transfer_config": {"backend": "shared_memory"},
        "parallel_config": {
            "worker_extension_cls": "skyasync.weight_sync.transfers.vllm_worker.WorkerExtension"
        },
    }
    config = EngineConfig(model, max_model_len=64, extra={"config_kwargs": {"rope_theta": 5.0}})
    line = VLLMServerEngine.complaint("http://x", {"vllm_config": info}, config)
    assert "--hf-overrides {}" in line and '"rope_theta": 5.0' in line
    said["hf_overrides"] = overrides_of(model, {"rope_theta": 5.0})
    assert not VLLMServerEngine.complaint("http://x", {"vllm_config": info}, config)


@pytest.mark.parametrize("said", [{"rope_theta": 50.0}, SCALED], ids=["theta", "yarn"])
async def test_trainer_and_engine_compute_the_same_changed_model_and_export_says_it(
    model, said, tmp_path
):
    async with running("transformers", model, "float32", PROBE) as pair:
        (plain,) = await pair.client.score(PROBE)
    extra = {"config_kwargs": said}
    async with running(
        "transformers", model, "float32", PROBE, config_kwargs=said, extra=extra
    ) as pair:
        (changed,) = await pair.client.score(PROBE)
        assert max(abs(a - b) for a, b in zip(plain[0], changed[0], strict=True)) > 0.01, (
            "it is another model"
        )
        pair.step(1e-3)
        await pair.hand_over()
        assert (await pair.verify())["sync/logprob_gap_mean"] < 2e-5
        worker: PolicyWorker = pair.dispatch._policy
        worker.export(str(tmp_path))
    saved = json.loads((Path(tmp_path) / "config.json").read_text())["rope_parameters"]
    assert overrides_of(model, said)["rope_parameters"].items() <= saved.items()


def test_the_library_itself_would_not_have_taken_it(tmp_path):
    """The reason for ``load_config``; if this test fails, ``load_config`` may be obsolete."""
    LlamaConfig().save_pretrained(tmp_path)
    assert (
        AutoConfig.from_pretrained(tmp_path, rope_theta=5.0).rope_parameters["rope_theta"]
        == 10000.0
    )
