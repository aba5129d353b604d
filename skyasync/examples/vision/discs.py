"""Images with one to five discs, and the environment that rewards their number.

Invariant: training and held-out images are drawn from different seeds, and an image is a function
of its seed alone.
"""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput

Row = dict[str, Any]

# In pixels.
SIZE = 56  # of the image
CELL = 14  # of a cell, which is a patch of the model
RADIUS = 5  # of a disc
MOST = 5  # discs
QUESTION = "How many discs?"
FIRST_EVAL_SEED = 1 << 20  # far above the seeds of training
ENV_CLASS = "skyasync.examples.vision.discs:CountDiscs"


def disc_image(seed: int) -> tuple[Image.Image, int]:
    """An image and the number of its discs.

    The discs have bright or dark colours on grey, and are in different cells.
    """
    rng = random.Random(seed)
    count = rng.randint(1, MOST)
    image = Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    draw = ImageDraw.Draw(image)
    cells_per_row = SIZE // CELL
    for cell in rng.sample(range(cells_per_row**2), count):
        row, column = divmod(cell, cells_per_row)
        x = CELL * column + CELL // 2  # of the centre
        y = CELL * row + CELL // 2
        colour = tuple(rng.choice((0, 255)) for _ in range(3))
        draw.ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=colour)
    return image, count


def rows(first_seed: int, count: int) -> list[Row]:
    """Rows with the images of ``count`` seeds."""
    result = []
    for seed in range(first_seed, first_seed + count):
        image, discs = disc_image(seed)
        row = {"prompt": QUESTION, "images": [image], "env_class": ENV_CLASS, "discs": discs}
        result.append(row)
    return result


def train_prompts(count: int = 2048) -> list[Row]:
    return rows(0, count)


def val_prompts(count: int = 128) -> list[Row]:
    return rows(FIRST_EVAL_SEED, count)


def shuffled_prompts(count: int = 128) -> list[Row]:
    """Held-out prompts, each with the image of the next one.

    The accuracy on these is that of a policy that does not look at the images.
    """
    prompts = val_prompts(count)
    images = [row["images"] for row in prompts]
    shuffled = []
    for number, row in enumerate(prompts):
        next_image = images[(number + 1) % count]
        shuffled.append(row | {"images": next_image})
    return shuffled


class CountDiscs(BaseTextEnv):
    """One turn; the number of discs earns reward 1, anything else 0."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == str(self.extras["discs"]))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
