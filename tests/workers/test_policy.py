from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.weight_sync.transfers.file import read_weights, remove_weights
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.policy import NonFiniteError, PolicyWorker
from tests.models.test_token_model import plain_forward
from tests.workers.conftest import config_for, make_batch


def start(cfg: Config, **kwargs) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1, **kwargs)
    worker.setup()
    worker.backend.optimizer.register_step_pre_hook(lambda *_: _remember_gradients(worker))
    return worker


def _remember_gradients(worker: PolicyWorker) -> None:
    """The gradients of the last step, which the worker itself frees."""
    worker.seen = [p.grad.clone() for p in worker.backend.model.parameters()]


def weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in worker.backend.model.named_parameters()}


def gradients(worker: PolicyWorker) -> list[torch.Tensor]:
    """The gradients of the last step."""
    return worker.seen


def test_logprobs_of_policy_and_reference_equal_a_plain_forward(cfg: Config) -> None:
    batch = make_batch()
    reference = ReferenceWorker(cfg, threads=1)
    reference.setup()
    expected = plain_forward(cfg.trainer.policy.model.path, batch, dtype=torch.float32)[0]
    for worker in (start(cfg), reference):
        torch.testing.assert_close(worker.logprobs(batch), expected, atol=2e-5, rtol=0)


def test_score_gives_every_token_after_the_first_at_temperature_one(cfg: Config) -> None:
    cfg.generator.sampling_params.temperature = 0.5
    sequences = [[5, 6, 7, 8], [9], [1, 2]]
    scores = start(cfg).score(sequences)
    model = AutoModelForCausalLM.from_pretrained(cfg.trainer.policy.model.path)
    for sequence, score in zip(sequences, scores, strict=True):
        expected = model(torch.tensor([sequence])).logits[0].log_softmax(-1)[:-1].detach()
        assert score == pytest.approx(
            [float(expected[t, token]) for t, token in enumerate(sequence[1:])], abs=2e-5
        )


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 40}, {"micro_train_batch_size_per_gpu": 2}])
def test_the_gradient_does_not_depend_on_the_micro_batches(
    cfg: Config, cut: dict[str, int]
) -> None:
    cfg.trainer.micro_batch_tokens = 100_000
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    batch = make_batch(groups=5)
    whole = start(cfg)
    expected = whole.update_policy(batch)
    vars(cfg.trainer).update(cut)
    pieces = start(cfg)
    metrics = pieces.update_policy(batch)
    torch.testing.assert_close(gradients(pieces), gradients(whole), atol=1e-6, rtol=1e-4)
    assert metrics.pop("computed_tokens") >= expected.pop(
        "computed_tokens"
    )  # smaller trees repeat more tokens
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics["tokens"] == int(batch.loss_mask.sum())


def test_activations_are_recomputed_on_a_gpu_and_not_on_a_cpu_unless_told_otherwise(
    cfg: Config,
) -> None:
    def recomputes(device: str) -> bool:
        worker, backend = PolicyWorker(cfg), FSDPBackend()
        backend.spec, backend.device = worker.spec(), torch.device(device)
        return backend.recomputes()

    assert (recomputes("cpu"), recomputes("cuda")) == (False, True)
    for setting in (True, False):
        cfg.trainer.policy.gradient_checkpointing = setting
        assert recomputes("cpu") == recomputes("cuda") == setting
    cfg.trainer.policy.gradient_checkpointing = "auto"
    assert not start(cfg).backend.model.model.is_gradient_checkpointing


@pytest.mark.parametrize("fails", [False, True])
def test_no_gradient_outlives_its_update(cfg: Config, fails: bool) -> None:
    worker, batch = start(cfg), make_batch()
    if fails:
        batch.advantages[batch.loss_mask] = float("nan")
        with pytest.raises(NonFiniteError):
            worker.update_policy(batch)
    else:
        worker.update_policy(batch)
    assert all(p.grad is None for p in worker.backend.model.parameters())


def test_the_optimizers_epsilon_is_the_configured_one(cfg: Config) -> None:
    cfg.trainer.policy.optimizer_config.eps = 1e-5
    assert {group["eps"] for group in start(cfg).backend.optimizer.param_groups} == {1e-5}


@pytest.mark.parametrize("how", [True, "selective"])
def test_gradient_checkpointing_changes_no_gradient(cfg: Config, how: bool | str) -> None:
    batch = make_batch()
    plain = start(cfg)
    plain.update_policy(batch)
    cfg.trainer.policy.gradient_checkpointing = how
    recomputed = start(cfg)
    assert recomputed.backend.model.model.is_gradient_checkpointing
    recomputed.update_policy(batch)
    torch.testing.assert_close(gradients(recomputed), gradients(plain), atol=1e-7, rtol=1e-5)


def test_the_learning_rate_follows_the_step_that_is_planned_where_one_is_given(cfg: Config) -> None:
    cfg.trainer.policy.optimizer_config.scheduler = "linear"
    worker = start(cfg, total_steps=10)
    batch = make_batch()
    assert worker.update_policy(batch, schedule_step=5)["lr"] == pytest.approx(0.5e-2)
    assert worker.update_policy(make_batch())["lr"] == pytest.approx(0.9e-2), "its own second step"


def test_the_proximal_policy_may_be_interpolated_by_the_tokens_versions(cfg: Config) -> None:
    cfg.trainer.algorithm.proximal_logprobs = "loglinear"
    cfg.trainer.algorithm.policy_loss_type = "decoupled_ppo"
    batch = make_batch()
    batch.versions = torch.where(batch.loss_mask, 3, -1)
    batch.approximated_version = 6  # versions 3, 5 = proximal, 6: two thirds of the way
    worker, by_hand = start(cfg), start(cfg)
    current = by_hand.logprobs(batch)
    metrics = worker.update_policy(batch)
    given = make_batch()
    given.proximal_logprobs = torch.where(batch.loss_mask, -2.0 + (current + 2.0) * 2 / 3, 0.0)
    assert metrics == pytest.approx(by_hand.update_policy(given), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradients(worker), gradients(by_hand), atol=1e-6, rtol=1e-4)


def test_a_policy_gradient_step_equals_one_written_by_hand(cfg: Config) -> None:
    """With proximal = current the gradient of the loss is -advantage * grad log p, whatever the clipping."""
    cfg.trainer.algorithm.off_policy_correction = "none"
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    batch = make_batch()
    worker = start(cfg)
    metrics = worker.update_policy(batch)

    model = AutoModelForCausalLM.from_pretrained(cfg.trainer.policy.model.path)
    logits = model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits[
        :, :-1
    ]
    chosen = logits.log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0]
    (-(batch.loss_weights * batch.advantages)[:, 1:] * chosen).sum().backward()
    expected = [p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients(worker), expected, atol=2e-6, rtol=1e-3)
    norm = torch.stack([g.norm() for g in expected]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_gradient_is_clipped_to_the_configured_norm(cfg: Config) -> None:
    cfg.trainer.policy.optimizer_config.max_grad_norm = 1e-3
    worker = start(cfg)
    assert worker.update_policy(make_batch())["grad_norm"] > 1e-2
    assert float(torch.stack([g.norm() for g in gradients(worker)]).norm()) == pytest.approx(
        1e-3, rel=1e-3
    )


def test_learning_rate_zero_trains_nothing(cfg: Config) -> None:
    cfg.trainer.policy.optimizer_config.lr = 0.0
    cfg.trainer.policy.optimizer_config.weight_decay = 0.1
    worker = start(cfg)
    before = weights(worker)
    worker.update_policy(make_batch())
    assert all(torch.equal(before[name], now) for name, now in weights(worker).items())


@pytest.mark.parametrize("what", ["advantages", "weights"])
def test_a_non_finite_loss_or_gradient_is_named_and_changes_no_weight(
    cfg: Config, what: str
) -> None:
    worker = start(cfg)
    batch = make_batch()
    if what == "advantages":
        batch.advantages[batch.loss_mask] = float("inf")
    else:
        # A finite loss may have a non-finite gradient: here the norm's weight is broken in the last layer.
        worker.backend.model.model.base_model.layers[1].register_full_backward_hook(
            lambda module, inputs, outputs: (torch.full_like(inputs[0], float("nan")),)
        )
    before = weights(worker)
    with pytest.raises(
        NonFiniteError, match="loss" if what == "advantages" else "gradient.*layers.0"
    ):
        worker.update_policy(batch)
    assert all(torch.equal(before[name], now) for name, now in weights(worker).items())


def test_a_rank_without_rows_still_answers(cfg: Config) -> None:
    worker = start(cfg)
    nothing = make_batch().select(torch.zeros(0, dtype=torch.int64)).trim()
    assert worker.logprobs(nothing).shape == (0, 0)


def test_publish_writes_every_name_once_and_tied_weights_under_the_first(cfg: Config) -> None:
    worker = start(cfg)
    worker.update_policy(make_batch())
    path, *_ = worker.transfer_weights("file", "write")
    try:
        published = read_weights(path)
        model = AutoModelForCausalLM.from_pretrained(cfg.trainer.policy.model.path)
        assert set(published) == set(dict(model.named_parameters()))
        assert model.config.tie_word_embeddings == ("lm_head.weight" not in published)
        current = dict(worker.backend.model.model.named_parameters())
        assert all(torch.equal(tensor, current[name]) for name, tensor in published.items())
    finally:
        remove_weights(path)


def test_an_export_loads_and_gives_the_same_logits(cfg: Config, tmp_path: Path) -> None:
    worker = start(cfg)
    worker.update_policy(make_batch())
    worker.export(str(tmp_path))
    assert not list(tmp_path.glob("*.bin"))
    tokens = make_batch().tokens
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, worker.backend.model.model(tokens).logits)


def test_training_goes_on_from_a_checkpoint_bit_by_bit(cfg: Config, tmp_path: Path) -> None:
    cfg.trainer.policy.optimizer_config.scheduler = "linear"
    original = start(cfg, total_steps=5)
    for seed in range(2):
        original.update_policy(make_batch(seed=seed))
    original.save(str(tmp_path))
    state = torch.get_rng_state()
    expected = [original.update_policy(make_batch(seed=seed)) for seed in (2, 3)]

    resumed = start(cfg, total_steps=5)
    resumed.load(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert [resumed.update_policy(make_batch(seed=seed)) for seed in (2, 3)] == expected
    assert all(torch.equal(now, weights(original)[name]) for name, now in weights(resumed).items())


def test_a_checkpoint_holds_safetensors_only(cfg: Config, tmp_path: Path) -> None:
    start(cfg).save(str(tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_loading_from_an_empty_folder_says_so(cfg: Config, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no policy checkpoint"):
        start(cfg).load(str(tmp_path))


def test_bfloat16_keeps_float32_master_weights_and_publishes_bfloat16(untied_model: str) -> None:
    cfg = config_for(untied_model)
    cfg.trainer.policy.model.dtype = "bfloat16"
    cfg.trainer.policy.optimizer_config.lr = 1e-6
    worker = start(cfg)
    before = weights(worker)
    worker.update_policy(make_batch())
    after = weights(worker)
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    assert all(not torch.equal(before[name], after[name]) for name in after)
    path, *_ = worker.transfer_weights("file", "write")
    assert all(tensor.dtype == torch.bfloat16 for tensor in read_weights(path).values())
    remove_weights(path)
