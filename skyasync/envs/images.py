"""Images in prompts and rows, and the errors for content that is not read.

Invariant: a value that may hold an image is read, or raises an error; it is never dropped without a
message. Columns ``images`` and ``image`` and the parts that OpenAI's and Hugging Face's chats have
are read; videos and audio are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyasync.errors import UserError
from skyasync.models.images import Image, data_url, images_of, read_image

NO_IMAGES = "images are not read here: rows, observations of environments and messages to the endpoint can have them"
NO_VIDEOS = "of texts and images, only these are read"

READ = ("images", "image")  # columns that are read
_PLACEHOLDER = "<image>"  # the mark of an image in a prompt's text
#: Columns that hold pictures, or films, in the data of other systems.
COLUMNS = (
    "images",
    "image",
    "videos",
    "video",
    "multi_modal_data",
    "multi_modal_inputs",
    "mm_train_inputs",
)
_FILE = re.compile(
    r"\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mov|webm)(\?.*)?$|^data:(image|video)/", re.IGNORECASE
)
_WORDS = ("image", "video")


def image_part(part: object) -> str:
    """The type of a content part that is a picture or a film, "" for any other."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and any(word in kind for word in _WORDS):
        return kind
    return ""


def image_column(row: Mapping[str, object]) -> str:
    """The first column of a row that holds pictures; "" if there is none.

    A column may be called image and hold the name of something else, such as a container's: text is
    taken for a picture if it names a file of one.
    """
    for name in COLUMNS:
        if _holds_picture(row.get(name)):
            return name
    return ""


def _holds_picture(value: object) -> bool:
    if isinstance(value, str):
        return _FILE.search(value) is not None
    if isinstance(value, Mapping):  # {bytes, path}, {image: [...]}
        return any(inner is not None and not _is_empty(inner) for inner in value.values())
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return any(_holds_picture(inner) for inner in value)
    # Any object that is not plain data: bytes, a PIL image, a tensor.
    return not (value is None or isinstance(value, bool | int | float) or _is_empty(value))


def _is_empty(value: object) -> bool:
    return isinstance(value, Sequence | Mapping) and not len(value)


def read_parts(content: Sequence[Any], *, files: bool = True) -> list[Any]:
    """Content parts with each image read, as ``{"type": "image", "image": Image}``.

    Other parts are unchanged.

    Args:
        files: as of ``read_image``.

    Raises:
        UserError: for an image that cannot be read, a video or audio.
    """
    result: list[Any] = []
    for part in content:
        kind = image_part(part)
        if not kind:
            result.append(part)
            continue
        if kind not in ("image", "image_url", "input_image"):
            raise UserError(f"a message's content has parts of type {kind}: {NO_VIDEOS}")
        value = _image_value(part)
        if value is None:
            raise UserError(
                f"a content part of type {kind} has no image: give it as {kind!r}; found {sorted(part)}"
            )
        result.append(_new_part(read_image(value, files=files)))
    return result


def _image_value(part: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The image of a content part as ``read_image`` takes it; None if there is none."""
    value: Any = None
    for name in ("image", "image_url", "url", "path", "source"):
        if part.get(name) is not None:
            value = part[name]
            break
    if isinstance(value, Mapping) and "url" in value:  # OpenAI's chat completions
        return value["url"]
    if isinstance(value, Mapping) and "data" in value:  # Anthropic's messages
        return f"data:{value.get('media_type')};base64,{value['data']}"
    return value


def _new_part(image: Image) -> dict[str, Any]:
    return {"type": "image", "image": image}


def read_messages(conversation: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The messages, with their images read."""
    if isinstance(conversation, str):
        return conversation
    if not any(isinstance(message.get("content"), list) for message in conversation):
        return conversation  # texts alone, as in most runs
    messages = []
    for message in conversation:
        if isinstance(message.get("content"), list):
            message = {**message, "content": read_parts(message["content"])}
        messages.append(message)
    return messages


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[object]
) -> list[dict[str, Any]]:
    """The messages with the ``images`` of a row's column as content parts.

    An image replaces ``<image>`` in a text of the user, or a content part of type image without
    one. If there are neither, all images stand before the first text of the user.

    Raises:
        UserError: if there are such places, and more or fewer of them than images.
    """
    image_parts = [_new_part(read_image(value)) for value in images]
    unused = iter(image_parts)
    slot_count = 0
    result = [dict(message) for message in messages]
    for message in result:
        is_user = message["role"] == "user"
        content = list[Any]()
        for part in _parts_of(message.get("content") or ""):
            for fragment in _split_at_slots(part, is_user=is_user):
                if fragment is not _SLOT:
                    content.append(fragment)
                    continue
                slot_count += 1
                image = next(unused, None)
                if image is not None:  # else there are too many slots: the error is raised below
                    content.append(image)
        if any(image_part(part) for part in content):
            message["content"] = content
    if slot_count == 0 and image_parts:
        user_messages = [message for message in result if message["role"] == "user"]
        target = user_messages[0] if user_messages else result[0]
        target["content"] = [*image_parts, *_parts_of(target["content"])]
    elif slot_count != len(image_parts):
        raise UserError(
            f"the prompt has {slot_count} places for images, and the row has {len(image_parts)} images"
        )
    return result


_SLOT = object()  # of an image, among content parts


def _split_at_slots(part: Any, *, is_user: bool) -> list[Any]:  # noqa: ANN401
    """A content part as itself, or as ``_SLOT``, or as texts with ``_SLOT`` between them."""
    if not isinstance(part, Mapping):
        return [part]
    if part.get("type") == "image":
        has_image = any(part.get(name) is not None for name in ("image", "url", "path"))
        return [part] if has_image else [_SLOT]
    if not is_user or part.get("type") != "text" or _PLACEHOLDER not in part["text"]:
        return [part]
    fragments: list[Any] = []
    for number, text in enumerate(part["text"].split(_PLACEHOLDER)):
        if number > 0:
            fragments.append(_SLOT)
        if text:
            fragments.append({"type": "text", "text": text})
    return fragments


def _parts_of(content: Any) -> Any:  # noqa: ANN401
    """The parts of a message's content, which may be a text alone."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def with_urls(messages: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The messages as OpenAI's clients send them: images as data: URLs."""
    if not images_of(messages):
        return messages

    def encoded(part: Any) -> Any:  # noqa: ANN401
        if image_part(part):
            return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
        return part

    result = []
    for message in messages:
        if isinstance(message["content"], list):
            message = {**message, "content": [encoded(part) for part in message["content"]]}
        result.append(message)
    return result


def as_text(content: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The text of content parts, for people: ``<image>`` stands for an image."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        texts.append(_PLACEHOLDER if image_part(part) else str(part.get("text", "")))
    return "".join(texts)
