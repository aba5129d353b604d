"""How images are recognised in prompts and rows, and the errors for what is not read.

Invariant: what may hold an image is read, or raises an error; it is never dropped without a
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

#: Columns that are read, and the mark in a prompt's text where an image stands.
READ = ("images", "image")
_PLACEHOLDER = "<image>"
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
    return next((name for name in COLUMNS if _holds_picture(row.get(name))), "")


def _holds_picture(value: object) -> bool:
    if isinstance(value, str):
        return _FILE.search(value) is not None
    if isinstance(value, Mapping):  # {bytes, path}, {image: [...]}
        return any(inner is not None and not _is_empty(inner) for inner in value.values())
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return any(_holds_picture(inner) for inner in value)
    return not (value is None or isinstance(value, bool | int | float) or _is_empty(value))


def _is_empty(value: object) -> bool:
    return isinstance(value, Sequence | Mapping) and not len(value)


def read_parts(content: Sequence[Any], *, files: bool = True) -> list[Any]:
    """Content parts with each image read, as ``{"type": "image", "image": Image}``; the others as
    they are.

    Args:
        files: as of ``read_image``.

    Raises:
        UserError: for an image that cannot be read, a video or audio.
    """
    parts: list[Any] = []
    for part in content:
        kind = image_part(part)
        if not kind:
            parts.append(part)
            continue
        if kind not in ("image", "image_url", "input_image"):
            raise UserError(f"a message's content has parts of type {kind}: {NO_VIDEOS}")
        named = [
            part[name]
            for name in ("image", "image_url", "url", "path", "source")
            if part.get(name) is not None
        ]
        if not named:
            raise UserError(
                f"a content part of type {kind} has no image: give it as {kind!r}; found {sorted(part)}"
            )
        value = named[0]
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        elif isinstance(value, Mapping) and "data" in value:  # Anthropic's
            value = f"data:{value.get('media_type')};base64,{value['data']}"
        parts.append({"type": "image", "image": read_image(value, files=files)})
    return parts


def read_messages(conversation: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The messages, with their images read."""
    if isinstance(conversation, str) or not any(
        isinstance(m.get("content"), list) for m in conversation
    ):
        return conversation
    return [
        {**message, "content": read_parts(message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in conversation
    ]


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[object]
) -> list[dict[str, Any]]:
    """The messages with the ``images`` of a row's column as content parts.

    An image replaces ``<image>`` in a text of the user, or a content part of type image without
    one. If there are neither, all stand before the first text of the user.

    Raises:
        UserError: if there are such places, and more or fewer of them than images.
    """
    read: list[Image] = [read_image(value) for value in images]
    placed = 0
    result = [dict(message) for message in messages]
    for message in result:
        content = message.get("content") or ""
        parts = list[Any]()
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if not isinstance(part, Mapping):
                parts.append(part)
            elif part.get("type") == "image" and all(
                part.get(name) is None for name in ("image", "url", "path")
            ):
                parts += [{"type": "image", "image": image} for image in read[placed : placed + 1]]
                placed += 1
            elif (
                message["role"] == "user"
                and part.get("type") == "text"
                and _PLACEHOLDER in part["text"]
            ):
                before, *after = part["text"].split(_PLACEHOLDER)
                parts += [{"type": "text", "text": before}] if before else []
                for text in after:
                    parts += [
                        {"type": "image", "image": image} for image in read[placed : placed + 1]
                    ]
                    parts += [{"type": "text", "text": text}] if text else []
                    placed += 1
            else:
                parts.append(part)
        if any(image_part(part) for part in parts):
            message["content"] = parts
    if not placed and read:
        user_message = next((message for message in result if message["role"] == "user"), result[0])
        content = user_message["content"]
        if isinstance(content, str):
            text = [{"type": "text", "text": content}]
        else:
            text = content
        user_message["content"] = [*({"type": "image", "image": image} for image in read), *text]
    elif placed != len(read):
        raise UserError(
            f"the prompt has {placed} places for images, and the row has {len(read)} images"
        )
    return result


def with_urls(messages: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The messages as OpenAI's clients send them: images as data: URLs."""
    if not images_of(messages):
        return messages

    def sent(part: Any) -> Any:  # noqa: ANN401
        if image_part(part):
            return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
        return part

    return [
        {**message, "content": [sent(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def as_text(content: Any) -> Any:  # noqa: ANN401  (a text stays one)
    """The text of content parts, for people: ``<image>`` stands for an image."""
    if not isinstance(content, list):
        return content
    return "".join(
        _PLACEHOLDER if image_part(part) else str(part.get("text", "")) for part in content
    )
