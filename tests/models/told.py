"""What callers are told of a buffer at rest agrees with what it knows, and in itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from experience_buffer.looking import GroupInfo, GroupOrder, LeaseInfo
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection.group_pages import GroupsWanted
from experience_buffer_server.buffer.inspection.places import STATES
from experience_buffer_server.buffer.inspection.wanted import Wanted
from experience_buffer_server.buffer.state.entries import Entry

_DELIVERED = {"ready", "leased", "retained", "consumed"}


async def check(buffer: Buffer) -> None:
    """Compare experiences, groups and leases, as they are listed, with each other and the state.

    Raises:
        AssertionError: Two of them differ.
    """
    leases = [*(await present.lease_page(buffer, consumer="", lease_id=0, after=0, size=999)).found]
    _check_leases(buffer, leases)
    await _check_states(buffer, leases)
    await _check_groups(buffer)


def _check_leases(buffer: Buffer, leases: list[LeaseInfo]) -> None:
    for name, consumer in buffer.state.consumers.items():
        own = [lease for lease in leases if lease.consumer == name]
        assert {lease.id for lease in own} == consumer.leases.keys()
        assert sum(lease.num_units for lease in own) == consumer.num_leased
        assert sum(lease.num_bytes for lease in own) == consumer.num_leased_bytes
        for lease in own:
            assert sum(part.num_units for part in lease.parts) in (0, lease.num_units)
            assert all(unit.key for unit in lease.units), lease


async def _listed(buffer: Buffer, **wanted: Any) -> list[Entry]:
    found, token = await present.experience_page(
        buffer, Wanted(**wanted), token="", size=999, newest_first=False
    )
    assert not token
    return found


async def _check_states(buffer: Buffer, leases: list[LeaseInfo]) -> None:
    """Each experience is in one state, as a whole and for each consumer; leased is what leases hold."""
    stored = [e for e in buffer.state.contents if e.durable and not e.leaving]
    assert await _listed(buffer) == stored
    for name in ("", *buffer.state.consumers):
        seen: Counter[str] = Counter()
        for state in STATES:
            found = await _listed(buffer, state=state, **({"consumer": name} if name else {}))
            seen.update(entry.record.uid for entry in found)
            if state == "leased":
                own = [lease for lease in leases if name in ("", lease.consumer)]
                assert {entry.record.uid for entry in found} == _held(buffer, own)
        assert seen == Counter(entry.record.uid for entry in stored), name


def _held(buffer: Buffer, leases: list[LeaseInfo]) -> set[str]:
    """The uids of what leases hold and that isn't about to leave."""
    seqs = [
        seq
        for info in leases
        for unit in buffer.state.consumers[info.consumer].leases[info.id].units
        for seq in unit.seqs
    ]
    entries = buffer.state.contents.by_seqs(seqs)
    return {entry.record.uid for entry in entries if not entry.leaving}


async def _groups(buffer: Buffer, order: GroupOrder) -> list[GroupInfo]:
    found, token = [], ""
    while True:
        some, token = await present.group_page(
            buffer,
            GroupsWanted(states=frozenset(), prefix="", order=order, size=2, token=token),
        )
        found += some
        if not token:
            return found


async def _check_groups(buffer: Buffer) -> None:
    groups = list(buffer.state.contents.groups)
    told = {order: await _groups(buffer, order) for order in ("stuck", "oldest", "newest", "key")}
    assert [info.group for info in told["oldest"]] == [group.row.key for group in groups]
    assert [info.group for info in told["newest"]] == [group.row.key for group in groups][::-1]
    assert [info.group for info in told["key"]] == sorted(group.row.key for group in groups)
    assert Counter(i.group for i in told["stuck"]) == Counter(i.group for i in told["oldest"])
    for group, info in zip(groups, told["oldest"], strict=True):
        here = [e.record.uid for e in group.members if e.durable and not e.leaving]
        assert sorted(member.uid for member in info.members) == sorted(here)
        assert info.num_members == group.num_members
        assert info.closed == group.row.closed
        # Of what is delivered, somebody may be kept from a part.
        assert info.waits_for or info.state in _DELIVERED, info
        for place in info.places:
            consumer = buffer.state.consumers[place.consumer]
            if consumer.settings.unit == "group":
                sets: dict[str, Container[int]] = {
                    "leased": consumer.out,
                    "ready": consumer.ready,
                    "held": consumer.held,
                    "quarantined": consumer.quarantined,
                }
                inside = {name for name, keys in sets.items() if group.row.id in keys}
                assert not inside or place.state in inside, (info, place, inside)
