"""What tests do with a buffer and look up in it, in a line each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.intake import admission
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.settings_checks import checked_settings
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.sampling.leases import Lease
from tests.unit.builders import World, experience, settle, uid, want


def pushed(*members: tuple[int, int], **fields: Any) -> Push:
    """A push of (task, run) experiences, of which all have these fields."""
    return Push(payloads=[trxp.encode([experience(*member, **fields) for member in members])])


@contextmanager
def unlooked_at() -> Iterator[None]:
    """What is pushed is stored whatever numbers it holds, as it was before the gate looked at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "unreadable", lambda *_, **__: "")
        yield


def of_version(version: int | None, *members: tuple[int, int]) -> Push:
    """A push of (task, run) experiences that one policy made."""
    return pushed(*members, info={} if version is None else {"model_version": version})


async def sampled(
    buffer: Buffer,
    count: int = 1,
    consumer: str = "trainer",
    *,
    rank_of: RankOf | None = None,
    **changes: Any,
) -> tuple[Lease | None, str]:
    """What a call gets that doesn't wait unless told to, and why it isn't more."""
    asked = want(count, **changes)
    return await buffer.sample(consumer, asked, asyncio.Event(), rank_of=rank_of)


async def leased(buffer: Buffer, count: int = 1, consumer: str = "trainer", **more: Any) -> Lease:
    """A lease of up to so many units, of which there has to be one."""
    lease, why = await sampled(buffer, count, consumer, **more)
    assert lease is not None, why
    return lease


async def take(buffer: Buffer, count: int = 1, consumer: str = "trainer", **more: Any) -> int:
    """The id of a lease of up to so many units, 0 where there is none."""
    lease, _ = await sampled(buffer, count, consumer, **more)
    return 0 if lease is None else lease.id


async def consume(
    buffer: Buffer, count: int = 1, consumer: str = "trainer", *, step: int | None = None
) -> Lease:
    """Lease up to so many units, and acknowledge them."""
    return await buffer.ack((await leased(buffer, count, consumer)).id, step=step)


async def push_and_settle(buffer: Buffer, push: Push) -> None:
    """Push, and wait for what is computed of it."""
    await buffer.push(push)
    await settle(buffer)


async def change(buffer: Buffer, **changes: Any) -> None:
    """Change some settings; they are stored when this returns."""
    await buffer.change_settings(checked_settings(buffer.settings.model_dump() | changes))


def entry_of(buffer: Buffer, task: int, run: int) -> Entry:
    """What a buffer knows of an experience that it holds."""
    entry = buffer.state.contents.by_uid(uid(task, run))
    assert entry is not None
    return entry


def stored(buffer: Buffer) -> list[tuple[int, int]]:
    """Task and run of what a buffer holds, by arrival."""
    return [(int(entry.record.task), entry.record.run) for entry in buffer.state.contents]


def counted(world: World, buffer: Buffer, name: str, **labels: str) -> float:
    """A counter of a buffer's, by its name between `experience_buffer_` and `_total`."""
    found: Mapping[str, str] = {"buffer": buffer.name} | labels
    name = f"experience_buffer_{name}_total"
    return world.metrics.registry.get_sample_value(name, dict(found)) or 0.0


def dropped(world: World, buffer: Buffer, reason: str) -> float:
    """How many experiences left a buffer for a reason that has a name."""
    return counted(world, buffer, "dropped_experiences", reason=reason)
