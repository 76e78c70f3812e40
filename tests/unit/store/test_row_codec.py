"""Rows as they lie in the stores of today: whoever adds a field reads those on."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
)

LEASE: dict[str, Any] = {
    "id": 59, "consumer": "actor", "units": [[1, 2]], "deadline": 61.5, "num_experiences": 2,
}  # fmt: skip
ROWS: dict[str, tuple[Any, list[Any]]] = {
    "buffer": (
        BufferRow(id=1, name="b", config="{}", policy_version=None, create_time=2.5, moments="m"),
        [1, "b", "{}", None, 2.5, "m"],
    ),
    "group": (
        GroupRow(id=3, key="3/math", size=5, open_time=7.5, closed="whole", num_consumed=11),
        [3, "3/math", 5, 7.5, "whole", "", False, 11],
    ),
    "lease": (LeaseRow(**LEASE), [59, "actor", [[1, 2]], 61.5, "open", 2, [], {}]),
    "lease ": (
        LeaseRow(**LEASE, probabilities=[0.25]),
        [59, "actor", [[1, 2]], 61.5, "open", 2, [], {}, [0.25], []],
    ),
    "progress": (
        ProgressRow(seq=3, acked=["actor"], times_sampled={"actor": 2}),
        [3, ["actor"], {}, {"actor": 2}, {}, {}],
    ),
    "progress ": (ProgressRow(seq=3, uncounted=["a"]), [3, [], {}, {}, {}, {}, [], ["a"]]),
    "consumer": (ConsumerRow(name="actor", safe_step=13, last_step=17), ["actor", 13, 17, 0, 0]),
    "advantages": (
        AdvantageRow(seq=19, advantages=b"1234", returns=b"1234", details={"mean": 0.5}),
        [19, b"1234", None, {"mean": 0.5}],
    ),
}
"""By kind; those of today where there is a space behind it, and as they were before otherwise."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_stored_as_they_are_and_read_back(name: str) -> None:
    row, values = ROWS[name]
    kind = name.strip()
    stored = getattr(row_codec, f"encode_{kind}")(row, msgpack.packb)
    assert msgpack.unpackb(stored) == values
    assert getattr(row_codec, f"decode_{kind}")(stored) == row


def test_progress_of_before_it_said_who_passed_an_experience_over_is_read() -> None:
    old = msgpack.packb((3, ["actor", "critic"], {}, {"actor": 2, "critic": 0}, {}, {}))
    assert row_codec.decode_progress(old).passed_over == ["critic"]
