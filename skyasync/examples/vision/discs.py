"""Images with one to five discs, and the environment that rewards their number.

Invariant: training and held-out images are drawn from different seeds, and an image is a function
of its seed alone.
"""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput

# a cell is a patch of the model
SIZE = 56
CELL = 14
RADIUS = 5
MOST = 5
QUESTION = "How many discs?"
FIRST_EVAL_SEED = 1 << 20  # the first of its seeds
ENV_CLASS = "skyasync.examples.vision.discs:CountDiscs"


def disc_image(seed: int) -> tuple[Image.Image, int]:
    """Grey paper with discs of bright or dark colours, each in a cell of its own, and how many
    there are."""
    rng = random.Random(seed)
    count = rng.randint(1, MOST)
    image = Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    draw = ImageDraw.Draw(image)
    for cell in rng.sample(range((SIZE // CELL) ** 2), count):
        x, y = (
            CELL * place + CELL // 2 for place in (cell % (SIZE // CELL), cell // (SIZE // CELL))
        )
        colour = tuple(rng.choice((0, 255)) for _ in range(3))
        draw.ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=colour)
    return image, count


def rows(first_seed: int, count: int) -> list[dict[str, Any]]:
    images = (disc_image(seed) for seed in range(first_seed, first_seed + count))
    return [
        {"prompt": QUESTION, "images": [image], "env_class": ENV_CLASS, "discs": discs}
        for image, discs in images
    ]


def train_prompts(count: int = 2048) -> list[dict[str, Any]]:
    return rows(0, count)


def val_prompts(count: int = 128) -> list[dict[str, Any]]:
    return rows(FIRST_EVAL_SEED, count)


def shuffled_prompts(count: int = 128) -> list[dict[str, Any]]:
    """Held-out prompts, each with the next one's image: the accuracy of a policy that does not
    look."""
    prompts = val_prompts(count)
    images = [row["images"] for row in prompts]
    return [
        row | {"images": other_image}
        for row, other_image in zip(prompts, [*images[1:], images[0]], strict=True)
    ]


class CountDiscs(BaseTextEnv):
    """One turn; the number of discs earns reward 1, anything else 0."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == str(self.extras["discs"]))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
