"""Images are found by what they are: a browser gets PNG and JPEG and nothing that says it is one."""

from __future__ import annotations

import base64
import struct

import torch

from experience_buffer import trxp
from experience_buffer._codec.item import Item
from experience_buffer_server.web.inside.images import images_of, media_type, size_of
from tests.unit.builders import experience

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480) + bytes(9)
JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08\x01\xe0\x02\x80" + bytes(12)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


def item_with(**fields: object) -> Item:
    (item,) = trxp.read(trxp.encode([experience(1, 0, **fields)]))
    assert isinstance(item, Item)
    return item


def url(kind: str, data: bytes) -> dict[str, object]:
    where = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": where}}


def test_images_of_a_conversation_and_of_tensors_are_found() -> None:
    messages = [{"role": "user", "content": [url("image/png", PNG), url("image/png", JPEG)]}]
    pixels = torch.frombuffer(bytearray(PNG), dtype=torch.uint8)
    item = item_with(messages=messages, multi_modal_inputs={"file": pixels}, info={"shot": JPEG})
    found = {info.path: (info.media_type, info.width, info.height) for info, _ in images_of(item)}
    assert found == {
        "info.shot": ("image/jpeg", 640, 480),
        "messages.0.content.0.image_url.url": ("image/png", 640, 480),
        "messages.0.content.1.image_url.url": ("image/jpeg", 640, 480),
        "multi_modal_inputs.file": ("image/png", 640, 480),
    }
    assert [info.index for info, _ in images_of(item)] == [0, 1, 2, 3]


def test_what_only_says_that_it_is_an_image_is_none() -> None:
    content = [url("image/png", SVG), url("image/svg+xml", SVG), url("image/png", b"")]
    content.append({"url": "data:image/png;base64,%%%"})
    assert images_of(item_with(messages=[{"role": "user", "content": content}])) == []
    assert media_type(SVG) == ""


def test_a_size_that_can_t_be_told_isn_t() -> None:
    assert size_of(PNG[:20]) is None
    assert size_of(JPEG[:9]) is None
    assert size_of(b"\xff\xd8\xff\xc0\x00\x00") is None


def test_only_so_much_is_looked_through() -> None:
    """An image behind more entries than that isn't found, and what comes before isn't copied."""
    item = item_with(info={"numbers": list(range(30_000)), "shot": PNG})
    assert [info.path for info, _ in images_of(item)] == ["info.shot"]
    item = item_with(info={"numbers": [*range(30_000), PNG]})
    assert images_of(item) == []
