"""Random histories of a buffer against the model: groups, leases, ranks, rewinds, limits, crashes.

`make test-long` is a longer run, with other histories than the last one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.models.buffer_port import BufferPort
from tests.models.port import GATED_READERS, READERS, Choose
from tests.models.rules import RULES, LocalPlayer
from tests.refusing_store import Mortality
from tests.unit.builders import World

T = TypeVar("T")
STEPS_PER_HISTORY = 100
EVERY_RUN = 12_000
NUM_STEPS = int(os.environ.get("NUM_STEPS", EVERY_RUN))

WEIGHTS: dict[Callable[[LocalPlayer, Choose], None], int] = {
    **{getattr(LocalPlayer, play.__name__): weight for play, weight in RULES.items()},
    LocalPlayer.expire: 4,
    LocalPlayer.crash: 2,
    LocalPlayer.crash_during: 3,
    LocalPlayer.push_at_once: 4,
    LocalPlayer.overdue: 1,
}
PLAYS = {play.__name__: play for play in WEIGHTS}
NAMES = [play.__name__ for play, weight in WEIGHTS.items() for _ in range(weight)]
"""One rule for all: chosen rule by rule, most histories would lack a push, a sample or an ack."""


class Drawn:
    """Hypothesis decides."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def one_of(self, options: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


class Histories(RuleBasedStateMachine):
    """One buffer, its model, and everything that may happen to both."""

    world: ClassVar[World]
    loop: ClassVar[asyncio.AbstractEventLoop]
    mortality: ClassVar[Mortality]
    num_histories: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0
    port: BufferPort
    player: LocalPlayer

    @initialize(
        some=st.sets(st.sampled_from(sorted(READERS)), min_size=1, max_size=5),
        is_gated=st.sampled_from([True, False, False]),
    )
    def begin(self, some: set[str], is_gated: bool) -> None:
        failures.clear()
        Histories.num_histories += 1
        possible = GATED_READERS if is_gated else READERS
        names = [name for name in possible if name in some] or ["trainer"]
        readers = {name: READERS[name] for name in names}
        self.port = BufferPort(
            self.world,
            self.loop,
            self.mortality,
            Histories.num_histories,
            readers,
            estimator="rloo" if is_gated else "",
        )
        self.player = LocalPlayer(self.port, names, is_gated=is_gated)

    def teardown(self) -> None:
        if hasattr(self, "port"):
            self.port.close()

    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(NAMES), label="rule")
        PLAYS[name](self.player, Drawn(data))

    @invariant()
    def is_as_the_model_says(self) -> None:
        if hasattr(self, "player"):
            Histories.num_steps += 1
            self.player.check()
            assert not failures, failures


class Failures(logging.Handler):
    """What failed in the background, where no caller hears of it."""

    def emit(self, record: logging.LogRecord) -> None:
        failures.append(f"{record.getMessage()}: {record.exc_info}")


failures: list[str] = []


async def _open(world: World) -> None:
    await world.open()
    world.computer.start()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Histories]]:
    class Machine(Histories):
        world = World(tmp_path / "store")
        loop = asyncio.new_event_loop()

    handler, logger = Failures(), logging.getLogger("experience_buffer_server.runtime.tasks")
    logger.addHandler(handler)
    Machine.loop.run_until_complete(_open(Machine.world))
    Machine.mortality = Mortality(Machine.world.store)
    yield Machine
    Machine.loop.run_until_complete(Machine.world.close())
    Machine.loop.close()
    logger.removeHandler(handler)
    failures.clear()


@pytest.mark.timeout(600 if NUM_STEPS <= EVERY_RUN else 0)
def test_histories(machine: type[Histories]) -> None:
    Histories.num_steps = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_STEPS // STEPS_PER_HISTORY,
            stateful_step_count=STEPS_PER_HISTORY,
            # What every run does must hold every time; the long run looks for what nobody has seen.
            derandomize=NUM_STEPS <= EVERY_RUN,
            # A history that fails is told as it is: making it smaller can take minutes.
            phases=(Phase.generate,),
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Histories.num_steps >= NUM_STEPS * 5 // 6
