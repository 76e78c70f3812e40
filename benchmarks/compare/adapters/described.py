"""An experience as bytes that say what they hold: a table of tensors, and the rest as JSON.

What users of a store of bytes choose where lengths differ from experience to experience and other
programs read them too; `blobs.py` is the hand-laid opposite, whose reader has to know every length.
"""

from __future__ import annotations

import json
import struct

from safetensors.numpy import load, save

from benchmarks.compare.adapters.blobs import Arrays
from benchmarks.workload import Rollout, Size

_LENGTH = struct.Struct("<I")


def encode(writer: int, number: int, run: int, rollout: Rollout) -> bytes:
    """Write one experience."""
    tensors = {"tokens": rollout.tokens, "logprobs": rollout.logprobs, "mask": rollout.mask}
    if rollout.image is not None:
        tensors["image"] = rollout.image
    rest = {
        "id": (writer, number, run),
        "reward": rollout.reward,
        "metadata": rollout.metadata,
        "text": rollout.text,
    }
    table = json.dumps(rest).encode()
    return b"".join((_LENGTH.pack(len(table)), table, save(tensors)))


def decode(data: bytes, size: Size) -> Arrays:
    """Make arrays of one experience's bytes; the size isn't needed, they say it themselves."""
    del size
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    rest = json.loads(data[_LENGTH.size : start])
    tensors = load(data[start:])
    writer, number, run = rest["id"]
    return Arrays(
        writer=writer,
        number=number,
        run=run,
        reward=rest["reward"],
        tokens=tensors["tokens"],
        logprobs=tensors["logprobs"],
        mask=tensors["mask"],
        metadata=json.dumps(rest["metadata"], sort_keys=True).encode(),
        text=rest["text"].encode(),
        image=tensors.get("image"),
    )
