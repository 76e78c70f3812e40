"""Whose group an experience joins: nobody's where it doesn't say, and its own where it does."""

from __future__ import annotations

import pytest

from experience_buffer import EID, errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Reason
from tests.unit.builders import World, experience

PAIRS: list[tuple[int | str, int | str]] = [("0/eval", "1"), ("0", "eval/1"), ("0/eval/1", "")]
"""Batches and tasks that were one text."""


def push_of(*eids: EID) -> Push:
    members = [experience(0, 0, tokens=range(10)) for _ in eids]
    for member, eid in zip(members, eids, strict=True):
        member.eid = eid
    return Push(payloads=[trxp.encode(members)])


def groups(buffer: Buffer) -> dict[str, list[str]]:
    return {
        group.row.key: [entry.record.uid for entry in group.members]
        for group in buffer.state.contents.groups
    }


@pytest.mark.parametrize("group_by", ["task", "run", "step"])
@pytest.mark.parametrize("eid", [EID(), EID(run=3), EID(step=5), EID(run=3, suffix="mine")])
async def test_what_says_neither_batch_nor_task_has_no_group(
    world: World, group_by: str, eid: EID
) -> None:
    buffer = await world.create(group_by=group_by)
    tombstones = [(eid, "gone")]
    pushed = push_of(eid, EID(0, 0), EID(0, ""), EID("", 0))
    outcomes = await buffer.push(Push(payloads=pushed.payloads, tombstones=tombstones))
    assert [outcome.reason for outcome in outcomes] == [
        Reason.INVALID, None, None, None, Reason.INVALID,
    ]  # fmt: skip
    for refused in (outcomes[0], outcomes[-1]):
        assert refused.uid == eid.uid
        assert refused.message.startswith("eid has neither batch nor task")
        assert "set eid = EID(batch=..., task=...)" in refused.message
        assert 'group_by = "none"' in refused.message
    assert len(groups(buffer)) == 3


async def test_a_buffer_without_groups_needs_neither(world: World) -> None:
    buffer = await world.create(group_by="none")
    (outcome,) = await buffer.push(push_of(EID()))
    assert outcome.reason is None


@pytest.mark.parametrize("group_by", ["task", "run", "step"])
async def test_one_text_of_different_pairs_is_a_group_each(world: World, group_by: str) -> None:
    buffer = await world.create(group_by=group_by, group_size=2)
    eids = [EID(*pair, run=2, step=3) for pair in PAIRS for _ in range(2)]
    outcomes = await buffer.push(push_of(*eids))
    assert {outcome.reason for outcome in outcomes} == {None}
    last = {"task": "", "run": "/2", "step": "/3"}[group_by]
    assert groups(buffer) == {
        key + last: [eid.uid for eid in eids[2 * place : 2 * place + 2]]
        for place, key in enumerate(["0/eval/1", "0/eval%2F1", "0/eval/1/"])
    }
    for entry in buffer.state.contents:
        eid = eids[entry.record.seq - 1]
        assert (entry.record.tid, entry.record.rid, entry.record.sid) == (eid.tid, eid.rid, eid.sid)


async def test_a_number_and_its_text_are_of_one_group(world: World) -> None:
    buffer = await world.create(group_size=4)
    await buffer.push(push_of(EID(0, 1), EID("0", 1), EID(0, "1"), EID("0", "1")))
    assert {key: len(members) for key, members in groups(buffer).items()} == {"0/1": 4}


async def test_a_key_that_becomes_too_long_is_refused(world: World) -> None:
    buffer = await world.create(group_by="run")
    (outcome,) = await buffer.push(push_of(EID(0, "/" * 170)))
    assert outcome.reason is Reason.INVALID
    assert "in which each / of the task takes three bytes: uid of 514 bytes" in outcome.message


async def test_whoever_says_the_task_as_it_is_is_told_the_key(world: World) -> None:
    buffer = await world.holding(push_of(EID(0, "eval/1")))
    for close in (buffer.seal("0/eval/1", 0), buffer.drop("0/eval/1", "no use")):
        with pytest.raises(errors.GroupNotFoundError, match=r"; '0/eval%2F1' is here, whose task"):
            await close
    assert await buffer.drop(EID(0, "eval/1").tid, "no use") == 1
    await buffer.push(push_of(EID("0/eval", 1), EID(0, "eval/1", 1)))
    assert await buffer.drop("0/eval/1", "no use") == 1


@pytest.mark.parametrize(
    "key", ["a/b/c/7", "a%2Fb/c/7", "a/b%2Fc%2F7", "a/b/c", "7", "", "/" * 501]
)
async def test_no_other_key_is_suggested(world: World, key: str) -> None:
    buffer = await world.holding(push_of(EID("a/b", "c/8"), EID("a%2Fb", "c")))
    with pytest.raises(errors.GroupNotFoundError, match=r"'$"):
        await buffer.seal(key, 0)


@pytest.mark.parametrize(("group_by", "end"), [("task", ""), ("run", "/3"), ("step", "/5")])
async def test_keys_of_runs_and_steps_are_suggested_too(
    world: World, group_by: str, end: str
) -> None:
    buffer = await world.holding(push_of(EID("a/b", "c/7", 3, 5)), group_by=group_by)
    with pytest.raises(errors.GroupNotFoundError, match=f"; 'a/b/c%2F7{end}' is here"):
        await buffer.seal(f"a/b/c/7{end}", 0)


@pytest.mark.parametrize(
    ("group_by", "key"), [("task", "7"), ("task", ""), ("run", "0/7"), ("step", "0/7")]
)
async def test_no_group_is_dropped_or_reserved_by_a_key_that_none_can_have(
    world: World, group_by: str, key: str
) -> None:
    buffer = await world.create(group_by=group_by)
    says = "it is empty" if not key else f"group '{key}' can't be: .*'batch/task.*experience.eid"
    with pytest.raises(errors.InvalidRequestError, match=says):
        await buffer.drop(key, "no use")
    with pytest.raises(errors.InvalidRequestError, match=says):
        buffer.reserve([key], ttl_seconds=0)
