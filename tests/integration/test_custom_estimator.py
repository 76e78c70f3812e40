"""A real server with estimators of the operator's own, from a module beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experience_buffer import Experience, trxp
from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.plain import STORED, create, error_of, experience, push, sample, statuses
from tests.integration.server import Server, Stub, eventually

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
    make_server: Callable[..., Server], tmp_path: Path, environment: dict[str, str]
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


@pytest.mark.parametrize("name", ["own_advantages:above_best", "os:system", "own_advantages"])
def test_no_call_names_code(
    make_server: Callable[..., Server], environment: dict[str, str], name: str
) -> None:
    server = make_server(toml=TOML, environment=environment)
    with server.stub() as stub:
        advantage = config_pb2.AdvantageConfig(estimator=name)
        update = service_pb2.UpdateBufferRequest(
            config=config_pb2.BufferConfig(name="items", advantage=advantage)
        )
        update.update_mask.paths.append("advantage")
        for call in (
            lambda: stub.UpdateBuffer(update),
            lambda: create(stub, "fresh", estimator=name),
        ):
            code, text, _ = error_of(call)
            assert code == "INVALID_ARGUMENT"
            assert f"unknown estimator {name!r}" in text


def serve(folder: Path, toml: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a server that is to end by itself; its status and what it said."""
    folder.mkdir(exist_ok=True)
    (folder / "server.toml").write_text(toml, encoding="utf-8")
    command = [sys.executable, "-m", "experience_buffer_server", "serve", "--config", "server.toml"]
    ended = subprocess.run(
        [*command, "--port", "0", "--metrics-port", "-1"],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("own_advantagse:counted", "ModuleNotFoundError: No module named 'own_advantagse'"),
        (
            "own_advantages:count",
            "AttributeError: module 'own_advantages' has no attribute 'count'",
        ),
        ("own_advantages:__doc__", "of type str, which can't be called"),
    ],
)
def test_a_wrong_path_ends_the_start(
    tmp_path: Path, environment: dict[str, str], path: str, reason: str
) -> None:
    toml = TOML.replace("own_advantages:counted", path)
    status, said = serve(tmp_path / "server", toml, environment)
    assert status == 2
    assert "experience-buffer: estimators.counted.path: " in said
    assert reason in said
    assert "Traceback" not in said
    assert "listening" not in said


def test_a_stored_buffer_needs_its_estimator(
    make_server: Callable[..., Server], environment: dict[str, str]
) -> None:
    server = make_server(toml=TOML, environment=environment)
    with server.stub() as stub:
        push(stub, "items", members(1))
    assert server.stop() == 0
    status, said = serve(server.folder, "", environment)
    assert status == 2
    assert "stored buffer 'items': advantage: unknown estimator 'counted'" in said
    assert "Traceback" not in said
    server.start()
    with server.stub() as stub:
        assert len(sampled(stub, "items", 3)) == 3
