"""What a batch is picked of: within the bounds of what is leased, and of versions that are known."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from experience_buffer_server.buffer.delivery.batch_picking import Picked, pick, unit_of
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.state.events import BufferEvents
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import Store
from tests.unit.store.conftest import buffer_row, make_record

SIZES = (17, 19, 23)
PUBLISHED = 5


def entry(seq: int, size: int, *, uid: str = "u", max_version: int | None = 3) -> Entry:
    values: dict[str, Any] = {"uid": f"{uid}{seq}", "payload_bytes": size, "response_tokens": 2}
    versions = {"min_version": None, "max_version": max_version}
    return Entry(make_record(seq, **values, **versions), None, durable=True)


class Shelf:
    """Three units that a consumer may have, and what it picks of them."""

    def __init__(self, *, max_leased: int = 100, hold: bool = True, **settings: int) -> None:
        config = BufferSettings(on_future_version="hold" if hold else "deliver")
        row = buffer_row(1)
        row.config, row.policy_version = config.model_dump_json(), PUBLISHED
        limits = ServerSection.model_construct(max_leased_experiences=max_leased)
        self.state = BufferState(
            row,
            limits,
            events=create_autospec(BufferEvents),
            store=create_autospec(Store),
            metrics=create_autospec(Metrics),
        )
        self.contents = self.state.contents
        self.consumer = Consumer(ConsumerSettings.model_validate({"name": "c"} | settings))
        for seq, size in enumerate(SIZES, 1):
            self.put(entry(seq, size))

    def put(self, entry: Entry) -> None:
        self.contents.add(entry)
        self.consumer.ready.add(entry.record.seq)

    def lend(self, *, num_experiences: int, num_bytes: int) -> None:
        """Something else is out."""
        lease = Lease(id=1, consumer="c", units=[], deadline=9.0)
        lease.num_experiences, lease.num_bytes = num_experiences, num_bytes
        self.consumer.lent(lease)
        self.consumer.num_leased += 1

    def pick(self, max_bytes: int = 10**6) -> Picked:
        return pick(self.state, self.consumer, len(SIZES), max_bytes, now=2.0)


@pytest.mark.parametrize(
    ("most", "num_units", "cut_by"),
    [(158, 3, ""), (159, 3, ""), (157, 2, "experiences")],
)
def test_experiences_leased_before_count(most: int, num_units: int, cut_by: str) -> None:
    shelf = Shelf(max_leased_experiences=most, max_leased=1000)
    shelf.lend(num_experiences=155, num_bytes=1)
    picked = shelf.pick()
    assert (len(picked.units), picked.cut_by) == (num_units, cut_by)
    assert list(shelf.consumer.ready) == [1, 2, 3][num_units:]


@pytest.mark.parametrize(
    ("most", "num_units", "cut_by"), [(159, 3, ""), (158, 2, "bytes"), (116, 0, "bytes")]
)
def test_bytes_leased_before_count(most: int, num_units: int, cut_by: str) -> None:
    shelf = Shelf(max_leased_bytes=most)
    shelf.lend(num_experiences=1, num_bytes=100)
    picked = shelf.pick()
    assert (len(picked.units), picked.cut_by) == (num_units, cut_by)


def test_a_batch_of_its_own_may_exceed_the_bytes() -> None:
    assert len(Shelf(max_leased_bytes=11).pick().units) == 3


def test_the_first_goes_however_large_it_is() -> None:
    picked = Shelf(max_leased=0).pick(max_bytes=1)
    assert (len(picked.units), picked.cut_by) == (1, "message")
    picked = Shelf(max_leased=0).pick()
    assert (len(picked.units), picked.cut_by) == (1, "experiences")


@pytest.mark.parametrize(("max_version", "held"), [(7, {4: 7}), (6, {4: 6}), (5, {}), (None, {})])
def test_what_is_of_a_later_version_is_held(max_version: int | None, held: dict[int, int]) -> None:
    for hold in (True, False):
        shelf = Shelf(hold=hold)
        shelf.put(entry(4, 29, max_version=max_version))
        for seq in (1, 2, 3):
            shelf.consumer.ready.remove(seq)
        keys = [unit.key for unit in shelf.pick().units]
        assert shelf.consumer.held == (held if hold else {})
        assert keys == ([] if hold and held else [4])


def test_texts_count_as_they_travel() -> None:
    shelf = Shelf()
    settings = shelf.consumer.settings
    plain, longer = entry(4, 29), entry(5, 29, uid="\N{EURO SIGN}")
    shelf.put(plain)
    shelf.put(longer)
    sizes = [
        unit_of(shelf.state, key, shelf.contents.members_of(settings, key)).message_bytes
        for key in (4, 5)
    ]
    assert sizes[1] - sizes[0] == 2
