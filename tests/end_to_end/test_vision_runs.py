"""Runs with images of environments, of agent programs, of a server, and with a frozen tower."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyasync import BasePPOExp, BaseTextEnv, BaseTextEnvStepOutput
from skyasync.callbacks import RunExtension, Watched
from skyasync.envs.images import with_urls
from skyasync.examples.vision.discs import ENV_CLASS, QUESTION, disc_image
from skyasync.examples.vision.model import build
from skyasync.models.images import read_image
from skyasync.rollout.types import Group, images_in
from tests.end_to_end.parts import disc_prompts
from tests.end_to_end.runs import Train, Trained, train_in
from tests.inference.backends.vllm.test_server import free_port, serving_with, until_it_answers

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

SETTINGS = (
    "data.train_data=tests.end_to_end.test_vision_runs:prompts", f"environment.env_class={ENV_CLASS}",
    "trainer.max_training_steps=3", "trainer.max_prompt_length=64", "generator.sampling_params.max_generate_length=4",
)  # fmt: skip
HERE = "tests.end_to_end.test_vision_runs"


def prompts() -> list[dict[str, Any]]:
    """For the environment of the settings."""
    return [row | {"env_class": ""} for row in disc_prompts()]


class ShowsAnother(BaseTextEnv):
    """Two turns; the environment answers the first with another image, whose discs count."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        image, discs = disc_image(self.extras["discs"] + 100)
        if self.turns == 1:
            content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
            return {"observations": [{"role": "user", "content": content}], "reward": 0.0, "done": False,
                    "metadata": {}}  # fmt: skip
        return {
            "observations": [],
            "reward": float(str(discs) in action),
            "done": True,
            "metadata": {},
        }


async def asks_twice(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent program: a row's image, and then one of its own as ``image_url``."""
    from openai import AsyncOpenAI

    from examples.agents.calculator import connections

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    image, discs = disc_image(data["discs"] + 100)
    own: Any = with_urls(
        [{"role": "user", "content": [{"type": "image", "image": read_image(image)}]}]
    )
    assert own[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    messages = list(data["prompt"])
    for turn in ([], own):
        messages += turn
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return float(str(discs) in messages[-1]["content"])


@pytest.fixture(scope="module")
def train_vision(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Train:
    return train_in(tmp_path_factory.mktemp("vision"), build())


class CountsImages(RunExtension):
    """Of each trajectory, as a metric."""

    images = 0

    def on_rollout(self, trainer: Watched, groups: Sequence[Group]) -> None:
        counts = {
            len(images_in(trajectory.segments))
            for group in groups
            for trajectory in group.trajectories
        }
        (self.images,) = counts

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        metrics["test/images"] = float(self.images)


class Counted(BasePPOExp):  # perhaps in another process
    def get_callbacks(self) -> list[RunExtension]:
        return [CountsImages()]


def assert_trained(run: Trained, largest_gap: float = 1e-5) -> None:
    assert len(run.metrics) == 3
    assert max(run.series("sync/logprob_gap")) < largest_gap
    assert max(run.series("sync/logprob_gap_mean")) < 3e-6
    assert any(norm > 0 for norm in run.series("policy/grad_norm"))


@pytest.mark.parametrize("plan", ["sync", "streamed"])
def test_an_environment_answers_with_images(train_vision: Train, plan: str) -> None:
    turns = (
        f"environment.env_class={HERE}:ShowsAnother",
        "generator.max_turns=2",
        f"trainer.run_name=turns_{plan}",
    )
    run = train_vision(*SETTINGS, *turns, f"trainer.plan={plan}", experiment=Counted)
    assert_trained(run)
    assert run.series("test/images") == [2.0] * 3


def test_an_agent_sends_images_by_the_endpoint(train_vision: Train) -> None:
    program = (
        'environment.env_class=""',
        f"generator.agent_program={HERE}:asks_twice",
        "trainer.run_name=agent",
    )
    run = train_vision(*SETTINGS, *program, experiment=Counted)
    assert_trained(run)
    assert run.series("test/images") == [2.0] * 3


def test_a_frozen_tower_keeps_its_bits(train_vision: Train) -> None:
    run = train_vision(
        *SETTINGS,
        "trainer.policy.freeze=[vision_tower]",
        "trainer.export_interval=3",
        "trainer.run_name=frozen",
    )
    assert_trained(run)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (Path(build()), run.folder / "exports" / "step_000003")
    )
    tower = {name for name in before if name.startswith("model.visual.") and "merger" not in name}
    assert {name for name, tensor in before.items() if torch.equal(tensor, after[name])} == tower


@pytest.mark.vllm
def test_a_server_is_sent_images_and_weights(
    train_vision: Train, fork_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving_with(monkeypatch, fork_socket, Path(build()), port) as process:
        asyncio.run(until_it_answers(url, process))
        settings = (
            f"generator.engines=[{url}]",
            "generator.backend=auto",
            "generator.threads=0",
            "trainer.run_name=server",
        )
        run = train_vision(*SETTINGS, *settings)
    # rounding: transformers' float32 and float64 differ by 4.6e-6 at a token of log-probability -9.6; vLLM adds its own
    assert_trained(run, largest_gap=3e-5)
