"""A server where torch isn't installed: it does everything, and says what a GPU would need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experience_buffer import (
    AdvantageConfig,
    BufferConfig,
    Client,
    ConsumerConfig,
    Experience,
)
from experience_buffer_server.advantages import plan
from tests.integration.plain import group
from tests.integration.server import MakeServer, Server, eventually
from tests.integration.test_estimators import NUM, PARAMETERS, TASKS, experiences
from tests.integration.test_readme import quickstart

INSTALL = "needs torch, which isn't installed here: pip install 'experience-buffer[gpu]'"
BLOCK = '''
"""Loaded by Python itself: what is imported from here on finds no torch."""
import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoTorch())
'''
OWN = """
import numpy as np

def centred(rewards, batch, parameters):
    return rewards - np.mean(rewards)

def at_its_call(rewards, batch, parameters):
    import torch
    return torch.as_tensor(rewards)
"""
TOML = """
[estimators.{name}]
path = "{module}:{name}"
needs = ["reward"]
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    (folder / "own_numbers.py").write_text(OWN, encoding="utf-8")
    (folder / "own_tensors.py").write_text("import torch.nn\ncentred = max", encoding="utf-8")
    # Another environment than that of the tests gets an interpreter of its own.
    return {"PYTHONPATH": str(folder), "WITHOUT_TORCH": "1"}


def delivered(client: Client, estimator: str, pushed: list[Experience]) -> dict[str, list[float]]:
    """Per uid, the advantages that come of it; as columns for every other estimator."""
    parameters = PARAMETERS[estimator] | {"batch_wait_seconds": 0.0}
    parameters["batch_size"] = TASKS if plan(estimator, parameters).scope == "group" else NUM
    config = BufferConfig(
        f"without-torch-{estimator}",
        group_size=NUM // TASKS,
        advantage=AdvantageConfig(estimator, parameters),
        consumers=(ConsumerConfig("trainer"),),
    )
    client.create_buffer(config)
    client.push(pushed, buffer=config.name)
    is_packed = len(estimator) % 2 == 0
    batch = client.sample(
        NUM, buffer=config.name, timeout=60.0, format="packed" if is_packed else "trxp"
    )
    rows = {one.eid.uid: one.advantages for one in batch.experiences}
    assert len(rows) == NUM, batch.shortfall
    return {uid: row.tolist() for uid, row in rows.items() if row is not None}


def test_every_estimator_computes_the_same_without_torch(
    make_server: MakeServer, shared_server: Server, environment: dict[str, str]
) -> None:
    server = make_server(environment=environment, compiled_reader=True)
    pushed = experiences()
    with Client(server.address) as without, Client(shared_server.address) as usual:
        for estimator in PARAMETERS:
            expected = delivered(usual, estimator, pushed)
            assert delivered(without, estimator, pushed) == expected
    assert server.stop() == 0
    assert not [line for line in server.log if '"ERROR"' in line or "Traceback" in line]


def test_what_comes_late_is_computed_without_torch(
    make_server: MakeServer, environment: dict[str, str]
) -> None:
    server = make_server(environment=environment)
    with Client(server.address) as client:
        advantage = AdvantageConfig("rloo")
        trainer = ConsumerConfig("trainer", "group")
        client.create_buffer(
            BufferConfig(
                "late",
                group_size=2,
                advantage=advantage,
                consumers=(trainer,),
                on_missing_field="wait",
            )
        )
        pushed = group(1, 2, reward=None)
        client.push(pushed, buffer="late")
        late = {one.eid.uid: {"reward": float(run)} for run, one in enumerate(pushed)}
        client.annotate(late, buffer="late")
        batch = client.sample(1, buffer="late", timeout=40.0)
        assert [one.reward for one in batch.experiences] == [0.0, 1.0]
        advantages = [one.advantages for one in batch.experiences]
        assert [float(row[0]) for row in advantages if row is not None] == [-1.0, 1.0]
        batch.ack()


def test_the_first_quickstart_of_a_machine_needs_no_torch(
    make_server: MakeServer, environment: dict[str, str], tmp_path: Path
) -> None:
    """As after `make run` in a fresh clone: nothing is compiled yet, on neither side there is torch."""
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "compiled")
    environment["EXPERIENCE_BUFFER_COMPUTE__START_EARLY"] = "True"
    server = make_server(environment=environment, compiled_reader=True)
    code = quickstart().replace("127.0.0.1:50051", server.address)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("4 stored\n[["), done.stderr
    assert list((tmp_path / "compiled").glob("**/cpu_kernels.spread-*.nbi"))


def test_own_estimators_need_no_torch(make_server: MakeServer, environment: dict[str, str]) -> None:
    toml = TOML.format(name="centred", module="own_numbers")
    toml += TOML.format(name="at_its_call", module="own_numbers")
    server = make_server(environment=environment, toml=toml)
    with Client(server.address) as client:
        for estimator in ("centred", "at_its_call"):
            advantage, trainer = AdvantageConfig(estimator), ConsumerConfig("trainer", "group")
            client.create_buffer(
                BufferConfig(estimator, group_size=2, advantage=advantage, consumers=(trainer,))
            )
            client.push(group(1, 2), buffer=estimator)
        batch = client.sample(1, buffer="centred", timeout=40.0)
        assert len(batch.experiences) == 2

        def quarantined() -> int:
            return client.get_stats("at_its_call").buffers[0].num_quarantined_groups

        assert eventually(quarantined, "the one that imports torch") == 1
    assert f"estimator 'at_its_call': ModuleNotFoundError: it {INSTALL}" in server.tail()


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ('[compute]\ndevice = "cuda:0"', f"compute.device = 'cuda:0' {INSTALL}"),
        ('[compute]\ndevice = "torch:cpu"', f"compute.device = 'torch:cpu' {INSTALL}"),
        (
            TOML.format(name="centred", module="own_tensors"),
            "estimators.centred.path: can't load 'own_tensors:centred': ModuleNotFoundError: it "
            + INSTALL,
        ),
    ],
)
def test_what_needs_torch_ends_the_start_and_says_what_to_install(
    make_server: MakeServer, environment: dict[str, str], toml: str, what: str
) -> None:
    with pytest.raises(AssertionError, match="it ended at once, with 2") as ended:
        make_server(environment=environment, toml=toml)
    assert what in str(ended.value)
    assert "Traceback" not in str(ended.value)
