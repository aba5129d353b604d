"""Vision-language models: placeholders of images in tokens, and what a model is given for them besides tokens.

Invariant: a placeholder stands for an image wherever it occurs. Policies cannot sample one: its logit is ``NEVER`` in
the embedded engine and in the trained model alike.

    <image>  ──expand──▶  <image> <image> <image> <image>     tokens of engines, trajectories and batches
    <image>  ◀─collapse─  <image> <image> <image> <image>     tokens that vLLM takes, and expands by itself
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from skyasync.arrays import Ints, ints
from skyasync.errors import UserError
from skyasync.models.images import FAMILIES, Image, Images, decoded, read_image

NEVER = -1e9  # a logit whose probability is exactly 0, with a gradient that is not NaN
CACHED = 64  # images whose features are kept: 24 MB of a megapixel for Qwen
_NO_FEATURES = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def is_vision(config: PreTrainedConfig) -> bool:
    """Whether a model of transformers reads images in addition to text."""
    return getattr(config, "vision_config", None) is not None


def placeholders(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for images or videos."""
    return sorted({config.image_token_id, getattr(config, "video_token_id", None) or config.image_token_id})


class _Processed(NamedTuple):
    tokens: list[int]  # that its placeholder becomes
    features: dict[str, Tensor]


class ImageProcessor:
    """The processor of a model's folder; ``processor_of`` makes it once.

    Attributes:
        banned: ids that stand for images or videos.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoConfig, AutoProcessor

        config = AutoConfig.from_pretrained(path) if path else None
        if config is None or not is_vision(config):
            raise UserError(f"{path or 'the model'} reads text alone: images need a vision-language model")
        if config.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"{path} is a model of type {config.model_type}; types that can read images here: {known}")
        self._join = FAMILIES[config.model_type].joined
        self._processor: Any = AutoProcessor.from_pretrained(path)
        self.placeholder: int = config.image_token_id
        self.banned = placeholders(config)
        self._of = lru_cache(CACHED)(self._process)
        self._known: WeakKeyDictionary[Image, list[int]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # an engine's thread and the event loop share it

    def _process(self, image: Image) -> _Processed:
        with self._lock:
            given = self._processor(
                text=[self._processor.image_token],
                images=[[decoded(image)]],
                return_tensors="pt",
                add_special_tokens=False,
            )
        features = {name: value for name, value in given.items() if name not in _NO_FEATURES}
        return _Processed(given["input_ids"][0].tolist(), features)

    def _tokens(self, image: Image) -> list[int]:
        tokens = self._known.get(image)
        if tokens is None:
            tokens = self._known[image] = self._of(image).tokens
        return tokens

    def expand(self, tokens: Sequence[int], images: Images) -> Ints:
        """The tokens with each placeholder replaced by those of its image.

        Raises:
            UserError: if there are more or fewer placeholders than images.
        """
        tokens = list(tokens)
        if (count := tokens.count(self.placeholder)) != len(images):
            raise UserError(
                f"the prompt has {count} placeholders for {len(images)} images: the chat template must show one for "
                f"each content part of type image, and texts must not contain it"
            )
        given, expanded = iter(images), list[int]()
        for token in tokens:
            expanded += self._tokens(next(given)) if token == self.placeholder else [token]
        return ints(expanded)

    def collapse(self, tokens: Sequence[int], images: Images) -> list[int]:
        """The tokens before ``expand``.

        Raises:
            UserError: if they are not those of these images.
        """
        rest, collapsed = list(tokens), list[int]()
        for image in images:
            own = self._tokens(image)
            if self.placeholder not in rest:
                break
            start = rest.index(self.placeholder) - own.index(self.placeholder)
            if start < 0 or rest[start : start + len(own)] != own:
                break
            collapsed += [*rest[:start], self.placeholder]
            rest = rest[start + len(own) :]
        else:
            collapsed += rest
        if collapsed.count(self.placeholder) != len(images):
            raise UserError(
                f"the prompt's {len(tokens)} tokens do not hold those of its {len(images)} images, in order"
            )
        return collapsed

    def features(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """What the model is given for the images."""
        each = [self._of(image).features for image in images]
        return {name: torch.cat([features[name] for features in each], self._join) for name in each[0]}

    @cached_property
    def blank(self) -> Image:
        """A small image, not grey: Idefics3 drops images of zeros."""
        from PIL import Image as PIL

        return read_image(PIL.new("RGB", (28, 28), (255, 0, 0)))


processor_of = lru_cache(4)(ImageProcessor)


class Vision:
    """What a loaded vision-language model needs in addition to tokens."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._path = config.name_or_path or ""
        self.banned = torch.tensor(placeholders(config))

    @cached_property
    def processor(self) -> ImageProcessor:
        return processor_of(self._path)

    def inputs(self, tokens: Tensor, images: Sequence[Images]) -> dict[str, Tensor]:
        """Arguments of the model besides ``tokens`` ``[rows, width]``; none if no row has an image.

        Raises:
            UserError: if a row's tokens are not those of its images.
        """
        flat = [image for row in images for image in row]
        if not flat:
            return {}
        for row, own in zip(tokens.tolist(), images, strict=True):
            self.processor.collapse(row, own)
        inputs = {name: value.to(tokens.device) for name, value in self.processor.features(flat).items()}
        if "image_grid_thw" in inputs:  # positions in time, height and width
            inputs["mm_token_type_ids"] = (tokens == self.processor.placeholder).long()
        return inputs

    def without_placeholders(self, logits: Tensor) -> Tensor:
        """``[..., vocabulary]``, differentiable."""
        return logits.index_fill(-1, self.banned.to(logits.device), NEVER)

    def with_blank_row(self, tokens: Tensor, predictors: Tensor) -> tuple[Tensor, Tensor, tuple[Images, ...]]:
        """``tokens`` ``[rows, width]`` of text with one more row, which has an image and no loss token.

        The vision tower then computes, with a gradient of zero: under FSDP all ranks must call it together.

        Returns:
            The tokens, the ``predictors`` (flat indices into them), and each row's images.
        """
        rows, width = tokens.shape
        blank = self.processor.blank
        row = torch.tensor(list(self.processor.expand([self.processor.placeholder], (blank,))), device=tokens.device)
        wider = max(width, len(row))
        longer = tokens.new_zeros(rows + 1, wider)
        longer[:rows, :width] = tokens
        longer[rows, : len(row)] = row
        return longer, predictors // width * wider + predictors % width, (*[()] * rows, (blank,))
