"""An experience as one run of bytes, for systems that store nothing else.

A header of fixed length (identity and reward), then the arrays, metadata and text, whose lengths
follow from the size. Nothing but copies: what a careful user of such a system would do.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import METADATA_BYTES, TEXT_BYTES, Received, Rollout, Size

_HEADER = struct.Struct("<qqqd")


@dataclass(frozen=True, slots=True)
class Arrays:
    """One experience, its arrays as views on the bytes that came."""

    writer: int
    number: int
    run: int
    reward: float
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.bool_]
    metadata: bytes
    text: bytes
    image: NDArray[np.uint8] | None


def encode(writer: int, number: int, run: int, rollout: Rollout) -> bytes:
    """Lay out one experience."""
    return b"".join(
        (
            _HEADER.pack(writer, number, run, rollout.reward),
            rollout.tokens.tobytes(),
            rollout.logprobs.tobytes(),
            rollout.mask.tobytes(),
            json.dumps(rollout.metadata, sort_keys=True).encode(),
            rollout.text.encode(),
            b"" if rollout.image is None else rollout.image.data,
        )
    )


def decode(data: bytes, size: Size) -> Arrays:
    """Make arrays of one experience's bytes."""
    writer, number, run, reward = _HEADER.unpack_from(data)
    at = _HEADER.size
    tokens = np.frombuffer(data, np.int32, size.num_tokens, at)
    at += tokens.nbytes
    logprobs = np.frombuffer(data, np.float32, size.num_response_tokens, at)
    at += logprobs.nbytes
    mask = np.frombuffer(data, np.bool_, size.num_response_tokens, at)
    at += mask.nbytes
    end = at + METADATA_BYTES
    image = np.frombuffer(data, np.uint8, size.image_bytes, end + TEXT_BYTES)
    return Arrays(
        writer=writer,
        number=number,
        run=run,
        reward=reward,
        tokens=tokens,
        logprobs=logprobs,
        mask=mask,
        metadata=data[at:end],
        text=data[end : end + TEXT_BYTES],
        image=image if size.image_bytes else None,
    )


def received(arrays: Arrays) -> Received:
    """What came, for `workload.check`."""
    rollout = Rollout(
        tokens=arrays.tokens,
        logprobs=arrays.logprobs,
        mask=arrays.mask,
        reward=arrays.reward,
        metadata=json.loads(arrays.metadata),
        text=arrays.text.decode(),
        image=arrays.image,
    )
    return Received(arrays.writer, arrays.number, arrays.run, rollout)
