"""Pushes that come again: with the same content in other bytes, and with other content."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer._codec.frame import split_frame
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake import repeats, same_content
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.intake.push_reading import Outcome, Push
from experience_buffer_server.store.memory import MemoryStore
from tests.unit.buffer_verbs import consume
from tests.unit.builders import World, begun, eid, experience, push, uid
from tests.unit.work import counted_lines

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "user", "content": "again"}]
INFO = {"a": {"x": 1.0, "y": [1, 2]}, "b": "user", "c": (3, 4), "d": {5, 6}}


def spooled(value: Any) -> Any:
    """As it comes back from a file: no two equal texts are one object."""
    return json.loads(json.dumps(value))


def pushed(*experiences: Experience) -> Push:
    return Push(payloads=[trxp.encode(list(experiences))])


def rollout(**fields: Any) -> Experience:
    return experience(1, 0, **({"messages": MESSAGES, "info": dict(INFO)} | fields))


def backwards(payload: bytes) -> bytes:
    """The same payload, whose dicts and tensors come in another order, with spaces in the table."""
    metadata, section = split_frame(payload, limits=DEFAULT_LIMITS)
    top = pickle.loads(metadata)

    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return list(map(turned, value)) if isinstance(value, list) else value

    pickled = pickle.dumps(top | {"items": turned(top["items"])}, protocol=5)
    length = int.from_bytes(section[:8], "little")
    table = json.loads(bytes(section[8 : 8 + length]))
    data = bytes(section[8 + length :])
    entries, moved = {}, b""
    for name in reversed(list(table)):
        begin, end = table[name]["data_offsets"]
        where = [len(moved), len(moved) + end - begin]
        entries[name] = table[name] | {"data_offsets": where}
        moved += data[begin:end]
    header = json.dumps(entries, indent=1).encode()
    header += b" " * (-len(header) % 8)
    rest = len(header).to_bytes(8, "little") + header + moved
    frame = (
        b"TRXP" + bytes([1]) + len(pickled).to_bytes(8, "little") + len(rest).to_bytes(8, "little")
    )
    return frame + pickled + rest


async def again(buffer: Buffer, second: Push) -> Outcome:
    (outcome,) = await buffer.push(second)
    return outcome


OTHER_BYTES: dict[str, Callable[[], Push]] = {
    "spooled": lambda: pushed(rollout(messages=spooled(MESSAGES))),
    "tuple as list": lambda: pushed(rollout(info=INFO | {"c": [3, 4]})),
    "keys in another order": lambda: pushed(rollout(info=dict(reversed(INFO.items())))),
    "all in another order": lambda: Push(payloads=[backwards(trxp.encode([rollout()]))]),
    "a whole number": lambda: pushed(rollout(info=INFO | {"a": {"x": 1, "y": [1, 2]}})),
    "numbers as texts in the eid": lambda: pushed(_named(rollout(), EID("2", "1", 0, 0, "a1"))),
}


def _named(one: Experience, name: EID) -> Experience:
    one.eid = name
    return one


@pytest.mark.parametrize("how", OTHER_BYTES)
async def test_the_same_content_in_other_bytes_is_a_duplicate(world: World, how: str) -> None:
    buffer = await world.holding(pushed(rollout()), group_by="none")
    second = OTHER_BYTES[how]()
    assert second.payloads[0] != trxp.encode([rollout()])
    assert (await again(buffer, second)).status == "duplicate"
    assert buffer.num_items == 1
    buffer = await world.restart(buffer)
    assert (await again(buffer, second)).status == "duplicate"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": 0.5}, "its reward is 0.0 there, and 0.5 here"),
        ({"tokens": torch.arange(10) + 1}, "its tokens has other values"),
        (
            {"tokens": torch.arange(10).int()},
            "its tokens is I64 of shape [10] there, and I32 of [10]",
        ),
        ({"values": torch.zeros(7)}, "its values is missing there"),
        (
            {"messages": [MESSAGES[0], MESSAGES[1] | {"content": "no"}]},
            "its messages[1]['content'] is 'again' there, and 'no' here",
        ),
        ({"messages": MESSAGES[:1]}, "its messages has 2 values there, and 1 here"),
        ({"info": INFO | {"e": 1}}, "its info['e'] is missing there"),
        ({"info": {"a": INFO["a"]}}, "its info['b'] is missing here"),
        ({"info": INFO | {"b": 1}}, "its info['b'] is 'user' there, and 1 here"),
        ({"info": INFO | {"d": {5, 7}}}, "its info['d'][1] is 6 there, and 7 here"),
        ({"response_text": "x"}, "its response_text is None there, and 'x' here"),
    ],
)
async def test_other_content_is_a_conflict_that_names_the_field(
    world: World, fields: dict[str, Any], words: str
) -> None:
    buffer = await world.holding(pushed(rollout()), group_by="none")
    outcome = await again(buffer, pushed(rollout(**fields)))
    assert (outcome.status, outcome.reason) == ("refused", "conflict")
    assert words in outcome.message
    assert "is stored with other content" in outcome.message


async def test_what_is_larger_than_it_looks_takes_no_time(world: World) -> None:
    """Lists in two places each: a million values in a few hundred bytes."""

    def laughs(last: str) -> Any:
        found: Any = [last]
        for _ in range(15):
            found = [found, found]
        return found

    first = pushed(rollout(info={"a": laughs("ha")}))
    second = pushed(rollout(info={"b": 1, "a": laughs("ha")}))
    buffer = await world.holding(first, group_by="none")
    with counted_lines() as lines:
        outcome = await again(buffer, second)
        assert "its info has more values than are compared" in outcome.message
        await consume(buffer)
        assert (await again(buffer, second)).reason == "conflict"
    assert lines.num < 1_500_000


async def test_another_task_may_hide_behind_a_uid(world: World) -> None:
    buffer = await world.holding(
        pushed(_named(rollout(), EID("2/x", "1", 0, 0, "a1"))), group_by="none"
    )
    outcome = await again(buffer, pushed(_named(rollout(), EID("2", "x/1", 0, 0, "a1"))))
    assert "its batch is '2/x' there, and '2' here" in outcome.message


async def test_both_in_one_push(world: World) -> None:
    buffer = await world.create(group_by="none")
    found = await buffer.push(
        Push(
            payloads=[
                trxp.encode([one])
                for one in (rollout(), rollout(messages=spooled(MESSAGES)), rollout(reward=9.0))
            ]
        )
    )
    assert [one.status.value for one in found] == ["stored", "duplicate", "refused"]
    assert "is in this push with other content (its reward is 0.0 there" in found[2].message


async def test_what_was_annotated_since_is_compared_without_that(world: World) -> None:
    buffer = await world.holding(pushed(rollout()), group_by="none")
    await buffer.annotate([Annotation(uid=uid(1, 0), reward=0.75, info={"judge": "x"})])
    spool = rollout(messages=spooled(MESSAGES))
    assert (await again(buffer, pushed(spool))).status == "duplicate"
    spool.tokens = spool.tokens + 1
    assert (await again(buffer, pushed(spool))).reason == "conflict"


async def test_a_tombstone_is_another_thing(world: World) -> None:
    buffer = await world.holding(push((1, 0)))
    outcome = await again(buffer, Push(tombstones=[(eid(1, 0), "gone")]))
    assert "(as an experience, and comes as a tombstone)" in outcome.message


@pytest.mark.parametrize("first", [MESSAGES, spooled(MESSAGES)], ids=["spelled out", "spooled"])
async def test_of_what_was_consumed_only_the_bytes_are_known(world: World, first: Any) -> None:
    plain = {"info": {"model_version": 3, "user": "again"}}
    buffer = await world.holding(pushed(rollout(messages=first, **plain)), group_by="none")
    await consume(buffer)
    for messages in (MESSAGES, spooled(MESSAGES), first):
        second = pushed(rollout(messages=messages, **plain))
        assert (await again(buffer, second)).status == "duplicate"
    other = [MESSAGES[0], MESSAGES[1] | {"content": "user"}]
    assert (await again(buffer, pushed(rollout(messages=other, **plain)))).reason == "conflict"
    outcome = await again(buffer, pushed(rollout(reward=3.0)))
    assert "was consumed with other content" in outcome.message


async def test_content_is_compared_only_where_bytes_differ_and_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counting(*given: Any, **named: Any) -> str:
        compared.append(1)
        return same_content.difference(*given, **named)

    monkeypatch.setattr(repeats, "difference", counting)
    buffer = await world.holding(pushed(rollout()), group_by="none")
    await again(buffer, pushed(rollout()))
    await buffer.push(push((2, 0), (3, 0)))
    assert not compared
    second = pushed(rollout(messages=spooled(MESSAGES)))
    for _ in range(3):
        await again(buffer, second)
    assert len(compared) == 1


async def test_what_is_being_stored_is_compared_with_what_came(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_by="none")
    held = asyncio.Event()
    commit = MemoryStore.commit

    async def slow(self: MemoryStore, batch: Any) -> None:
        await held.wait()
        await commit(self, batch)

    monkeypatch.setattr(MemoryStore, "commit", slow)
    again = Push(
        payloads=[
            trxp.encode([one])
            for one in (rollout(messages=spooled(MESSAGES)), experience(2, 0), rollout(reward=9.0))
        ]
    )
    pushes = [await begun(buffer.push(each), 3) for each in (pushed(rollout()), again)]
    held.set()
    (first,), found = await asyncio.gather(*pushes)
    assert first.status == "stored"
    assert [one.status.value for one in found] == ["duplicate", "stored", "refused"]
    assert "(its reward is 0.0 there, and 9.0 here)" in found[2].message
    assert not buffer.flow.ingest.reading._pending
