"""Numbers by version: exact, in order, and small."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from experience_buffer_server.sampling.versions import Versions


@pytest.mark.parametrize("seed", range(5))
def test_as_sets_by_version_would(seed: int) -> None:
    chance = random.Random(seed)
    versions = Versions()
    model: dict[int, set[int | None]] = defaultdict(set)
    for _ in range(4000):
        version, number = chance.randrange(30), chance.randrange(300)
        match chance.choice(("add", "add", "discard", "take")):
            case "add":
                versions.add(version, number)
                model[version].add(number)
            case "discard":
                versions.discard(version, number)
                model[version].discard(number)
            case _:
                taken = next(versions.take_below(version), None)
                lowest = min((v for v, there in model.items() if there), default=version)
                if lowest < version:
                    assert taken in model[lowest]
                    model[lowest].remove(taken)
                else:
                    assert taken is None
        assert len(versions) == sum(map(len, model.values()))


def test_what_is_there_no_more_takes_no_memory() -> None:
    versions = Versions()
    for number in range(10_000):
        versions.add(number, number)
        versions.discard(number, number)
    assert not versions._maps
    assert len(versions._heap) <= 65


def test_others_may_come_and_go_while_some_are_taken() -> None:
    versions = Versions()
    for number in range(200):
        versions.add(number % 3, number)
    taken = versions.take_below(2)
    first = next(taken)
    assert first % 3 == 0
    for number in range(0, 200, 3):
        versions.discard(0, number)
    versions.add(0, 500)
    assert next(taken) == 500
    assert next(taken) % 3 == 1
