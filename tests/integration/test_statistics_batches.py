"""Who shared the statistics of a batch can be asked for, through the wire and over restarts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from experience_buffer import Client
from tests.integration.plain import create, group, push, sample
from tests.integration.server import Server

ESTIMATORS: dict[str, dict[str, Any]] = {
    "reinforce_plus_plus": {"batch_size": 4},  # It gathers experiences, the others groups.
    "rloo": {"cross_batch": "mean", "batch_size": 2},
    "grpo": {"advantage_norm_std": "batch", "batch_size": 2},
}
"""Each with parameters that make four experiences one batch."""


def uids(tasks: Sequence[int]) -> list[str]:
    return [one.eid.uid for task in tasks for one in group(task, 2)]


def digest(tasks: Sequence[int]) -> str:
    """What docs/advantages.md says of it."""
    text = json.dumps(sorted(uids(tasks)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_get_tells_of_any_two_whether_they_shared_a_batch(
    make_server: Callable[..., Server],
) -> None:
    server = make_server()
    with server.stub() as stub:
        for name, parameters in ESTIMATORS.items():
            given = parameters | {"batch_wait_seconds": 0}
            create(stub, name, group_size=2, estimator=name, parameters=given)
            push(stub, name, [one for task in range(5) for one in group(task, 2)])
            assert len(sample(stub, name, 8).experiences) == 8
    server.restart()
    with server.stub() as stub:
        for name in ESTIMATORS:
            # The fifth group, which waited in the first life, is computed with the sixth.
            push(stub, name, group(5, 2))
            assert len(sample(stub, name, 4).experiences) == 4
    with Client(server.address) as client:
        for name in ESTIMATORS:
            for tasks in ((0, 1), (2, 3), (4, 5)):
                found = [client.get(uid, buffer=name).computation for uid in uids(tasks)]
                recorded = [(own or {})["batch_id"] for own in found]
                assert recorded == [digest(tasks)] * 4
