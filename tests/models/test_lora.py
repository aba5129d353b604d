"""Adapters on a frozen policy: training, publishing, and the reference; the same on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.heads import copy_own_part
from skyasync.models.lora import whole
from skyasync.preflight.parts import check_parts
from skyasync.weight_sync.transfers.file import read_weights, remove_weights
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.planning.models import COMMON, configuration
from tests.workers.calls import digest, equal
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow


def lora_config(path: str, **lora: Any) -> Config:
    cfg = config_for(path)
    cfg.generator.backend = (
        "transformers"  # which takes weights by the names of the model's parameters
    )
    vars(cfg.trainer.policy.lora).update({"rank": 4, "alpha": 8.0} | lora)
    return cfg


def start(cfg: Config) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    keep_gradients(worker)
    return worker


def excite(worker: Any) -> None:
    """A has no gradient while B is 0."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in worker.backend.model.named_parameters():
        if ".lora_B" in name:
            copy_own_part(parameter, torch.randn(parameter.shape, generator=generator) / 10)


def keep_gradients(worker: Any) -> None:
    def remember(*_: object) -> None:
        worker.seen = {
            n: whole(p.grad).clone()
            for n, p in worker.backend.model.named_parameters()
            if p.grad is not None
        }

    worker.backend.optimizer.register_step_pre_hook(remember)


def all_weights(worker: PolicyWorker) -> dict[str, Tensor]:
    return {name: whole(p).clone() for name, p in worker.backend.model.named_parameters()}


def by_peft(worker: PolicyWorker, folder: Path) -> dict[str, Tensor]:
    """The model that peft makes of an exported adapter and the model's files."""
    worker.settings.lora.export = "adapter"
    worker.export(str(folder))
    worker.settings.lora.export = "merged"
    base = AutoModelForCausalLM.from_pretrained(
        worker.backend.spec.path, dtype=worker.backend.dtype
    )
    merged = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return {name: p.detach() for name, p in merged.named_parameters()}


def published(worker: PolicyWorker) -> dict[str, Tensor]:
    path, *_ = worker.transfer_weights("file", "write")
    assert path is not None
    return taken(path)


def taken(path: str) -> dict[str, Tensor]:
    """The contents of a file of weights, which is removed, as by a sync after the engines have read it."""
    found = {name: tensor.clone() for name, tensor in read_weights(path).items()}
    remove_weights(path)
    return found


def test_a_step_changes_the_adapters_and_nothing_else(model_path: str) -> None:
    worker = start(lora_config(model_path))
    before = all_weights(worker)
    worker.update_policy(make_batch())
    worker.update_policy(make_batch(seed=1))
    changed = {
        name for name, value in all_weights(worker).items() if not torch.equal(value, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    assert set(worker.seen) == changed
    assert len(changed) == 2 * 2 * 7  # two layers of seven matrices
    trained = sum(
        p.numel() for group in worker.backend.optimizer.param_groups for p in group["params"]
    )
    assert (
        sum(
            p.numel()
            for state in worker.backend.optimizer.state.values()
            for p in state.values()
            if p.dim()
        )
        == 2 * trained
    )


def test_what_is_published_exported_and_broadcast_is_what_peft_merges(
    model_path: str, tmp_path: Path
) -> None:
    worker = start(lora_config(model_path))
    worker.update_policy(make_batch())
    expected = by_peft(worker, tmp_path / "adapter")
    assert not torch.equal(
        expected["model.layers.0.mlp.up_proj.weight"],
        base_weights(worker)["model.layers.0.mlp.up_proj.weight"],
    )
    equal(published(worker), expected)
    worker.export(str(tmp_path / "merged"))
    equal(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters()), expected
    )
    sent = worker._engine_weights()
    equal(dict(sent), expected)
    specs = worker.transfer_weights("broadcast", "specs")
    assert list(specs) == list(dict(sent)) and all(
        list(expected[n].shape) == shape for n, (_, shape) in specs.items()
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "gpt2", "qwen3_moe"])
def test_other_families_leave_as_peft_merges_them(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration(family)).save_pretrained(tmp_path / "model")
    worker = start(lora_config(str(tmp_path / "model")))
    excite(worker)
    batch = make_batch()
    worker.update_policy(batch)
    equal(published(worker), by_peft(worker, tmp_path / "adapter"))
    reference = ReferenceWorker(worker.cfg, threads=1)
    reference.setup()
    assert torch.equal(worker.base_logprobs(batch), reference.logprobs(batch))


def base_weights(worker: PolicyWorker) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(worker.backend.spec.path).named_parameters())


def test_the_reference_is_the_policy_without_its_adapters(model_path: str) -> None:
    cfg, batch = lora_config(model_path), make_batch()
    worker = start(cfg)
    reference = ReferenceWorker(cfg, threads=1)
    reference.setup()
    expected = reference.logprobs(batch)
    assert torch.equal(worker.logprobs(batch), expected), "at first adapters add nothing"
    worker.update_policy(batch)
    assert not torch.allclose(worker.logprobs(batch), expected, atol=1e-3)
    assert torch.equal(worker.base_logprobs(batch), expected)


def test_trainer_and_published_weights_say_the_same(untied_model: str, tmp_path: Path) -> None:
    worker = start(lora_config(untied_model))
    worker.update_policy(make_batch())
    worker.export(str(tmp_path / "merged"))
    other = PolicyWorker(config_for(str(tmp_path / "merged")), threads=1)
    other.setup()
    torch.testing.assert_close(
        worker.logprobs(make_batch()), other.logprobs(make_batch()), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_tokens": 40},
        {"micro_train_batch_size_per_gpu": 2},
        {"gradient_checkpointing": True},
    ],
)
def test_the_gradient_does_not_depend_on_passes_or_recomputation(
    untied_model: str, change: dict[str, Any]
) -> None:
    cfg = lora_config(untied_model)
    cfg.trainer.micro_batch_tokens = 100_000
    whole_batch = start(cfg)
    excite(whole_batch)
    whole_batch.update_policy(make_batch(groups=5))
    vars(cfg.trainer.policy if "gradient_checkpointing" in change else cfg.trainer).update(change)
    pieces = start(cfg)
    excite(pieces)
    pieces.update_policy(make_batch(groups=5))
    close(pieces.seen, whole_batch.seen)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(gradient.norm() > 0 for gradient in expected.values())
    gap = sum(float((found[name] - gradient).norm()) ** 2 for name, gradient in expected.items())
    size = sum(float(gradient.norm()) ** 2 for gradient in expected.values())
    assert (gap / size) ** 0.5 <= 1e-6


def step(rank: Rank, seed: int = 0) -> dict[str, Tensor]:
    """An update on a rank's share of the rows; the gradient, whole."""
    if seed == 0:
        excite(rank.worker)
    keep_gradients(rank.worker)
    batch = make_batch(groups=5, seed=seed)
    rank.worker.update_policy(batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim())
    return dict(rank.worker.seen)


def publish(rank: Rank) -> str | None:
    written = rank.worker.transfer_weights("file", "write")
    return written and written[0]


def reference(rank: Rank) -> Tensor:
    return rank.worker.base_logprobs(make_batch())


def same_files(rank: Rank, folder: str) -> None:
    rank.worker.save(f"{folder}/state")
    rank.worker.export(f"{folder}/merged")
    rank.worker.settings.lora.export = "adapter"
    rank.worker.export(f"{folder}/adapter")


def resumed(rank: Rank, folder: str) -> tuple[dict[str, Tensor], str]:
    """The state that was saved, and the state after one more step."""
    rank.worker.load(folder)
    state = {n: whole(p).clone() for n, p in rank.worker.backend.model.named_parameters()}
    step(rank, seed=2)
    return state, digest(rank.worker)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_two_ranks_are_one(
    untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path, dtype: str
) -> None:
    cfg = lora_config(untied_model)
    cfg.trainer.policy.model.dtype = dtype
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    two = ranks(2)
    two.set_up(PolicyWorker, cfg)
    first, second = two.call(step)
    assert all(torch.equal(first[name], second[name]) for name in first)
    if dtype == "float32":
        one = start(cfg)
        excite(one)
        batch = make_batch(groups=5)
        one.update_policy(batch)
        close(first, one.seen)
        expected = published(one)
        (path, _) = two.call(publish)
        torch.testing.assert_close(taken(path), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            two.call(reference)[0], one.base_logprobs(make_batch()), atol=1e-6, rtol=0
        )
    two.call(check_dtypes, dtype)
    two.call(same_files, str(tmp_path))
    (path, nothing) = two.call(publish)
    assert nothing is None
    base = AutoModelForCausalLM.from_pretrained(untied_model, dtype=getattr(torch, dtype))
    merged = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    found = taken(path)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(
            found[name],
            parameter.detach(),
            atol=0 if dtype == "float32" else 4e-3,
            rtol=1e-2 if dtype == "bfloat16" else 0,
        )
    assert {t.dtype for t in found.values()} == {getattr(torch, dtype)}
    saved = {
        name for file in (tmp_path / "state").glob("*.safetensors") for name in load_file(file)
    }
    assert {name for name in saved if ".lora_" not in name} == {"step", "random_state"}
    assert len(saved) == 2 + 28 * 4  # each adapter's two halves: weight, step, two moments
    goes_on = two.call(resumed, str(tmp_path / "state"))[0]
    two.set_up(PolicyWorker, cfg)
    again = two.call(resumed, str(tmp_path / "state"))[0]
    assert goes_on[1] == again[1]
    equal(again[0], goes_on[0])


def check_dtypes(rank: Rank, dtype: str) -> None:
    for name, parameter in rank.worker.backend.model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == (torch.float32 if ".lora_" in name else getattr(torch, dtype)), (
            name
        )
        assert parameter.requires_grad == (".lora_" in name)


def test_a_resumed_run_is_the_run_bit_for_bit_with_dropout_as_well(
    tied_model: str, tmp_path: Path
) -> None:
    cfg = lora_config(tied_model, dropout=0.2)
    worker = start(cfg)
    worker.update_policy(make_batch())
    worker.save(str(tmp_path / "saved"))
    worker.update_policy(make_batch(seed=1))
    other = start(cfg)
    other.load(str(tmp_path / "saved"))
    other.update_policy(make_batch(seed=1))
    assert digest(other) == digest(worker)
    assert torch.equal(other.logprobs(make_batch()), other.logprobs(make_batch())), (
        "scoring has no dropout"
    )
    without = start(lora_config(tied_model))
    without.update_policy(make_batch())
    dropping = start(cfg)
    dropping.update_policy(make_batch())
    assert any(
        not torch.equal(without.seen[name], gradient) for name, gradient in dropping.seen.items()
    )


def test_ranks_that_split_matrices_drop_the_same_inputs(
    untied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    """Else the gradients of the half that each of them has whole would differ, which ends the run."""
    cfg = lora_config(untied_model, dropout=0.2)
    cfg.trainer.parallel.tensor = 2
    two = ranks(2)
    two.set_up(PolicyWorker, cfg)
    first, second = two.call(excited_norm)
    assert first == second > 0


def excited_norm(rank: Rank) -> float:
    excite(rank.worker)
    return rank.worker.update_policy(make_batch())["grad_norm"]


def test_a_router_that_is_no_plain_product_has_no_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128}
    config = AutoConfig.for_model("phimoe", **(COMMON | settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    worker = start(lora_config(str(tmp_path)))
    assert worker.logprobs(make_batch()).isfinite().all()
    adapted = {name for name, _ in worker.backend.model.named_parameters() if ".lora_" in name}
    assert adapted and not [name for name in adapted if "router" in name]


def test_layers_are_chosen_by_the_ends_of_their_names(untied_model: str) -> None:
    def adapted(**lora: Any) -> set[str]:
        found = start(lora_config(untied_model, **lora)).backend.model.named_parameters()
        return {
            name.removeprefix("model.model.").partition(".lora_")[0]
            for name, _ in found
            if ".lora_" in name
        }

    assert adapted(target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["layers.0.self_attn.q_proj"]) == {
        "layers.1.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"target_modules": ["q_prj"]},
            r"target_modules: unknown linear layer 'q_prj': did you mean 'q_proj'",
        ),
        (
            {"exclude_modules": ["up_prj"]},
            r"exclude_modules: unknown linear layer 'up_prj': did you mean 'up_proj'",
        ),
        (
            {"target_modules": ["lm_head"]},
            r"target_modules: lm_head shares its weight with the embeddings",
        ),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, r"trainer\.policy\.lora: "),
    ],
)
def test_a_wrong_layer_is_refused_in_one_line(
    tied_model: str, lora: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        start(lora_config(tied_model, **lora))
    assert "\n" not in str(caught.value)


def test_a_run_without_peft_is_told_how_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyasync.preflight.parts.find_spec", lambda package: None)
    cfg = lora_config("anything")
    cfg.generator.backend = "transformers"
    with pytest.raises(
        UserError, match=r"peft is not installed; add it with: uv pip install \"skyasync\[lora\]\""
    ):
        check_parts(cfg, [])


def test_a_checkpoint_of_another_rank_is_refused(tied_model: str, tmp_path: Path) -> None:
    start(lora_config(tied_model)).save(str(tmp_path))
    with pytest.raises(UserError, match=r"lora_A.*\[4, .*\[2, "):
        start(lora_config(tied_model, rank=2)).load(str(tmp_path))
