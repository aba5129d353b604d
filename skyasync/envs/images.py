"""How pictures are recognised in prompts and rows, and the error for them.

Invariant: models are trained on text alone, so a picture raises an error wherever one may come in, and is never dropped
without a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NO_IMAGES = "images are not read here: models are trained on text alone"

#: Columns that hold pictures, or films, in the data of other systems.
COLUMNS = ("images", "image", "videos", "video", "multi_modal_data", "multi_modal_inputs", "mm_train_inputs")
_FILE = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mov|webm)(\?.*)?$|^data:(image|video)/", re.IGNORECASE)
_WORDS = ("image", "video")


def image_part(part: object) -> str:
    """The type of a content part that is a picture or a film, "" for any other."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) and any(word in kind for word in _WORDS) else ""


def image_column(row: Mapping[str, object]) -> str:
    """The first column of a row that holds pictures; "" if there is none.

    A column may be called image and hold the name of something else, such as a container's: text is taken for a
    picture if it names a file of one.
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
    return isinstance(value, str | bytes | Sequence | Mapping) and not len(value)
