"""Images in a payload: found by what they are, not by what they say they are."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from experience_buffer._codec.item import MULTI_MODAL_PREFIX, Item
from experience_buffer._show import Shown

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_MOST_IMAGES: Final = 200
_MOST_NODES: Final = 20_000
_PATH_CHARS: Final = 500
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of JPEG behind which its size stands."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImageInfo(Shown):
    """An image of an experience.

    Attributes:
        index: Names it in /experience/image.
        path: Where it is, such as "messages.0.content.1.image_url.url".
        media_type: "image/png" or "image/jpeg", by its content.
        num_bytes: Its size.
        width: In pixels; None where it can't be told.
        height: In pixels; None where it can't be told.
    """

    index: int
    path: str
    media_type: str
    num_bytes: int
    width: int | None
    height: int | None


def images_of(item: Item) -> list[tuple[ImageInfo, bytes]]:
    """The images of an experience: data URLs and bytes in its texts, and tensors that hold a file."""
    found: list[tuple[ImageInfo, bytes]] = []
    for path, data in _candidates(item):
        if kind := media_type(data):
            width, height = size_of(data) or (None, None)
            info = ImageInfo(
                index=len(found),
                path=path,
                media_type=kind,
                num_bytes=len(data),
                width=width,
                height=height,
            )
            found.append((info, data))
            if len(found) == _MOST_IMAGES:
                break
    return found


def media_type(data: bytes) -> str:
    """What an image is, by its first bytes; empty for all that a browser needn't be given."""
    if data.startswith(_PNG):
        return "image/png"
    return "image/jpeg" if data.startswith(_JPEG) else ""


def _candidates(item: Item) -> Iterator[tuple[str, bytes]]:
    """Whatever may be an image, with its place."""
    left: deque[tuple[str, Any]] = deque(
        (name, item.meta.get(name))
        for name in ("messages", "chosen_messages", "rejected_messages", "info")
    )
    room = _MOST_NODES
    while left:
        path, value = left.popleft()
        if isinstance(value, (dict, list, tuple)):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            before = len(left)
            left += ((f"{path}.{key}"[:_PATH_CHARS], each) for key, each in islice(inside, room))
            room -= len(left) - before
        elif isinstance(value, bytes):
            yield path, value
        elif isinstance(value, str) and value.startswith("data:image/"):
            head, _, body = value.partition(",")
            if head.endswith(";base64"):
                try:
                    yield path, base64.b64decode(body, validate=True)
                except binascii.Error:
                    continue
    for name, view in item.tensors.items():
        if name.startswith(MULTI_MODAL_PREFIX) and view.dtype == "U8" and len(view.shape) == 1:
            yield f"multi_modal_inputs.{name.removeprefix(MULTI_MODAL_PREFIX)}", bytes(view.data)


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels; None where they can't be told."""
    if data.startswith(_PNG):
        size = data[16:24]
        if len(size) < 8:
            return None
        return int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker in _FRAMES:
            height, width = data[place + 5 : place + 7], data[place + 7 : place + 9]
            return int.from_bytes(width, "big"), int.from_bytes(height, "big")
        place += 2 + length
    return None
