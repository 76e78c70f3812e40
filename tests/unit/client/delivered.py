"""Delivered batches without a server, in both formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experience_buffer import Client
from experience_buffer._messages.batch_data import LazyPacked, LazyPayloads
from experience_buffer._sync.batch import Batch
from experience_buffer.packed import PackedRow, pack


def delivered(rows: Sequence[PackedRow], format: str, **given: Any) -> Batch:
    """What a server delivers of these, as packed columns or as TRXP payloads."""
    is_packed = format == "packed"
    shown = () if is_packed else rows
    fields: dict[str, Any] = {
        "client": Client("127.0.0.1:1"),
        "buffer": "math",
        "consumer": "trainer",
        "lease_id": 11,
        "expire_time": math.inf,
        "rank": None,
        "world_size": 0,
        "uids": tuple(row.uid for row in shown),
        "groups": tuple(row.group for row in shown),
        "content": LazyPayloads([row.payload for row in shown]),
        "num_deliveries": tuple(row.num_deliveries for row in shown),
        "staleness": tuple(row.staleness for row in shown),
        "flags": tuple(tuple(row.flags) for row in shown),
        "probabilities": tuple(row.probability for row in shown),
        "times_sampled": tuple(row.times_sampled for row in shown),
        "generations": tuple(row.generation for row in shown),
        "columns": LazyPacked(bytearray().join(pack(rows))) if is_packed else None,
        "num_bytes": 1,
        "num_units": len(rows),
        "shortfall": "",
        "policy_version": None,
    }
    return Batch(**{**fields, **given})
