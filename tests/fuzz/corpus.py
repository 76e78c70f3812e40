"""Where inputs come from and where they are kept: real payloads, bombs, the corpus, regressions.

The corpus of a target is one file of inputs, each after its length; a regression is a file of its
own, `TARGET-DIGEST.bin`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from experience_buffer import trxp
from experience_buffer._codec.frame import split_frame
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer.errors import TrxpError
from experience_buffer.packed import PackedRow, pack
from experience_buffer.v1 import service_pb2
from tests.fuzz import messages
from tests.fuzz.bombs import BOMBS

_DATA: Final = Path(__file__).parents[1] / "data"
FOLDER: Final = _DATA / "fuzz"
REGRESSIONS: Final = FOLDER / "regressions"
MAX_CORPUS_BYTES: Final = 96 * 1024
"""Of one target: what is kept of it in the repository."""
_LENGTH: Final = struct.Struct("<I")
_SAME: Final = {"compiled": "push", "rewrite": "push"}
"""Targets that read the same, and share a corpus."""


def seeds(target: str) -> list[bytes]:
    """Real inputs of a target, and those written by hand against it."""
    payloads = [path.read_bytes() for path in sorted((_DATA / "trxp").glob("*.bin"))]
    bombs = [make() for make in BOMBS.values()]
    match target:
        case "metadata":
            return [part for payload in payloads + bombs for part in _parts(payload)[:1]]
        case "tensors":
            return [part for payload in payloads + bombs for part in _parts(payload)[1:]]
        case "packed":
            return _packed(payloads)
        case "annotation":
            return [message.SerializeToString() for message in _annotations()]
        case "requests":
            return messages.seeds()
        case "verbs":
            return [bytes(16)]
    return payloads + bombs


def kept(target: str) -> list[bytes]:
    """The corpus of a target: inputs that each reached something new."""
    path = FOLDER / f"{_SAME.get(target, target)}.corpus"
    data = path.read_bytes() if path.exists() else b""
    found, pos = [], 0
    while pos < len(data):
        (size,) = _LENGTH.unpack_from(data, pos)
        found.append(data[pos + _LENGTH.size : pos + _LENGTH.size + size])
        pos += _LENGTH.size + size
    return found


def keep(target: str, inputs: Iterable[bytes]) -> int:
    """Store the smallest of these as the corpus; returns how many."""
    pieces: list[bytes] = []
    room = MAX_CORPUS_BYTES
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        room -= _LENGTH.size + len(data)
        if room < 0:
            break
        pieces.append(_LENGTH.pack(len(data)) + data)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{_SAME.get(target, target)}.corpus").write_bytes(b"".join(pieces))
    return len(pieces)


def regressions(target: str) -> list[bytes]:
    """Inputs that once were findings."""
    return [path.read_bytes() for path in sorted(REGRESSIONS.glob(f"{target}-*.bin"))]


def save_finding(target: str, data: bytes) -> Path:
    REGRESSIONS.mkdir(parents=True, exist_ok=True)
    path = REGRESSIONS / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path


def _parts(payload: bytes) -> tuple[bytes, ...]:
    try:
        return tuple(bytes(part) for part in split_frame(payload, limits=DEFAULT_LIMITS))
    except TrxpError:
        return ()


def _packed(payloads: Iterable[bytes]) -> list[bytes]:
    found, all_rows = [b"".join(pack([]))], []
    for payload in payloads:
        try:
            singles = trxp.split(payload)
        except TrxpError:
            continue
        rows = [
            PackedRow(uid=str(i), group="g", payload=single, tensors={}, flags=("masked",))
            for i, single in enumerate(singles[:3])
        ]
        found.append(b"".join(pack(rows)))
        all_rows += rows[:1]
    return [*found, b"".join(pack(all_rows[:5]))]


def _annotations() -> list[service_pb2.Annotation]:
    table = b'{"values":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'.ljust(64)
    tensors = _LENGTH.pack(len(table)) + bytes(4) + table + bytes(12)
    full = service_pb2.Annotation(uid="1/2/3/5/a", reward=1.5, tensors=tensors)
    full.info.update({"baseline_reward": 0.5, "values": [1, 2, 3], "a": {"b": [True, None, "c"]}})
    whole = service_pb2.Annotation(uid="x", tensors=tensors)
    whole.info.update({"model_version": 7.0, "num_turns": 2.0, "env_state_hash": "h"})
    return [full, whole, service_pb2.Annotation(uid="y", reward=float("nan"))]
