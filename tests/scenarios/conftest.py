"""A store and buffers per test, as the tests of the rooms have them."""

from tests.unit.conftest import forked_writers as forked_writers
from tests.unit.conftest import world as world
