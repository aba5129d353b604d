"""Measured memory and operations of ranks, by the settings that change them. Models have few layers, all measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.plan import CASES, QWEN3, Case, loop_peak, planned
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.packing import MicroBatches
from skyasync.models.rank_memory import WEIGHTS, RankUse
from skyasync.planning.measure import measure
from skyasync.planning.memory import FLOAT32, GIB
from skyasync.planning.shape import read_shape
from skyasync.workers.roles import POLICY, ROLES
from tests.models.tiny_vision import save_tiny
from tests.planning.models import configuration

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def settings(folder: Path, name: str = "llama", **changes: Any) -> Config:
    path = folder / f"{name}{changes}"
    configuration(name, **changes).save_pretrained(path)
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.trainer.policy.model.dtype = str(path), "bfloat16"
    cfg.trainer.micro_batch_tokens, cfg.trainer.max_prompt_length = 256, 32
    cfg.generator.sampling_params.max_generate_length = 96
    cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = 8, 2
    cfg.trainer.policy.gradient_checkpointing = False
    return cfg


def policy(cfg: Config, ranks: int = 4) -> RankUse:
    return measure(cfg, ROLES[POLICY], ranks, gpus=True)


def peak(lines: dict[str, int]) -> int:
    return sum(lines.values())


def test_a_rank_needs_what_torchs_tracker_counts_in_a_hand_written_fsdp2_loop() -> None:
    """With all layers; the plan measures two and three."""
    model = QWEN3 | {
        "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    case = Case("small", model, ranks=4, prompt=64, response=448)
    assert peak(planned(case).updating) == pytest.approx(loop_peak(case, 7), rel=0.02)
    assert not dist.is_initialized()


@pytest.mark.matrix
def test_weights_gradients_and_optimizer_state_are_divided_by_the_ranks_that_shard_them(
    folder: Path,
) -> None:
    cfg = settings(folder)
    parameters = read_shape(cfg.trainer.policy.model.path).parameters
    one, four = policy(cfg, 1), policy(cfg, 4)
    cfg.trainer.policy.fsdp_size = 2
    replicated = policy(cfg, 4)
    for use, ranks in ((one, 1), (four, 4), (replicated, 2)):
        assert use.resident["weights"] == pytest.approx(4 * parameters / ranks, rel=0.02)
        assert use.resident["moments"] == pytest.approx(8 * parameters / ranks, rel=0.02)
        assert use.learnt == pytest.approx(12 * parameters / ranks, rel=0.02)
        assert use.updating["gradients"] >= 0.9 * use.gradients
        assert use.gradients == pytest.approx(4 * parameters / ranks, rel=0.02)


def test_more_layers_are_the_line_through_fewer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten layers extrapolated from two and three, and ten measured layers."""
    line = policy(settings(folder, num_hidden_layers=10))
    cfg = settings(folder, num_hidden_layers=10, rms_norm_eps=1e-5)
    assert read_shape(str(folder / "llama{'num_hidden_layers': 10}")).depths == (2, 3)
    monkeypatch.setattr("skyasync.planning.shape.LEAST", 10)
    whole = policy(cfg)
    for name in ("resident", "scoring", "updating", "stepping", "publishing"):
        assert peak(getattr(line, name)) == pytest.approx(peak(getattr(whole, name)), rel=0.01), (
            name
        )
    assert line.flops == pytest.approx(whole.flops, rel=0.001)
    assert line.sent == pytest.approx(whole.sent, rel=0.02)


def test_operations_are_six_for_each_parameter_and_token(folder: Path) -> None:
    """Of matrices, forward and backward; attention is a small part."""
    cfg = settings(folder, hidden_size=256, intermediate_size=1024)
    cfg.generator.n_samples_per_prompt, cfg.trainer.train_batch_size = 1, 16
    shape, tokens = read_shape(cfg.trainer.policy.model.path), 16 * 128
    expected = 6 * (shape.parameters - 2 * shape.vocabulary * shape.hidden) * tokens / 4
    head = 8 * shape.vocabulary * shape.hidden * 16 * 96 / 4  # recomputed, and of responses alone
    assert policy(cfg).flops == pytest.approx(expected + head, rel=0.1)


@pytest.mark.matrix
def test_what_is_recomputed_is_not_retained(folder: Path) -> None:
    cfg, sizes = settings(folder, num_hidden_layers=8), []
    for how in (True, "selective", False):
        cfg.trainer.policy.gradient_checkpointing = how
        sizes.append(policy(cfg).updating["activations"])
    assert 1.5 * sizes[0] < sizes[1] < 0.75 * sizes[2]


def test_gradients_that_are_added_up_once_are_whole_until_then(folder: Path) -> None:
    cfg = settings(folder)
    parameters = read_shape(cfg.trainer.policy.model.path).parameters
    plain = policy(cfg)
    cfg.trainer.policy.reduce_gradients = "update"
    once = policy(cfg)
    assert once.sent["reduce-scatter"] < plain.sent["reduce-scatter"]
    more = peak(once.updating) - peak(plain.updating)
    assert more == pytest.approx(4 * parameters * 3 / 4, rel=0.2)


@pytest.mark.matrix
def test_with_adapters_weights_have_no_gradients_and_no_optimizer_state(folder: Path) -> None:
    cfg = settings(folder, hidden_size=256, intermediate_size=256)
    whole = policy(cfg)
    cfg.trainer.policy.lora.rank = 4
    use, parameters = policy(cfg), read_shape(cfg.trainer.policy.model.path).parameters
    sides = 4 * 256 + 2 * 64 + 2 * 32 + 3 * (256 + 256)  # of seven matrices: inputs and outputs
    assert use.gradients == pytest.approx(2 * 4 * sides * 4 / 4, rel=0.01)
    assert use.resident["weights"] == pytest.approx(2 * parameters / 4, rel=0.05)
    assert use.resident["moments"] == pytest.approx(2 * use.resident["adapters"], rel=0.05)
    assert use.gradients == use.resident["adapters"] and peak(use.updating) < peak(whole.updating)
    for dtype, bits in (("nf4", 4.5), ("int8", 8)):
        cfg.trainer.policy.lora.base_dtype = dtype
        matrices = 2 * (2 * 256 * 64 + 2 * 256 * 32 + 3 * 256 * 256)
        coded = (2 * (parameters - matrices) + bits / 8 * matrices) / 4
        assert policy(cfg).resident["weights"] == pytest.approx(coded, rel=0.05)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "sizes", [pytest.param({"tensor": 2}, marks=pytest.mark.matrix), {"context": 2}], ids=str
)
def test_the_dimensions_of_the_mesh_divide_what_they_split_and_nothing_else(
    folder: Path, sizes: dict[str, int]
) -> None:
    cfg = settings(folder, num_hidden_layers=8, intermediate_size=704)
    plain = policy(cfg)
    vars(cfg.trainer.parallel).update(sizes)
    cfg.trainer.micro_batch_tokens = 256 // sizes.get(
        "context", 1
    )  # of each rank: those of the group stay the same
    divided = policy(cfg)
    assert divided.updating["activations"] < 0.75 * plain.updating["activations"]
    assert divided.resident["weights"] == pytest.approx(plain.resident["weights"], rel=0.1)
    assert divided.tokens == plain.tokens // sizes.get("context", 1)


def test_what_fails_in_the_workers_code_is_one_line_that_names_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("layer 3 has no weights\nand more")

    monkeypatch.setattr(FSDPBackend, "load_without_memory", fails)
    with pytest.raises(
        UserError, match=r"trainer\.policy\.model\.path=.*layer 3 has no weights"
    ) as caught:
        policy(settings(folder, rms_norm_eps=1e-4))
    assert "\n" not in str(caught.value) and not dist.is_initialized()


@pytest.mark.matrix
def test_a_critic_has_a_head_of_one_number_and_a_reference_no_optimizer_state(folder: Path) -> None:
    cfg = settings(folder)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    shape = read_shape(cfg.trainer.policy.model.path)
    critic = measure(cfg, ROLES["critic"], 4, gpus=True)
    parameters = shape.parameters - shape.vocabulary * shape.hidden + shape.hidden
    assert critic.resident["moments"] == pytest.approx(8 * parameters / 4, rel=0.02)
    assert "logits" not in critic.updating
    reference = measure(cfg, ROLES["reference"], 4, gpus=True)
    assert reference.resident["weights"] == pytest.approx(2 * shape.parameters / 4, rel=0.02)
    assert not reference.resident.get("moments") and not reference.learnt
    cfg.trainer.critic.backbone = "shared"
    assert peak(policy(cfg).resident) == pytest.approx(12 * shape.parameters / 4, rel=0.02)


def test_a_limit_of_the_cosine_stores_one_gradient_more(folder: Path) -> None:
    cfg = settings(folder)
    without = policy(cfg)
    cfg.trainer.policy.optimizer_config.max_grad_cosine = 0.5
    limited = policy(cfg)
    assert limited.resident["moments"] == pytest.approx(1.5 * without.resident["moments"], rel=0.01)
    more = peak(limited.stepping) - peak(without.stepping)
    assert more == pytest.approx(without.gradients, rel=0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("optimizer", "rounded", "weights", "optimizer_state"),
    [
        ("muon", False, 4, 4),
        ("adamw_8bit", False, 4, 2),
        ("adamw", True, 2, 4),
        ("adamw_8bit", True, 2, 2),
    ],
)
def test_optimizers_with_a_low_precision_state(
    folder: Path, optimizer: str, rounded: bool, weights: int, optimizer_state: int
) -> None:
    """Bytes per parameter of layers; embeddings and head have two moments under Muon, too."""
    cfg = settings(folder, hidden_size=256, vocab_size=128)
    shape = read_shape(cfg.trainer.policy.model.path)
    cfg.trainer.policy.optimizer_config.name = optimizer
    cfg.trainer.policy.optimizer_config.bf16_stochastic_round = rounded
    use = policy(cfg)
    more = 4 * 2 * 128 * 256 / 4 if optimizer == "muon" else 0
    assert use.resident["weights"] == pytest.approx(weights * shape.parameters / 4, rel=0.03)
    assert use.resident["moments"] == pytest.approx(
        optimizer_state * shape.parameters / 4 + more, rel=0.05
    )


def test_the_token_cap_holds_whatever_the_rows(folder: Path) -> None:
    cfg = settings(folder)
    cfg.trainer.micro_train_batch_size_per_gpu, cfg.trainer.train_batch_size = 64, 64
    use = policy(cfg)
    assert use.tokens <= 256 + 96, "the last row of a shared prompt may exceed the bound"
    assert use.tokens * use.micro_batches >= 64 * 2 / 4 * 96


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gpt2", "mixtral", "qwen2_moe", "phi3", "olmo2"]
)
def test_every_family_is_measured(folder: Path, name: str) -> None:
    use, parameters = (
        policy(cfg := settings(folder, name)),
        read_shape(str(folder / f"{name}{{}}")).parameters,
    )
    assert use.resident["weights"] == pytest.approx(4 * parameters / 4, rel=0.05), (
        cfg.trainer.policy.model.path
    )
    assert use.flops and peak(use.updating) > peak(use.scoring) > peak(use.resident)


def test_logits_that_are_capped_take_copies_of_them(folder: Path) -> None:
    plain, capped = (
        policy(settings(folder, "gemma2", vocab_size=8192, final_logit_softcapping=cap))
        for cap in (None, 30.0)
    )
    assert capped.updating["logits"] > plain.updating["logits"]


def test_experts_are_counted_with_their_grouped_products(folder: Path) -> None:
    """Forward and backward: six operations for each active parameter and token, without attention."""
    cfg = settings(folder, "qwen3_moe")
    use = policy(cfg)
    rows = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt / 4
    experts = 2 * 2 * 3 * 64 * 96  # layers, experts per token, matrices
    assert use.flops > 6 * experts * rows * 96


def test_stages_of_a_pipeline_divide_the_layers_and_keep_the_micro_batches_on_their_way(
    folder: Path,
) -> None:
    cfg = settings(folder, num_hidden_layers=16, vocab_size=128)
    cfg.trainer.train_batch_size = 64
    whole = policy(cfg, 2)
    cfg.trainer.parallel.pipeline = 2
    stages = policy(cfg, 2)
    assert stages.resident["weights"] == pytest.approx(whole.resident["weights"], rel=0.06)
    assert stages.micro_batches == 2 * whole.micro_batches  # all rows pass each stage
    assert stages.updating["activations"] == pytest.approx(whole.updating["activations"], rel=0.25)
    assert stages.flops == pytest.approx(whole.flops, rel=0.1)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "llava"])
def test_of_a_model_that_reads_images_the_towers_weights_are_counted(
    tmp_path: Path, family: str
) -> None:
    cfg = Config()
    cfg.trainer.policy.model.path = save_tiny(family, tmp_path / "whole")
    use = measure(cfg, ROLES[POLICY], 2, gpus=False)
    parameters = read_shape(cfg.trainer.policy.model.path).parameters
    assert use.resident[WEIGHTS] == pytest.approx(parameters * FLOAT32 / 2, rel=0.01)


def test_eight_billion_parameters_take_few_seconds() -> None:
    """Of a CPU, after imports; a model of few layers has run then."""
    began = time.process_time()
    use = planned(CASES[0])
    assert time.process_time() - began < 10
    assert peak(use.updating) == pytest.approx(28.27 * GIB, rel=0.02)  # benchmarks.plan's loop


def test_only_micro_batches_that_are_computed_are_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each response fills one; of responses of a million tokens, all of a rank would take gigabytes."""
    built: list[int] = []
    layout = MicroBatches._layout

    def counted(self: MicroBatches[Any], batch: Any, *rest: Any) -> Any:
        built.append(len(batch))
        return layout(self, batch, *rest)

    monkeypatch.setattr(MicroBatches, "_layout", counted)
    cfg = settings(folder, num_hidden_layers=2)
    cfg.generator.sampling_params.max_generate_length = 256
    cfg.trainer.train_batch_size = 16
    use = policy(cfg)
    assert use.micro_batches == 8
    assert len(built) == 1
