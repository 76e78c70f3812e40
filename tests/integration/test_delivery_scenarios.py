"""The histories of the delivery machine, a seed each, on a real server that is killed in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

from tests.integration.server import MakeServer
from tests.integration.server_port import ServerPort
from tests.models.port import READERS
from tests.models.rules import RULES, Player

T = TypeVar("T")
NUM_STEPS = 250
PLAYS = RULES | {Player.lapse: 1, Player.crash: 1, Player.crash_during: 1}
"""A death of the server takes a second."""


class Seeded:
    """A seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one_of(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


@pytest.mark.parametrize("seed", range(2))
def test_a_real_server_delivers_as_the_model_says(
    make_server: MakeServer, name: str, seed: int
) -> None:
    choose = Seeded(seed)
    names = [one for one in READERS if choose.number(0, 1)] or ["trainer"]
    server = make_server()
    port = ServerPort(server, name, {one: READERS[one] for one in names})
    player = Player(port, names)
    played = []
    try:
        for play in choose.random.choices(list(PLAYS), list(PLAYS.values()), k=NUM_STEPS):
            played.append(play.__name__)
            play(player, choose)
            player.check()
    except BaseException as error:
        error.add_note(f"step {len(played)}: {', '.join(played[-20:])}")
        raise
    finally:
        port.close()
