"""Supervised fine-tuning in one process: the losses are those of a plain loop of torch and transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, get_scheduler

from skyasync.config.schema import Config
from skyasync.data.demonstrations import Demonstration, load_demonstrations
from skyasync.examples.tiny.model import build
from skyasync.examples.tiny.tasks import questions
from skyasync.run.experiment import NoEngines, NoGenerator, NoSync
from skyasync.trainer.supervised import OBJECTIVE, SupervisedTrainer
from skyasync.workers.dispatch import LocalDispatch
from tests.trainer.plans.local_run import Rows

BATCH, STEPS = 6, 4


def demonstrations(count: int = 20) -> list[dict[str, Any]]:
    """Demonstrations of several lengths."""
    rows = [
        next_question.row()
        for next_question, _ in zip(questions("train", 3), range(count), strict=False)
    ]
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    small = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 128,
        "batch_size": 8,
        "steps": 1,
        "corpus_size": 512,
    }
    return build(
        out=tmp_path_factory.mktemp("models") / "tied", progress=False, rarest_merge=20, **small
    )


def settings(model: str, **trainer: Any) -> Config:
    cfg = Config()
    cfg.data.train_data = ["rows"]
    cfg.trainer.policy.model.path, cfg.trainer.policy.threads = model, 1
    optimizer = cfg.trainer.policy.optimizer_config
    optimizer.lr, optimizer.weight_decay, optimizer.scheduler = 3e-3, 0.01, "linear"
    cfg.trainer.train_batch_size, cfg.trainer.max_training_steps = BATCH, STEPS
    cfg.trainer.eval_interval = 2
    for name, value in (OBJECTIVE | trainer).items():
        holder = cfg.trainer.algorithm if name in OBJECTIVE else cfg.trainer
        assert hasattr(holder, name)
        setattr(holder, name, value)
    return cfg


def trained(
    cfg: Config, rows: Sequence[dict[str, Any]]
) -> tuple[dict[int, dict[str, float]], list[Demonstration]]:
    """The metrics by step, and the trained rows in order."""
    tokenizer: Any = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
    dataset = load_demonstrations(["rows"], cfg, tokenizer, loaded_rows={"rows": rows})
    tracker, client, sync = Rows(), NoEngines(), NoSync()
    trainer = SupervisedTrainer(
        cfg,
        tracker,
        tokenizer,
        dataset,
        client,
        NoGenerator(),
        eval_dataset=dataset[:7],  # type: ignore[arg-type]
    )

    async def run() -> None:
        dispatch = LocalDispatch(cfg, total_steps=trainer.context.length.updates)
        trainer.attach(dispatch, sync)
        try:
            await trainer.run()
        finally:
            await dispatch.shutdown()

    asyncio.run(run())
    stream = trainer.context.prompts
    return tracker.rows, [stream.prompt(n) for n in range(BATCH * STEPS)]  # type: ignore[misc]


def plain(
    model_path: str, cfg: Config, order: Sequence[int], rows: Sequence[dict[str, Any]]
) -> list[float]:
    """The losses of a loop without this library, with the rows and formula of TRL's SFTTrainer."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model_path)
    model, of = (
        AutoModelForCausalLM.from_pretrained(model_path),
        cfg.trainer.policy.optimizer_config,
    )
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    decayed = {
        "params": matrices,
        "weight_decay": of.weight_decay,
    }  # as transformers' Trainer divides them
    optimizer = torch.optim.AdamW([decayed, {"params": vectors, "weight_decay": 0.0}], lr=of.lr)
    schedule = get_scheduler(of.scheduler, optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    losses = []
    for start in range(0, len(order), BATCH):
        given = []
        for row in (rows[index] for index in order[start : start + BATCH]):
            answer = {"role": "assistant", "content": row["completion"]}
            options = {"tokenize": True, "return_dict": False}
            read = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, **options
            )
            whole = tokenizer.apply_chat_template([*row["prompt"], answer], **options)
            assert whole[: len(read)] == read
            given.append(
                (torch.tensor(whole), torch.tensor([-100] * len(read) + whole[len(read) :]))
            )
        tokens, labels = (torch.nn.utils.rnn.pad_sequence(list(each), True, fill) for each, fill in
                          zip(zip(*given, strict=True), (0, -100), strict=True))  # fmt: skip
        lengths = torch.tensor([len(each) for each, _ in given])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        loss = model(
            tokens,
            attention_mask=mask.long(),
            labels=labels,
            num_items_in_batch=(labels != -100).sum(),
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), of.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("micro_batch_tokens", [0, 64])
def test_every_step_has_the_loss_of_a_plain_loop(model: str, micro_batch_tokens: int) -> None:
    rows, cfg = demonstrations(), settings(model, micro_batch_tokens=micro_batch_tokens)
    metrics, order = trained(cfg, rows)
    expected = plain(model, cfg, [each.id.row for each in order], rows)
    assert [metrics[step]["sft/loss"] for step in range(1, STEPS + 1)] == pytest.approx(
        expected, abs=1e-6
    )
    assert metrics[STEPS]["sft/loss"] < metrics[1]["sft/loss"]
    assert metrics[STEPS]["eval/loss"] < metrics[2]["eval/loss"] < metrics[0]["eval/loss"]
    assert not any(
        name.startswith(("reward/", "gap/", "off_policy/"))
        for row in metrics.values()
        for name in row
    )


def test_the_model_is_written_at_the_end(model: str, tmp_path: Path) -> None:
    rows, cfg = (
        demonstrations(),
        settings(model, max_training_steps=1, export_path=str(tmp_path / "out")),
    )
    trained(cfg, rows)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_adapters_learn_and_the_base_stays(model: str, tmp_path: Path) -> None:
    rows, cfg = demonstrations(), settings(model, export_path=str(tmp_path / "out"))
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.alpha = 4, 8.0
    metrics, _ = trained(cfg, rows)
    assert metrics[STEPS]["eval/loss"] < metrics[0]["eval/loss"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, tmp_path / "out")
    )
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("proj.weight")
    }
