"""What ranks are measured to need, by the settings that change it. Models have few layers: each is measured whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.planning.measure import measure
from skyasync.planning.memory import RankUse
from skyasync.planning.shape import read_shape
from skyasync.workers.roles import POLICY, ROLES
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


def test_weights_gradients_and_optimizer_state_are_divided_by_the_ranks_that_shard_them(folder: Path) -> None:
    cfg = settings(folder)
    parameters = read_shape(cfg.trainer.policy.model.path).parameters
    one, four = policy(cfg, 1), policy(cfg, 4)
    cfg.trainer.policy.fsdp_size = 2
    replicated = policy(cfg, 4)
    for use, ranks in ((one, 1), (four, 4), (replicated, 2)):
        assert use.held["weights"] == pytest.approx(4 * parameters / ranks, rel=0.02)
        assert use.held["optimizer state"] == pytest.approx(8 * parameters / ranks, rel=0.02)
        assert use.learnt == pytest.approx(12 * parameters / ranks, rel=0.02)
    assert not dist.is_initialized()


def test_more_layers_are_the_line_through_fewer(folder: Path) -> None:
    """Ten layers from four and six, beside all ten."""
    line = policy(settings(folder, num_hidden_layers=10))
    cfg = settings(folder, num_hidden_layers=10, rms_norm_eps=1e-5)
    shape = read_shape(cfg.trainer.policy.model.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyasync.planning.shape.LEAST", (10, 12))
        patch.setattr("skyasync.planning.shape._SHAPES", {})
        whole = policy(cfg)
    assert shape.depths == (4, 6)
    for one, other in ((line.updating, whole.updating), (line.scoring, whole.scoring), (line.held, whole.held)):
        assert sum(one.values()) == pytest.approx(sum(other.values()), rel=0.02)
    assert line.flops == pytest.approx(whole.flops, rel=0.001)
    assert line.sent["all-gather"] == pytest.approx(whole.sent["all-gather"], rel=0.02)


def test_what_is_recomputed_is_not_kept(folder: Path) -> None:
    cfg, found = settings(folder, num_hidden_layers=6), []
    for how in (True, "selective", False):
        cfg.trainer.policy.gradient_checkpointing = how
        found.append(sum(policy(cfg).updating.values()))
    assert found == sorted(found) and found[0] < found[2]


def test_gradients_that_are_added_up_once_are_whole_until_then(folder: Path) -> None:
    cfg = settings(folder)
    plain = policy(cfg)
    cfg.trainer.policy.reduce_gradients = "update"
    once = policy(cfg)
    assert once.sent["reduce-scatter"] < plain.sent["reduce-scatter"]


def test_adapters_leave_weights_without_gradients_and_optimizer_state(folder: Path) -> None:
    cfg = settings(folder)
    cfg.trainer.policy.lora.rank = 4
    use, parameters = policy(cfg), read_shape(cfg.trainer.policy.model.path).parameters
    assert use.held["weights"] == pytest.approx(2 * parameters / 4 + use.trained, rel=0.05)
    assert use.held["optimizer state"] == pytest.approx(2 * use.trained, rel=0.05)
    assert use.gradients == use.trained


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"context": 2}], ids=str)
def test_the_dimensions_of_the_mesh_divide_activations(folder: Path, sizes: dict[str, int]) -> None:
    cfg = settings(folder, num_hidden_layers=6, intermediate_size=704)
    plain = policy(cfg)
    vars(cfg.trainer.parallel).update(sizes)
    cfg.trainer.micro_batch_tokens = 256 // sizes.get("context", 1)  # of each rank: the group's stay the same
    divided = policy(cfg)
    assert divided.updating["activations"] < 0.8 * plain.updating["activations"]
    assert divided.held["weights"] == pytest.approx(plain.held["weights"], rel=0.1)


def test_heads_that_cannot_be_divided_are_the_workers_own_error(folder: Path) -> None:
    cfg = settings(folder)
    cfg.trainer.parallel.tensor = 8
    with pytest.raises(UserError, match="heads"):
        policy(cfg, 8)
    assert not dist.is_initialized()


def test_a_critic_has_a_head_of_one_number_and_a_reference_no_optimizer_state(folder: Path) -> None:
    cfg = settings(folder)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    shape = read_shape(cfg.trainer.policy.model.path)
    critic = measure(cfg, ROLES["critic"], 4, gpus=True)
    parameters = shape.parameters - shape.vocabulary * shape.hidden + shape.hidden
    assert critic.held["optimizer state"] == pytest.approx(8 * parameters / 4, rel=0.02)
    reference = measure(cfg, ROLES["reference"], 4, gpus=True)
    assert reference.held["weights"] == pytest.approx(2 * shape.parameters / 4, rel=0.02)
    assert not reference.held.get("optimizer state") and not reference.learnt


def test_a_mixture_of_experts_is_counted_with_its_grouped_products(folder: Path) -> None:
    """Forward and backward: six operations for each active parameter and token, attention aside."""
    cfg = settings(folder, "qwen3_moe")
    use = policy(cfg)
    rows = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt / 4
    experts = 2 * 2 * 3 * 64 * 96  # layers, experts per token, matrices
    assert use.flops > 6 * experts * rows * 96
