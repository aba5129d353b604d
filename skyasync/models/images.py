"""Images as one opaque payload, from a dataset's row to the engine and to the trained model.

Invariant: images of equal content are one object in a process, also after pickling, so a group, a
checkpoint or a message between processes holds each of them once. Only ``skyasync.models.vision``
looks inside.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from skyasync.config.model_files import config_file, read_json
from skyasync.errors import UserError

THUMBNAIL = 160  # the longer side, in pixels
# of an image: 200 MB when it is decoded, and its file may be 1,000 times less
MOST_PIXELS = 1 << 26
#: Formats that are read, by Pillow's names. Others may start a program (EPS) or are not for pictures.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")


class VisionFamily(NamedTuple):
    """A type of models that read images.

    Args:
        joined: the dimension along which the features of several images are joined.
        tower, projector: beginnings of the names of their parameters; the tower is without its
            projector.
    """

    joined: int
    tower: str
    projector: tuple[str, ...]


_QWEN = VisionFamily(
    0, "model.visual", ("model.visual.merger", "model.visual.deepstack_merger_list")
)
_IDEFICS = VisionFamily(1, "model.vision_model", ("model.connector",))
_LLAVA = VisionFamily(0, "model.vision_tower", ("model.multi_modal_projector",))
FAMILIES = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava": _LLAVA,
}


@lru_cache
def reads_images(model: str) -> bool:
    """Whether the model of a folder or a hub name, on this machine, is of one of these types."""
    file = config_file(model) if model else None
    settings = read_json(file, model) if file else {}
    return bool(settings.get("vision_config")) and settings.get("model_type") in FAMILIES


class Image:
    """An encoded image (PNG, JPEG, ...). Images of equal content are identical."""

    __slots__ = ("__weakref__", "data", "digest")
    data: bytes
    digest: str

    def __new__(cls, data: bytes) -> Image:
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        image = _KNOWN.get(digest)
        if image is None:
            image = super().__new__(cls)
            image.data = data
            image.digest = digest
            image = _KNOWN.setdefault(digest, image)
        return image

    def __reduce__(self) -> tuple[type[Image], tuple[bytes]]:
        return Image, (self.data,)

    def __repr__(self) -> str:
        return f"Image({self.digest})"


_KNOWN: WeakValueDictionary[str, Image] = WeakValueDictionary()
Images = tuple[Image, ...]
"""Images of one sequence, in the order of their placeholders."""


class ImageTokens(list[int]):
    """Tokens with the images of their placeholders, where tokens alone are expected."""

    def __init__(self, tokens: Iterable[int] = (), images: Images = ()) -> None:
        super().__init__(tokens)
        self.images = images

    @staticmethod
    def images_of(tokens: Sequence[int]) -> Images:
        if isinstance(tokens, ImageTokens):
            return tokens.images
        return ()


def read_image(value: Any, *, files: bool = True) -> Image:  # noqa: ANN401
    """Read an image.

    It is bytes, a file, a data: or file: URL, a Hugging Face ``{bytes, path}``, or a PIL image.

    Args:
        files: read files of this machine. If false, they are rejected, and only the header of the
            image is read (``pixels``): what others send is not decoded on the caller's event loop.

    Raises:
        UserError: if it is none of these, or cannot be decoded.
    """
    from PIL import Image as PIL

    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping) and (value.keys() & {"bytes", "path"}):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, PIL.Image):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        value = buffer.getvalue()
    if isinstance(value, str) and value.startswith("data:"):
        kind, _, text = value.partition(",")
        value = None
        if kind.endswith(";base64"):
            with suppress(binascii.Error):
                value = base64.b64decode(text, validate=True)
        if value is None:  # also of an invalid base64
            raise UserError(
                f"the image's URL is not data:image/...;base64,...; found {kind[:60]!r}"
            )
    if isinstance(value, str | Path):
        if not files:
            raise UserError(
                f"an image here is a data:image/...;base64,... URL; found {str(value)[:100]!r}"
            )
        address = urlsplit(str(value))
        if address.scheme in ("http", "https"):
            raise UserError(
                f"images are not downloaded: store {str(value)[:100]!r} as a file, and name the file"
            )
        path = Path(unquote(address.path) if address.scheme == "file" else value)
        try:
            value = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"the image {str(path)[:200]!r} cannot be read: {error.strerror}"
            ) from error
    if not isinstance(value, bytes | bytearray):
        raise UserError(
            f"an image is bytes, a file, a data: URL or a PIL image; found {str(value)[:80]!r}"
        )
    image = Image(bytes(value))
    if files:
        decoded(image)
    else:
        pixels(image)
    return image


@lru_cache(64)
def data_url(image: Image) -> str:
    """The image as OpenAI's API takes it.

    The cache gives all callers one text, so that a message holds it once.
    """
    from PIL import Image as PIL

    with PIL.open(io.BytesIO(image.data)) as picture:
        kind = PIL.MIME.get(picture.format or "", "image/png")
    return f"data:{kind};base64,{base64.b64encode(image.data).decode()}"


@lru_cache(64)
def rgb_url(image: Image) -> str:
    """The pixels of ``decoded``, for a server that would decode the image in another way.

    Servers turn images by their EXIF, and put transparent ones on white.
    """
    from PIL import Image as PIL

    with PIL.open(io.BytesIO(image.data)) as picture:
        plain = (
            picture.format in ("PNG", "JPEG") and picture.mode == "RGB" and not picture.getexif()
        )
    return data_url(image if plain else read_image(decoded(image)))


@lru_cache(64)
def thumbnail_url(image: Image) -> str:
    """A small copy for people."""
    small = decoded(image)
    buffer = io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(buffer, "JPEG")
    return data_url(Image(buffer.getvalue()))


def decoded(image: Image) -> Any:  # noqa: ANN401
    """Decode an image: a PIL image with three channels."""
    with _opened(image) as picture:
        return picture.convert("RGB")


def pixels(image: Image) -> int:
    """Width times height, from the image's header."""
    with _opened(image) as picture:
        return int(picture.width * picture.height)


@contextmanager
def _opened(image: Image) -> Iterator[Any]:
    """Open an image: a PIL image whose header has been read.

    Raises:
        UserError: if it is of none of ``FORMATS``, has more than ``MOST_PIXELS``, or cannot be
            decoded inside.
    """
    try:
        from PIL import Image as PIL
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise UserError(
            "images need Pillow and torchvision: pip install pillow torchvision"
        ) from error
    problem = f"an image of {len(image.data)} bytes cannot be decoded"
    PIL.init()  # fills PIL.OPEN: some builds of Pillow lack formats
    formats = [name for name in FORMATS if name in PIL.OPEN]
    try:
        with PIL.open(io.BytesIO(image.data), formats=formats) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                size = f"{picture.width} x {picture.height} pixels"
                raise UserError(f"{problem}: it has {size}; {MOST_PIXELS} are the most")
            yield picture
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        struct.error,
        PIL.DecompressionBombError,
    ) as error:
        reason: object = error
        if isinstance(error, UnidentifiedImageError):
            reason = f"it begins with {image.data[:12]!r}, which is not an image format"
        raise UserError(f"{problem}: {reason}") from error


def images_of(conversation: Any) -> Images:  # noqa: ANN401
    """The images of a conversation whose parts have been read, in order."""
    if isinstance(conversation, str):
        return ()
    images = []
    for message in conversation:
        content = message.get("content")
        if not isinstance(content, list):  # a text
            continue
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "image":
                images.append(part["image"])
    return tuple(images)
