"""A store and buffers per test, as the tests of the rooms have them."""

from __future__ import annotations

import pytest

from tests.refusing_store import Refusals
from tests.unit.builders import World
from tests.unit.conftest import forked_writers as forked_writers
from tests.unit.conftest import world as world


@pytest.fixture
def refusals(world: World) -> Refusals:
    """Decides about the commits of the world's store."""
    return Refusals(world.store)
