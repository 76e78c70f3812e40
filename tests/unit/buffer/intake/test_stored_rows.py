"""What a payload becomes in the store stays the same: refusals to the letter, rows to the bit.

The digests in `stored_rows.json` were made when all of it was read and written the long way. A change
that is meant to change what is stored, or said, makes them anew with `python -m
tests.unit.buffer.intake.test_stored_rows`.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest

from experience_buffer import trxp
from experience_buffer.errors import TrxpError
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.intake.push import record_of
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.store import row_codec
from tests.unit.builders import DATA, settings
from tests.unit.odd_payloads import PAYLOADS

EXPECTED = DATA.parent / "stored_rows.json"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grpo": {"advantage": {"estimator": "grpo"}, "on_bad_reward": "tombstone"},
    "gae": {"advantage": {"estimator": "gae"}, "on_missing_field": "wait"},
    "late": {"advantage": {"estimator": "remax"}, "on_future_version": "refuse"},
}
MAX_SHOWN = 16
"""Rows of a payload that are kept one by one."""
NAMES = [*sorted(path.stem for path in DATA.glob("*.bin")), *PAYLOADS]


def rows(name: str, kind: str) -> list[str]:
    """What becomes of each experience of a payload: why it is refused, or digests of its rows."""
    path = DATA / f"{name}.bin"
    data = PAYLOADS[name] if name in PAYLOADS else path.read_bytes()
    try:
        items = trxp.read(data)
    except TrxpError as error:
        return [str(error)]
    made = [_row(item, kind) for item in items]
    return made if len(made) <= MAX_SHOWN else [_digest("\n".join(made).encode())]


def _row(item: trxp.Item | TrxpError, kind: str) -> str:
    if isinstance(item, TrxpError):
        return str(item)
    found = admit(item, settings(**KINDS[kind]), published=1)
    if not isinstance(found, Candidate):
        return f"{found.reason} {found.message} {found.uid}"
    record = row_codec.encode_record(record_of(found, 0.0), msgpack.packb)
    return f"{_digest(record)} {_digest(bytes(found.payload))}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


@cache
def expected() -> dict[str, dict[str, list[str]]]:
    """By payload and kind of buffer."""
    document: dict[str, dict[str, list[str]]] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_refusals_are_what_they_were(name: str) -> None:
    assert {kind: rows(name, kind) for kind in KINDS} == expected()[name]


def main(path: Path) -> None:
    """Make the digests anew."""
    made = {name: {kind: rows(name, kind) for kind in KINDS} for name in NAMES}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(EXPECTED)
