"""The files of ``examples/flat`` compute what the library computes: bitwise for the same tokens.

The library runs in this process, with a real policy worker and the transformers engine, without Ray. Settings that
make its computation the plain one:

- a mini-batch is one forward and backward pass (``micro_batch_tokens``);
- the model is said to have a sliding window, which its attention does not read. So rows are a padded batch. Otherwise
  the library computes a group's prompt once, in packed sequences, and sums have another order.

The files sample with the random numbers of the library's requests, and so the same tokens. Log-probabilities differ in
the last bits: the engine multiplies matrices by another library. The synchronous loss does not read them, and the file
is compared end to end. The other loss does (importance weight), and gets those of the library.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from examples.flat import grpo_one_step_off, grpo_sync
from skyasync.config.schema import Config
from skyasync.envs.pool import local_pool
from skyasync.examples.tiny import chat_model
from skyasync.examples.tiny.tasks import ENV_CLASS, Question, TinyEnv
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.backends.transformers.sampling import stream_key, uniforms
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineConfig
from skyasync.rollout.generator import EpisodeGenerator
from skyasync.rollout.generator_api import request_seed
from skyasync.rollout.types import Group, Prompt, PromptId
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.weight_sync.sync import WeightSync
from tests.trainer.plans.local_run import Memory, RecordingDispatch, Rows

STEPS = 10
LEARNING_RATE = 3e-4
SAMPLING_SEED = 5
LONGEST_FILE = 350  # lines
Weights = dict[str, Tensor]


class OneStepOff(Memory, AsyncRayPPOTrainer):
    """Keeps groups and weights."""


FILES: dict[str, ModuleType] = {"sync": grpo_sync, "one_step_off": grpo_one_step_off}
PLANS: dict[str, type[Memory]] = {"sync": Memory, "one_step_off": OneStepOff}
plans = pytest.mark.parametrize("plan", FILES)


@dataclass
class TrainedRun:
    """Figures of each training step; weights before the first step and after each."""

    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    groups: list[list[Group]] = field(default_factory=list)  # of the library
    sampled: list[Any] = field(default_factory=list)  # rollouts of a file's ``generate``
    recorded: list[Any] = field(default_factory=list)  # the library's, in the file's form


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the library


def library_settings(plan: str, *, padded: bool) -> Config:
    file, cfg = FILES[plan], Config()
    cfg.trainer.policy.model.path = chat_model()
    cfg.trainer.policy.threads = 1
    cfg.trainer.policy.optimizer_config.lr = LEARNING_RATE
    cfg.trainer.train_batch_size = file.PROMPTS
    cfg.trainer.max_training_steps = STEPS
    cfg.trainer.micro_batch_tokens = 1 << 20
    cfg.generator.backend = "transformers"
    cfg.generator.n_samples_per_prompt = file.SAMPLES
    cfg.generator.sampling_params.max_generate_length = file.MAX_NEW_TOKENS
    cfg.generator.sampling_params.seed = SAMPLING_SEED
    if padded:
        cfg.trainer.policy.model.config_kwargs = {"sliding_window": 1024}
    if plan == "sync":
        cfg.trainer.algorithm.off_policy_correction = "none"
        cfg.trainer.policy_mini_batch_size = file.PROMPTS // file.MINI_BATCHES
    return cfg


async def train_by_library(plan: str, *, padded: bool = True) -> TrainedRun:
    cfg, model = library_settings(plan, padded=padded), chat_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = []
    for row, question in enumerate(
        FILES[plan].make_questions(FILES[plan].PROMPTS * STEPS, random.Random(0))
    ):
        messages = [{"role": "user", "content": question.text}]
        dataset.append(Prompt(PromptId(0, row), messages, ENV_CLASS, {"answer": question.answer}))
    engine = TransformersEngine(
        EngineConfig(model, threads=1, max_model_len=64, max_num_seqs=256, kv_cache_gb=0.1)
    )
    client, dispatch, tracker = InferenceClient([engine], 60), RecordingDispatch(cfg), Rows()
    trainer: Any = PLANS[plan].get_trainer(
        cfg=cfg,
        tracker=tracker,
        tokenizer=tokenizer,
        train_dataset=dataset,
        inference_engine_client=client,
        generator=EpisodeGenerator(client, local_pool(), tokenizer, 64),
    )
    trainer.attach(dispatch, WeightSync(dispatch, client, [[1, 2, 3, 4, 5]], 1e-3))
    await client.start()
    try:
        await trainer.run()
        weights = [trainer.weights[step] for step in range(STEPS)] + [dispatch.weights()]
    finally:
        await dispatch.shutdown()
        await client.shutdown()
    rows = [tracker.rows[step] for step in range(1, STEPS + 1)]
    losses = [row["policy/loss"] for row in rows]
    rewards = [row["reward/mean"] for row in rows]
    return TrainedRun(losses, rewards, weights, trainer.trained)


def library_numbers(groups: list[Group], count: int) -> Tensor:
    """The numbers that chose the tokens of these groups, ``[batch, count]``."""
    names = [f"{trajectory.id}-t0" for group in groups for trajectory in group.trajectories]
    keys = np.array(
        [stream_key(request_seed(SAMPLING_SEED, name), 0, name) for name in names], dtype=np.uint64
    )
    columns = [uniforms(keys, np.full(len(keys), position)) for position in range(count)]
    return torch.from_numpy(np.stack(columns, axis=1))


# ---------------------------------------------------------------- the files


def train_by_file(plan: str, library: TrainedRun) -> TrainedRun:
    """The file's ``train`` with the library's questions and random numbers.

    It trains on the tokens that it samples, or, one step off policy, on those of the library.
    """
    file, run = FILES[plan], TrainedRun()
    policy, tokenizer = file.load(chat_model())
    batches = iter(library.groups)

    def sample(engine: Any, tokenizer: Any, questions: list[Any]) -> Any:
        groups = next(batches)
        numbers = library_numbers(groups, file.MAX_NEW_TOKENS)
        run.sampled.append(file.generate(engine, tokenizer, questions, numbers))
        run.recorded.append(recorded_rollout(file, tokenizer, groups, questions))
        return run.sampled[-1] if plan == "sync" else run.recorded[-1]

    def record_weights() -> None:
        parameters = policy.named_parameters()
        run.weights.append(
            {f"model.{name}": parameter.detach().clone() for name, parameter in parameters}
        )

    record_weights()
    steps = [[question_of(file, group) for group in groups] for groups in library.groups]
    for result in file.train(policy, tokenizer, steps, LEARNING_RATE, sample):
        losses = result.losses if plan == "sync" else [result.loss]
        run.losses.append(sum(losses) / len(losses))
        run.rewards.append(result.mean_reward)
        record_weights()
    return run


def question_of(file: ModuleType, group: Group) -> Any:
    return file.Question(group.prompt.messages[0]["content"], group.prompt.extras["answer"])


def recorded_rollout(
    file: ModuleType, tokenizer: Any, groups: list[Group], questions: list[Any]
) -> Any:
    rollout = file.Rollout([], [], [], [])
    for group, question in zip(groups, questions, strict=True):
        for trajectory in group.trajectories:
            prompt, action = trajectory.segments
            rollout.prompts.append(prompt.tokens.tolist())
            rollout.responses.append(action.tokens.tolist())
            rollout.behaviour_logprobs.append(action.logprobs.tolist())
            text = tokenizer.decode(action.tokens, skip_special_tokens=True)
            rollout.rewards.append(file.reward(question, text))
    return rollout


def different_weights(first: TrainedRun, second: TrainedRun) -> list[str]:
    """Steps and names of the weights that are not bitwise equal."""
    assert len(first.weights) == len(second.weights) == STEPS + 1
    return [
        f"{step} {name}"
        for step, weights in enumerate(first.weights)
        for name, weight in weights.items()
        if not torch.equal(weight, second.weights[step][name])
    ]


# ---------------------------------------------------------------- tests


@pytest.mark.slow
@plans
async def test_losses_and_weights_of_ten_steps_are_bitwise_the_librarys(plan: str) -> None:
    library = await train_by_library(plan)
    file = train_by_file(plan, library)
    assert file.losses == library.losses
    assert file.rewards == library.rewards
    assert different_weights(library, file) == []
    assert len({loss for loss in file.losses if loss}) == STEPS
    assert all(
        not torch.equal(weight, file.weights[0][name]) for name, weight in file.weights[-1].items()
    )
    check_generation(file)
    for step, groups in enumerate(library.groups):
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        versions = {
            version for trajectory in trajectories for version in trajectory.versions.tolist()
        }
        assert versions == {step if plan == "sync" else max(0, step - 1)}


def check_generation(run: TrainedRun) -> None:
    """The same tokens from the same weights and random numbers, with log-probabilities that differ by rounding."""
    assert len(run.sampled) == STEPS
    for sampled, recorded in zip(run.sampled, run.recorded, strict=True):
        assert sampled.prompts == recorded.prompts
        assert sampled.responses == recorded.responses
        assert sampled.rewards == recorded.rewards
        logprobs = [
            torch.tensor(list(chain(*rollout.behaviour_logprobs)))
            for rollout in (sampled, recorded)
        ]
        torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix
@plans
async def test_losses_are_the_librarys_but_for_rounding_with_packed_sequences(plan: str) -> None:
    library = await train_by_library(plan, padded=False)
    file = train_by_file(plan, library)
    assert file.losses == pytest.approx(library.losses, abs=1e-5)


@plans
def test_a_file_needs_neither_the_library_nor_ray_and_is_short(plan: str) -> None:
    text = Path(FILES[plan].__file__ or "").read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    roots = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    assert roots >= {"torch", "transformers"}
    assert roots.isdisjoint({"skyasync", "ray", "examples"})


@plans
def test_the_task_is_the_librarys(plan: str) -> None:
    for question in FILES[plan].make_questions(200, random.Random(3)):
        assert Question("sort", question.text, question.answer).split == "train"
        for response in (question.answer, f" {question.answer}\n", question.answer[::-1] + "0", ""):
            env = TinyEnv(extras={"answer": question.answer})
            assert FILES[plan].reward(question, response) == env.step(response)["reward"]
