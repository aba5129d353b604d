"""Vision-language models: placeholders of images in tokens, and what a model is given for them
besides tokens.

Invariant: a placeholder stands for an image wherever it occurs. Policies cannot sample one: its
logit is ``NEVER`` in the embedded engine and in the trained model alike.

    <image>  ──expand──▶  <image> <image> <image> <image>     tokens of engines, trajectories and batches
    <image>  ◀─collapse─  <image> <image> <image> <image>     tokens that vLLM takes, and expands by itself
                           -7      -7      -7      -7       ids of images in packed rows
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from skyasync.arrays import Ints, ints
from skyasync.errors import UserError
from skyasync.models.batch import B
from skyasync.models.config import config_value
from skyasync.models.images import FAMILIES, Image, Images, ImageTokens, decoded, read_image

if TYPE_CHECKING:
    from skyasync.models.packing import Layout

NEVER = -1e9  # a logit whose probability is exactly 0, with a gradient that is not NaN
CACHED = 64  # images whose features are kept: 24 MB of a megapixel for Qwen
GRID = "image_grid_thw"  # of images' patches in time, height and width: the model has M-RoPE
_NO_FEATURES = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def is_vision(config: PreTrainedConfig) -> bool:
    """Whether a model of transformers reads images in addition to text."""
    return config_value(config, "vision_config") is not None


def placeholders(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for images or videos."""
    return sorted(
        {config.image_token_id, config_value(config, "video_token_id", config.image_token_id)}
    )


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
            raise UserError(
                f"{path or 'the model'} reads only text: images need a vision-language model"
            )
        if config.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(
                f"{path} is a model of type {config.model_type}; types that can read images here: {known}"
            )
        self._join = FAMILIES[config.model_type].joined
        try:
            self._processor: Any = AutoProcessor.from_pretrained(path)
        except ImportError as error:
            raise UserError(
                f"{path}: its processor of images cannot be loaded: {' '.join(str(error).split())}"
            ) from error
        self.placeholder: int = config.image_token_id
        self.banned = placeholders(config)
        self._of = lru_cache(CACHED)(self._process)
        self._known: WeakKeyDictionary[Image, list[int]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # an engine's thread and the event loop share it

    def _process(self, image: Image) -> _Processed:
        shown = decoded(image)
        with self._lock:
            try:
                given = self._processor(
                    text=[self._processor.image_token],
                    images=[[shown]],
                    return_tensors="pt",
                    add_special_tokens=False,
                )
            except ValueError as error:
                size = f"{shown.width} x {shown.height} pixels"
                raise UserError(
                    f"the model's processor cannot read an image of {size}: {error}"
                ) from error
        features = {name: value for name, value in given.items() if name not in _NO_FEATURES}
        return _Processed(given["input_ids"][0].tolist(), features)

    def _tokens(self, image: Image) -> list[int]:
        tokens = self._known.get(image)
        if tokens is None:
            tokens = self._known[image] = self._of(image).tokens
        return tokens

    def placeholders_in(self, image: Image) -> int:
        """In the tokens of an image."""
        return self._tokens(image).count(self.placeholder)

    def expand(self, tokens: Sequence[int], images: Images) -> Ints:
        """The tokens with each placeholder replaced by those of its image.

        Raises:
            UserError: if there are more or fewer placeholders than images.
        """
        tokens = list(tokens)
        count = tokens.count(self.placeholder)
        if count != len(images):
            raise UserError(
                f"the prompt has {count} placeholders for {len(images)} images: the chat template must show one for "
                f"each content part of type image, and texts must not contain it"
            )
        given = iter(images)
        expanded = list[int]()
        for token in tokens:
            expanded += self._tokens(next(given)) if token == self.placeholder else [token]
        return ints(expanded)

    def collapse(self, tokens: Sequence[int], images: Images) -> list[int]:
        """The tokens before ``expand``.

        Raises:
            UserError: if they are not those of these images.
        """
        rest = list(tokens)
        collapsed = list[int]()
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
        return {
            name: torch.cat([features[name] for features in each], self._join) for name in each[0]
        }

    @cached_property
    def blank(self) -> Image:
        """A small image, not grey: Idefics3 drops images of zeros."""
        from PIL import Image as PIL

        return read_image(PIL.new("RGB", (28, 28), (255, 0, 0)))


processor_of = lru_cache(4)(ImageProcessor)


def blank_prompt(path: str, tokens: Sequence[int]) -> ImageTokens:
    """An image and then the tokens, for the model of this folder or hub name."""
    processor = processor_of(path)
    return ImageTokens(
        processor.expand([processor.placeholder, *tokens], (processor.blank,)), (processor.blank,)
    )


class Vision:
    """What a loaded vision-language model needs in addition to tokens."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._path = config.name_or_path or ""
        self.banned = torch.tensor(placeholders(config))

    @cached_property
    def processor(self) -> ImageProcessor:
        return processor_of(self._path)

    def prompt_inputs(self, tokens: Tensor, images: Sequence[Images]) -> dict[str, Tensor]:
        """Arguments of the model besides ``tokens`` ``[rows, width]``; none if no row has an image.

        Raises:
            UserError: if a row's tokens are not those of its images.
        """
        flat = [image for row in images for image in row]
        if not flat:
            return {}
        for row, own in zip(tokens.tolist(), images, strict=True):
            self.processor.collapse(row, own)
        inputs = self._features(flat, tokens.device)
        if GRID in inputs:
            inputs["mm_token_type_ids"] = (tokens == self.processor.placeholder).long()
        return inputs

    def with_image_ids(self, batch: B, model: PreTrainedModel) -> B:
        """The batch with ids of its images in place of their placeholders, and with positions of
        M-RoPE.

        A placeholder is no loss token: no policy can sample it.

        An id is a negative number by an image's content: tokens of different images differ, as
        those of texts do.

        Raises:
            UserError: if a row's tokens are not those of its images.
        """
        flat = [image for row in batch.images or () for image in row]
        if not flat:
            return batch
        for row, own in zip(batch.tokens.tolist(), batch.images or (), strict=True):
            self.processor.collapse(row, own)
        changed = copy(batch)
        where = batch.tokens == self.processor.placeholder
        ids = [
            one
            for image in flat
            for one in [_image_id(image)] * self.processor.placeholders_in(image)
        ]
        changed.loss_mask = batch.loss_mask.bool() & ~where
        changed.tokens = batch.tokens.masked_scatter(where, torch.tensor(ids))
        if GRID in self.processor.features(flat[:1]):
            grids = torch.cat([self.processor.features([image])[GRID] for image in flat])
            base: Any = model.base_model
            positions, _ = base.get_rope_index(batch.tokens, where.long(), image_grid_thw=grids)
            changed.rope = positions.permute(1, 2, 0)
        return changed

    def inputs(self, layout: Layout, model: PreTrainedModel) -> dict[str, Tensor]:
        """Arguments of the model for a layout of such a batch.

        Without an image the vision tower computes a small one, with a gradient of zero: under FSDP
        all ranks must call it, and before the language model.
        """
        inputs = dict[str, Tensor]()
        tokens = layout.tokens
        if layout.rope is not None:
            own = layout.positions
            if own is None:
                own = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            inputs["position_ids"] = torch.cat([own[None], layout.rope.permute(2, 0, 1)])
        where = tokens < 0
        ids: list[int] = tokens[where].tolist() if any(layout.images or ()) else []
        if not ids:
            base: Any = model.base_model
            features = base.get_image_features(**self.stand_in(layout), return_dict=True)
            parts = [features.pooler_output, *(features.get("deepstack_features") or ())]
            embeddings = model.get_input_embeddings()(tokens)
            whole = (
                part if isinstance(part, Tensor) else torch.cat(tuple(part)) for part in parts
            )  # of all images
            nothing = torch.stack([part.sum() for part in whole]).sum() * 0.0
            return inputs | {
                "input_ids": None,
                "inputs_embeds": embeddings + nothing.to(embeddings.dtype),
            }
        known = {_image_id(image): image for row in layout.images or () for image in row}
        images: list[Image] = []
        while ids:
            images.append(known[ids[0]])
            del ids[: self.processor.placeholders_in(images[-1])]
        inputs["input_ids"] = tokens.masked_fill(where, self.processor.placeholder)
        return inputs | self._features(images, tokens.device)

    def stand_in(self, layout: Layout) -> dict[str, Tensor]:
        """What the tower computes for rows without images."""
        return self._features([self.processor.blank], layout.tokens.device)

    def _features(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in self.processor.features(images).items()}

    def without_placeholders(self, logits: Tensor) -> Tensor:
        """``[..., vocabulary]``, differentiable."""
        return logits.index_fill(-1, self.banned.to(logits.device), NEVER)


def _image_id(image: Image) -> int:
    return -1 - int(image.digest[:15], 16)
