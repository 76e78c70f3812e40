"""Estimators of the operator's own: declared by the file alone, loaded by the worker alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experience_buffer.errors import InvalidRequestError
from experience_buffer_server.advantages.estimators import custom_functions
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.buffer import registry
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.settings_checks import checked_settings
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.estimators import EstimatorSettings
from experience_buffer_server.settings.server import (
    ComputeSection,
    ConfigurationError,
    Settings,
    load_settings,
)
from tests.unit.builders import World, push, until

TOML = """
[buffers.m]
advantage = { estimator = "mine", alpha = 2, reward_clip = 3.0 }
[estimators.mine]
path = "own_module.deep:Holder.scores"
needs = ["reward|token_level_reward"]
parameters = { alpha = 0.5, mode = "x", on = true }
"""
MODULE = """
import os

def fatal(rewards, batch, parameters):
    with open(os.environ["FATAL_LAUNCHES"], "a") as file:
        file.write("launch ")
    os._exit(7)

def doubled(rewards, batch, parameters):
    if 0.4 in rewards.astype("f4").astype("f8").round(6):
        raise LookupError("no 0.4")
    return rewards * parameters.factor
"""
DOUBLED: dict[str, Any] = {
    "path": "own_estimators_of_a_test:doubled", "needs": ("reward",), "parameters": {"factor": 2.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_stays_declared() -> Iterator[None]:
    yield
    custom.declare({})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the operator's, where the worker finds it."""
    path = tmp_path / "modules" / "own_estimators_of_a_test.py"
    path.parent.mkdir()
    path.write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(path.parent), prepend=os.pathsep)
    return path


def load(folder: Path, text: str) -> Settings:
    path = folder / "server.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(path)


def declare(**changes: Any) -> dict[str, EstimatorSettings]:
    section = EstimatorSettings(**(DOUBLED | changes))
    custom.declare({"mine": section.spec("mine")})
    return {"mine": section}


def own_computer(world: World, estimators: dict[str, EstimatorSettings], **compute: Any) -> None:
    settings = ComputeSection(**({"device": "cpu", "max_latency_seconds": 0.0} | compute))
    world.computer = Computer(settings, str(world.path), world.metrics, estimators=estimators)


# --- the configuration


def test_a_buffer_uses_what_the_file_declares(tmp_path: Path) -> None:
    settings = load(tmp_path, TOML)
    section = settings.estimators["mine"]
    assert (section.computes, section.compares) == ("scores", "group")
    assert section.path == "own_module.deep:Holder.scores"
    plan = settings.buffers["m"].advantage.plan
    assert plan is not None
    assert plan.parameters.alpha == 2.0  # type: ignore[attr-defined]
    assert plan.needs == ("reward|token_level_reward",)
    stored = settings.buffers["m"].model_dump_json()
    assert BufferSettings.model_validate_json(stored) == settings.buffers["m"]
    assert "own_module" not in sys.modules


def test_another_configuration_forgets_it(tmp_path: Path) -> None:
    load(tmp_path, TOML)
    load_settings()
    with pytest.raises(InvalidRequestError, match="unknown estimator 'mine'"):
        checked_settings({"advantage": {"estimator": "mine"}})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"own_module.deep:Holder.scores"',
            '"own_module.deep"',
            "estimators.mine.path: give 'module.of",
        ),
        ('"own_module.deep:Holder.scores"', '"os; x:f"', "estimators.mine.path: give 'module.of"),
        ('path = "own_module.deep:Holder.scores"', "", "estimators.mine.path: Field required"),
        ('["reward|token_level_reward"]', "[]", "estimators.mine.needs: empty; name at least"),
        ("needs =", 'computes = "x"\nneeds =', "estimators.mine.computes: .*'scores' or 'tokens'"),
        ("needs =", 'compares = "x"\nneeds =', "estimators.mine.compares: .*'group' or 'item'"),
        ("needs =", "needed =", "estimators.mine.needed: unknown key"),
        ("alpha = 0.5", "gamma = 0.5", "estimators.mine.parameters: 'gamma' is taken"),
        ("alpha = 0.5", "alpha = inf", "estimators.mine.parameters: the default of 'alpha' is inf"),
        ("estimators.mine", "estimators.grpo", "estimators.grpo.*: 'grpo' is a built-in"),
        ("estimators.mine", "estimators.'a.b'", "estimators.a.b.*: give a letter"),
        ("estimators.mine", "estimators.yours", "buffers.m.advantage: unknown estimator 'mine'"),
        ("alpha = 2", "beta = 2", "buffers.m.advantage: .*'mine' has no parameter 'beta'"),
    ],
)
def test_an_error_names_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, TOML.replace(old, new))


def test_the_environment_declares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERIENCE_BUFFER_ESTIMATORS__MINE__PATH", "os:system")
    with pytest.raises(ConfigurationError, match="ESTIMATORS__MINE__PATH: declare estimators in"):
        load_settings()


@pytest.mark.parametrize("name", ["os:system", "own_module.deep:Holder.scores", "own_module"])
def test_no_buffer_names_a_path(tmp_path: Path, name: str) -> None:
    load(tmp_path, TOML)
    with pytest.raises(InvalidRequestError, match="unknown estimator"):
        checked_settings({"advantage": {"estimator": name}})
    with pytest.raises(InvalidRequestError, match="'mine' has no parameter 'path'"):
        checked_settings({"advantage": {"estimator": "mine", "path": "os:system"}})


async def test_a_stored_buffer_without_its_estimator_is_named(world: World) -> None:
    declare()
    buffer = await world.create(advantage={"estimator": "mine"})
    custom.declare({})
    own = Registry(Settings(), world.store, world.computer, Metrics())
    with pytest.raises(ConfigurationError) as caught:
        await own.load()
    assert str(caught.value).startswith(
        f"stored buffer {buffer.name!r}: advantage: unknown estimat"
    )
    assert "declare [estimators.NAME]" in str(caught.value)
    declare()
    again = registry.Registry(Settings(), world.store, world.computer, Metrics())
    await again.load()
    assert again.get(buffer.name).settings == buffer.settings


# --- the worker


@pytest.mark.on_disk
@pytest.mark.parametrize("factor", [3.0, 2**70])
async def test_the_worker_computes_it_and_fails_alone_where_it_fails(
    world: World, module: Path, factor: float
) -> None:
    own_computer(world, declare())
    await world.computer.check()
    buffer = await world.create(group_size=2, advantage={"estimator": "mine", "factor": factor})
    for members in ((0, 0), (0, 1)), ((1, 0), (1, 2)), ((2, 3), (2, 4)):
        await buffer.push(push(*members))
    world.computer.start()
    await until(lambda: not buffer.flow.computing.num_jobs)
    reasons = {entry.record.tid: entry.quarantine for entry in buffer.state.contents}
    assert reasons.pop("2/1") == (
        "estimator 'mine': LookupError: no 0.4 (line 11 of own_estimators_of_a_test.py)"
    )
    assert reasons == {"2/0": "", "2/2": ""}
    assert "own_estimators_of_a_test" not in sys.modules


@pytest.mark.on_disk
async def test_what_ends_the_worker_is_launched_twice(
    world: World, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = tmp_path / "launches"
    monkeypatch.setenv("FATAL_LAUNCHES", str(launches))
    own_computer(world, declare(path="own_estimators_of_a_test:fatal"))
    buffer = await world.create(group_size=2, advantage={"estimator": "mine"})
    await buffer.push(push((0, 0), (0, 1)))
    world.computer.start()
    await until(lambda: not buffer.flow.computing.num_jobs)
    reasons = {entry.quarantine for entry in buffer.state.contents}
    assert reasons == {"computing it ends the advantage worker (ended with status 7)"}
    assert launches.read_text(encoding="utf-8").split() == ["launch", "launch"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "no_such_module:f"}, "estimators.mine.path: can't load 'no_such_module:f': Mod"),
        ({"path": "own_estimators_of_a_test:x"}, "estimators.mine.path: .*AttributeError"),
        ({"path": "own_estimators_of_a_test:__name__"}, "estimators.mine.path: .*of type str"),
    ],
)
async def test_what_the_worker_cannot_load_is_an_error_of_the_configuration(
    world: World, module: Path, changes: dict[str, str], message: str
) -> None:
    own_computer(world, declare(**changes))
    with pytest.raises(ConfigurationError, match=message):
        await world.computer.check()


async def test_another_reason_not_to_start_is_no_error_of_the_configuration(
    world: World, module: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_computer(world, declare())
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with caplog.at_level(logging.ERROR):
        await world.computer.check()
    assert "can't start, whole groups wait" in caplog.text


@pytest.mark.on_disk
async def test_a_module_that_breaks_later_is_not_the_fault_of_the_groups(
    world: World, module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_computer(world, declare())
    module.write_text("raise OSError", encoding="utf-8")
    world.computer.start()
    buffer = await world.create(group_size=2, advantage={"estimator": "mine"})
    await buffer.push(push((0, 0), (0, 1)))
    await until(lambda: "can't load 'own_estimators_of_a_test:doubled': OSError" in caplog.text)
    module.write_text(MODULE, encoding="utf-8")
    await until(lambda: not buffer.flow.computing.num_jobs)
    assert [entry.available for entry in buffer.state.contents] == [True, True]


class Odd(Exception):
    """One whose text can't be made."""

    def __str__(self) -> str:
        return str(self.args[7])


@pytest.mark.parametrize(
    ("error", "words"),
    [(Odd(1), "Odd"), (ValueError("no \udcff.txt"), r"ValueError: no \udcff.txt")],
)
def test_any_exception_is_described(error: Exception, words: str) -> None:
    assert custom_functions._describe(error) == words
    words.encode()
