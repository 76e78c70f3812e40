"""A real server with estimators of the operator's own, from a module beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experience_buffer import Experience, trxp
from experience_buffer.v1 import service_pb2
from tests.integration.plain import STORED, create, experience, push, sample, statuses
from tests.integration.server import MakeServer, Stub, eventually

MODULE = '''
"""Estimators of the operator's own."""
import os
import numpy as np

with open(os.environ["WHO_IMPORTS"], "a", encoding="ascii") as file:
    print(os.getpid(), file=file)


def above_best(rewards, batch, parameters):
    """How far each reward is from the best of its group."""
    best = np.maximum.reduceat(rewards, batch.group_offsets[:-1])
    if parameters.strict and best.max() > 100:
        raise ValueError("no reward is that large")
    return (rewards - np.repeat(best, np.diff(batch.group_offsets))) * parameters.scale


def counted(rewards, batch, parameters):
    """Each token how many tokens of its experience come before it, from `start` on."""
    lengths = np.diff(batch.offsets)
    return parameters.start + np.arange(len(batch.mask)) - np.repeat(batch.offsets[:-1], lengths)
'''
TOML = """
[estimators.above_best]
path = "own_advantages:above_best"
needs = ["reward"]
parameters = { scale = 1.0, strict = true }
[estimators.counted]
path = "own_advantages:counted"
computes = "tokens"
compares = "item"
needs = ["reward"]
parameters = { start = 1 }
[buffers.items]
advantage = { estimator = "counted", start = 5 }
"""
MASK = [True, False, True, True, False, True, True, True, False, True, False]
REWARDS = (0.5, 0.75, -0.25)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_advantages.py").write_text(MODULE, encoding="utf-8")
    return {"PYTHONPATH": str(folder), "WHO_IMPORTS": str(tmp_path / "importers")}


def members(task: int, *, add: float = 0.0) -> list[Experience]:
    return [
        experience(task, run, reward=reward + add, action_mask=MASK)
        for run, reward in enumerate(REWARDS)
    ]


def sampled(stub: Stub, name: str, batch_size: int) -> list[list[float]]:
    """The advantages of what is sampled, in the order of the runs."""
    response = sample(stub, name, batch_size)
    found = [trxp.decode(one.payload)[0] for one in response.experiences]
    rows = {one.eid.run: one.advantages for one in found}
    return [row.tolist() for _, row in sorted(rows.items()) if row is not None]


def test_advantages_of_own_estimators_come_through_the_wire(
    make_server: MakeServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    server = make_server(toml=TOML, environment=environment)
    importers = {int(pid) for pid in (tmp_path / "importers").read_text("ascii").split()}
    assert importers == set(server.children("compute.worker")), "the worker alone imports it"
    with server.stub() as stub:
        parameters = {"scale": 2.0, "strict": True}
        create(stub, "groups", group_size=3, estimator="above_best", parameters=parameters)
        # Beside a group that it refuses.
        assert statuses(push(stub, "groups", members(2, add=100.0))) == [STORED] * 3
        assert statuses(push(stub, "groups", members(1))) == [STORED] * 3
        scores = [(reward - 0.75) * 2.0 for reward in REWARDS]
        expected = [[score if valid else 0.0 for valid in MASK] for score in scores]
        assert sampled(stub, "groups", 3) == expected
        request = service_pb2.GetStatsRequest(buffer="groups")

        def num_quarantined() -> int:
            return stub.GetStats(request).buffers[0].num_quarantined_groups

        assert eventually(num_quarantined, "the group that fails") == 1
        assert "no reward is that large" in server.tail()

        assert statuses(push(stub, "items", members(1))) == [STORED] * 3
        row = [5.0 + index if valid else 0.0 for index, valid in enumerate(MASK)]
        assert sampled(stub, "items", 3) == [row] * 3


def test_a_wrong_path_ends_the_start(make_server: MakeServer, environment: dict[str, str]) -> None:
    toml = TOML.replace("own_advantages:counted", "own_advantagse:counted")
    what = "estimators.counted.path: .*No module named 'own_advantagse'"
    with pytest.raises(AssertionError, match=f"(?s)it ended at once, with 2.*{what}") as ended:
        make_server(toml=toml, environment=environment)
    assert "Traceback" not in str(ended.value)
