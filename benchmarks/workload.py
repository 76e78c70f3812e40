"""The experiences that all benchmarks use, as arrays: three text sizes, and one with an image.

Content is random, so that a system that compresses gains nothing, and known: it follows from the
experience's number, so whoever reads one can tell what it must hold. Plain numpy, without this
project's own packages: other systems' workers import it in environments of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP_SIZE = 8
POOL_GROUPS = 16
"""Groups of distinct content; group number n has the content of n modulo this."""
METADATA_BYTES = 200
TEXT_BYTES = 2048
_VOCABULARY = 32_000
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps")


@dataclass(frozen=True, slots=True)
class Size:
    """What one experience measures, and how many go together."""

    name: str
    num_tokens: int
    num_response_tokens: int
    image_bytes: int = 0
    group_size: int = GROUP_SIZE
    batch_groups: int = 8
    """Groups in a sampled batch."""

    @property
    def batch_size(self) -> int:
        """Experiences in a sampled batch."""
        return self.group_size * self.batch_groups

    @property
    def num_bytes(self) -> int:
        """Content of one experience: arrays, reward, metadata and text."""
        arrays = 4 * self.num_tokens + 5 * self.num_response_tokens + self.image_bytes
        return arrays + 8 + METADATA_BYTES + TEXT_BYTES


SIZES = {
    "S": Size("S", 512, 384),
    "M": Size("M", 2048, 1536),
    "L": Size("L", 16384, 12288),
}
IMAGE = Size("image", 512, 384, image_bytes=8 * 2**20, group_size=1, batch_groups=4)
"""Multimodal: 8 MiB of pixels; alone in its group, since eight exceed a message."""
ALL_SIZES = {**SIZES, IMAGE.name: IMAGE}


@dataclass(frozen=True)
class Rollout:
    """The content of one experience."""

    tokens: NDArray[np.int32]
    """Shape [num_tokens]."""
    logprobs: NDArray[np.float32]
    """Shape [num_response_tokens]."""
    mask: NDArray[np.bool_]
    """Shape [num_response_tokens]."""
    reward: float
    metadata: dict[str, Any]
    """Takes `METADATA_BYTES` as JSON."""
    text: str
    """ASCII, `TEXT_BYTES` long."""
    image: NDArray[np.uint8] | None = None
    """Shape [image_bytes]."""

    @cached_property
    def metadata_json(self) -> bytes:
        """The metadata as systems without metadata of their own are given it."""
        return encode_metadata(self.metadata)

    @cached_property
    def digest(self) -> bytes:
        """Of everything."""
        hasher = hashlib.blake2b(digest_size=16)
        for array, dtype in (
            (self.tokens, np.int32),
            (self.logprobs, np.float32),
            (self.mask, np.bool_),
            (self.image, np.uint8),
        ):
            if array is not None:
                if array.dtype != dtype:
                    raise ValueError(f"an array of {array.dtype} came, not of {dtype.__name__}")
                hasher.update(np.ascontiguousarray(array).data)
        hasher.update(f"{self.reward!r} {self.metadata_json.decode()} {self.text}".encode())
        return hasher.digest()


@dataclass(frozen=True)
class Received:
    """An experience as a reader got it: which one it says it is, and its content."""

    writer: int
    number: int
    """Of its group, counted by its writer."""
    run: int
    """Place in its group."""
    rollout: Rollout


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """JSON, the same bytes for equal metadata."""
    return json.dumps(metadata, sort_keys=True).encode()


def pool(size: Size) -> list[list[Rollout]]:
    """The groups' contents, the same in every process."""
    generator = np.random.default_rng(size.num_tokens + size.image_bytes)
    return [
        [_rollout(size, index * size.group_size + run, generator) for run in range(size.group_size)]
        for index in range(POOL_GROUPS)
    ]


def check(
    received: Sequence[Received],
    size: Size,
    contents: Sequence[Sequence[Rollout]],
    *,
    whole: bool = True,
) -> None:
    """Check one sampled batch: every experience's content, and that each came once.

    Args:
        received: The batch.
        size: What it should be.
        contents: Of `pool`.
        whole: Whether its groups must be whole.

    Raises:
        ValueError: Something else came than was pushed.
    """
    if len(received) != size.batch_size:
        raise ValueError(f"a batch of {len(received)} came, not of {size.batch_size}")
    runs: dict[tuple[int, int], list[int]] = {}
    for item in received:
        expected = contents[item.number % POOL_GROUPS][item.run]
        if item.rollout.digest != expected.digest:
            raise ValueError(f"{item.writer}/{item.number}/{item.run} has other content")
        runs.setdefault((item.writer, item.number), []).append(item.run)
    for group, found in runs.items():
        expected_runs = list(range(size.group_size)) if whole else sorted(set(found))
        if sorted(found) != expected_runs:
            raise ValueError(f"group {group} came with the members {found}")


def _rollout(size: Size, index: int, generator: np.random.Generator) -> Rollout:
    words = generator.choice(_WORDS, TEXT_BYTES // 2)
    image = generator.integers(0, 256, size.image_bytes, np.uint8) if size.image_bytes else None
    return Rollout(
        tokens=generator.integers(0, _VOCABULARY, size.num_tokens, np.int32),
        logprobs=-generator.exponential(1.0, size.num_response_tokens).astype(np.float32),
        mask=generator.random(size.num_response_tokens) < 0.9,
        reward=float(index % 3),
        metadata=_metadata(index),
        text=" ".join(words)[:TEXT_BYTES],
        image=image,
    )


def _metadata(index: int) -> dict[str, Any]:
    metadata = {"model_version": 3, "temperature": 0.7, "index": index, "source": ""}
    metadata["source"] = "x" * (METADATA_BYTES - len(encode_metadata(metadata)))
    return metadata
