"""Vision-language models: placeholders of images in tokens, and the model's inputs for them.

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
from itertools import chain
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
    """Whether a model of transformers can read images in addition to text."""
    return config_value(config, "vision_config") is not None


def placeholders(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for images or videos."""
    image_id = config.image_token_id
    return sorted({image_id, config_value(config, "video_token_id", image_id)})


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
            type_names = ", ".join(FAMILIES)
            raise UserError(
                f"{path} is a model of type {config.model_type}; types that can read images here: {type_names}"
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
        self._processed = lru_cache(CACHED)(self._process)
        # Tokens are small: they stay as long as their image, when the features are gone.
        self._tokens_of_images: WeakKeyDictionary[Image, list[int]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # an engine's thread and the event loop share it

    def _process(self, image: Image) -> _Processed:
        picture = decoded(image)
        with self._lock:
            try:
                inputs = self._processor(
                    text=[self._processor.image_token],
                    images=[[picture]],
                    return_tensors="pt",
                    add_special_tokens=False,
                )
            except ValueError as error:
                size = f"{picture.width} x {picture.height} pixels"
                raise UserError(
                    f"the model's processor cannot read an image of {size}: {error}"
                ) from error
        tokens = inputs["input_ids"][0].tolist()
        features = dict(inputs)
        for name in _NO_FEATURES:
            features.pop(name, None)
        return _Processed(tokens, features)

    def _tokens(self, image: Image) -> list[int]:
        tokens = self._tokens_of_images.get(image)
        if tokens is None:
            tokens = self._processed(image).tokens
            self._tokens_of_images[image] = tokens
        return tokens

    def placeholders_in(self, image: Image) -> int:
        """Count the placeholders in the tokens of an image."""
        return self._tokens(image).count(self.placeholder)

    def expand(self, tokens: Sequence[int], images: Images) -> Ints:
        """Replace each placeholder by the tokens of its image.

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
        remaining_images = iter(images)
        result = list[int]()
        for token in tokens:
            if token == self.placeholder:
                result += self._tokens(next(remaining_images))
            else:
                result.append(token)
        return ints(result)

    def collapse(self, tokens: Sequence[int], images: Images) -> list[int]:
        """Undo ``expand``.

        Raises:
            UserError: if they are not those of these images.
        """
        remaining_tokens = list(tokens)
        result = list[int]()
        for image in images:
            image_tokens = self._tokens(image)
            if self.placeholder not in remaining_tokens:
                break
            # An image's tokens may begin with others, such as a token for its start.
            offset = image_tokens.index(self.placeholder)
            start = remaining_tokens.index(self.placeholder) - offset
            end = start + len(image_tokens)
            if start < 0 or remaining_tokens[start:end] != image_tokens:
                break
            result += remaining_tokens[:start]
            result.append(self.placeholder)
            remaining_tokens = remaining_tokens[end:]
        else:
            result += remaining_tokens
        if result.count(self.placeholder) != len(images):
            raise UserError(
                f"the prompt's {len(tokens)} tokens do not hold those of its {len(images)} images, in order"
            )
        return result

    def features(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """The model's inputs for the images, joined along the family's dimension."""
        features_of_images = [self._processed(image).features for image in images]
        result = {}
        for name in features_of_images[0]:
            tensors = [features[name] for features in features_of_images]
            result[name] = torch.cat(tensors, self._join)
        return result

    @cached_property
    def blank(self) -> Image:
        """A small image, not grey: Idefics3 drops images of zeros."""
        from PIL import Image as PIL

        return read_image(PIL.new("RGB", (28, 28), (255, 0, 0)))


processor_of = lru_cache(4)(ImageProcessor)


def blank_prompt(path: str, tokens: Sequence[int]) -> ImageTokens:
    """An image and then the tokens, for the model of this folder or hub name."""
    processor = processor_of(path)
    images = (processor.blank,)
    return ImageTokens(processor.expand([processor.placeholder, *tokens], images), images)


class Vision:
    """Inputs of a loaded vision-language model in addition to tokens."""

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
        flat = list(chain.from_iterable(images))
        if not flat:
            return {}
        for row, row_images in zip(tokens.tolist(), images, strict=True):
            self.processor.collapse(row, row_images)
        inputs = self._features(flat, tokens.device)
        if GRID in inputs:
            inputs["mm_token_type_ids"] = (tokens == self.processor.placeholder).long()
        return inputs

    def with_image_ids(self, batch: B, model: PreTrainedModel) -> B:
        """Replace placeholders in a batch by ids of their images, and add positions of M-RoPE.

        A placeholder is no loss token: no policy can sample it.

        An id is a negative number by an image's content: tokens of different images differ, as
        those of texts do.

        Raises:
            UserError: if a row's tokens are not those of its images.
        """
        images = batch.images or ()
        flat = list(chain.from_iterable(images))
        if not flat:
            return batch
        for row, row_images in zip(batch.tokens.tolist(), images, strict=True):
            self.processor.collapse(row, row_images)
        is_placeholder = batch.tokens == self.processor.placeholder  # [rows, length]
        ids: list[int] = []
        for image in flat:
            ids += [_image_id(image)] * self.processor.placeholders_in(image)
        new_batch = copy(batch)
        new_batch.loss_mask = batch.loss_mask.bool() & ~is_placeholder
        # masked_scatter goes through the mask row by row, in the order of the images.
        new_batch.tokens = batch.tokens.masked_scatter(is_placeholder, torch.tensor(ids))
        if GRID in self.processor.features(flat[:1]):
            # Image by image, so that only the cache's features are in memory.
            grids = torch.cat([self.processor.features([image])[GRID] for image in flat])
            base: Any = model.base_model
            # [3, rows, length]
            positions, _ = base.get_rope_index(
                batch.tokens, is_placeholder.long(), image_grid_thw=grids
            )
            new_batch.rope = positions.permute(1, 2, 0)
        return new_batch

    def inputs(self, layout: Layout, model: PreTrainedModel) -> dict[str, Tensor]:
        """Arguments of the model for a layout of such a batch.

        Without an image the vision tower computes a small one, with a gradient of zero: under FSDP
        all ranks must call it, and before the language model.
        """
        inputs: dict[str, Any] = {}
        tokens = layout.tokens  # [packed rows, width]
        if layout.rope is not None:
            text_positions = layout.positions
            if text_positions is None:
                text_positions = torch.arange(tokens.shape[1], device=tokens.device)
                text_positions = text_positions.expand_as(tokens)
            # [4, packed rows, width]: models with M-RoPE take the text's positions first.
            inputs["position_ids"] = torch.cat([text_positions[None], layout.rope.permute(2, 0, 1)])
        is_image = tokens < 0
        ids: list[int] = []
        if any(layout.images or ()):
            ids = tokens[is_image].tolist()
        if not ids:
            base: Any = model.base_model
            features = base.get_image_features(**self.stand_in(layout), return_dict=True)
            embeddings = model.get_input_embeddings()(tokens)
            sums = []
            for output in (features.pooler_output, *(features.get("deepstack_features") or ())):
                # Some families give a tuple, one tensor per image.
                tensor = output if isinstance(output, Tensor) else torch.cat(tuple(output))
                sums.append(tensor.sum())
            zero = torch.stack(sums).sum() * 0.0  # connects the tower to the loss
            inputs["input_ids"] = None
            inputs["inputs_embeds"] = embeddings + zero.to(embeddings.dtype)
            return inputs
        images_by_id = {}
        for image in chain.from_iterable(layout.images or ()):
            images_by_id[_image_id(image)] = image
        # A shared prefix has its images once, so they are read off the tokens, not off the rows.
        images = []
        while ids:
            image = images_by_id[ids[0]]
            images.append(image)
            del ids[: self.processor.placeholders_in(image)]
        inputs["input_ids"] = tokens.masked_fill(is_image, self.processor.placeholder)
        inputs.update(self._features(images, tokens.device))
        return inputs

    def stand_in(self, layout: Layout) -> dict[str, Tensor]:
        """Features of a small image, which the tower computes for rows without images."""
        return self._features([self.processor.blank], layout.tokens.device)

    def _features(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in self.processor.features(images).items()}

    def without_placeholders(self, logits: Tensor) -> Tensor:
        """Logits ``[..., vocabulary]`` by which no placeholder is sampled; differentiable."""
        return logits.index_fill(-1, self.banned.to(logits.device), NEVER)


def _image_id(image: Image) -> int:
    # 15 hexadecimal digits are 60 bits, so the id fits an int64.
    return -1 - int(image.digest[:15], 16)
