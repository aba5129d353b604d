"""A tiny random Llama, batches of grouped samples, and bundles of the session's Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from transformers import LlamaConfig, LlamaForCausalLM

from skyasync.config.schema import Config
from skyasync.models.backend import COMPUTED_TOKENS
from skyasync.models.batch import UpdateBatch
from skyasync.workers.critic import CriticWorker
from skyasync.workers.policy import PolicyWorker
from tests.workers.processes import Ranks

VOCABULARY = 96


def make_model(folder: Path, *, tied: bool, intermediate_size: int = 64) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=intermediate_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(params=["tied", "untied"])
def model_path(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def cfg(model_path: str) -> Config:
    return config_for(model_path)


def config_for(path: str) -> Config:
    cfg = Config()
    cfg.trainer.policy.model.path = path
    cfg.trainer.policy.optimizer_config.lr = 1e-2
    cfg.trainer.micro_batch_tokens = 64
    return cfg


def make_batch(
    groups: int = 3, samples: int = 4, seed: int = 0, longest_response: int = 9
) -> UpdateBatch:
    """Grouped samples with a shared prompt per group; some have two actions with an observation between."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: tuple[int, ...] = ()) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    rows, masks = [], []
    for _ in range(groups):
        prompt = integers(1, VOCABULARY, (int(integers(4, 12)),))
        for _ in range(samples):
            response = integers(1, VOCABULARY, (int(integers(1, longest_response)),))
            mask = torch.ones(len(response), dtype=torch.bool)
            if len(response) > 4:
                mask[2:4] = False
            rows.append(torch.cat([prompt, response]))
            masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask]))
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(r) for r in rows])
    loss_mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    return UpdateBatch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        loss_mask=loss_mask,
        group_ids=torch.arange(groups).repeat_interleave(samples),
        behaviour_logprobs=torch.where(loss_mask, -2.0, 0.0),
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(tokens.shape),
        advantages=torch.randn(len(rows), 1, generator=generator) * loss_mask,
        loss_weights=loss_mask.float() / loss_mask.sum(),
    )


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on how rows are divided among ranks and micro-batches."""
    return {name: value for name, value in metrics.items() if name != COMPUTED_TOKENS}


def step_metrics(worker: PolicyWorker | CriticWorker) -> dict[str, float]:
    return comparable(worker.optimizer_step())


def episodes(count: int = 2, turns: int = 4, branches: int = 3, seed: int = 0) -> UpdateBatch:
    """One group of agents' episodes: in each turn some rows continue the trunk, and one of them becomes the new trunk.

    A row learns from its own reply. One row of each turn learns from all earlier replies as well, with other
    advantages.
    """
    drawn = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> torch.Tensor:
        return torch.randint(
            1, VOCABULARY, (int(torch.randint(low, high, (), generator=drawn)),), generator=drawn
        )

    prompt = words(6, 9)
    rows, masks, trajectories = [], [], []
    for episode in range(count):
        trunk, learned = prompt, torch.zeros(len(prompt), dtype=torch.bool)
        for _ in range(turns):
            observation = words(3, 8)
            for branch in range(branches):
                reply = words(2, 6)
                row = torch.cat([trunk, observation, reply])
                mask = torch.arange(len(row)) >= len(trunk) + len(observation)
                whole = torch.cat([learned, mask[len(trunk) :]])
                rows.append(row)
                masks.append(whole if branch == 0 else mask)
                trajectories.append(episode)
            trunk, learned = row, whole
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    loss_mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return UpdateBatch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        loss_mask=loss_mask,
        group_ids=torch.zeros(len(rows), dtype=torch.int64),
        trajectory_ids=torch.tensor(trajectories),
        behaviour_logprobs=(-4 * torch.rand(tokens.shape, generator=drawn)) * loss_mask,
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(tokens.shape),
        advantages=torch.rand(tokens.shape, generator=drawn) * loss_mask,
        loss_weights=loss_mask.float() / loss_mask.sum(),
    )


@pytest.fixture(scope="module")
def ranks(fork_socket: Path) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2)``: the file's two processes, without Ray."""
    groups: dict[int, Ranks] = {}
    yield lambda count: groups.setdefault(count, Ranks(count, fork_socket))
    for group in groups.values():
        group.close()


@pytest.fixture
def bundles(ray_session: None) -> Iterator[object]:
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    yield group
    remove_placement_group(group)
