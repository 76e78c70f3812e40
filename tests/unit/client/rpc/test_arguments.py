"""What verbs say of arguments that can't be: which one, what was given, and what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from experience_buffer import EID, InvalidRequestError, PushRefusedError, Tombstone
from experience_buffer._messages import fields
from experience_buffer.v1 import service_pb2
from tests.unit.client.rpc.pushed import experience

ONE = experience(1)
DEAD = Tombstone(EID(3, 5, 7))
GROUP = "such as experience.eid.tid"
UID = "such as experience.eid.uid"
BAD: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    # What is pushed.
    "one experience": (lambda b: b.push(ONE), "experiences", "a list of experiences: [exp"),
    "a dict": (lambda b: b.push({"tokens": [1]}), "experiences", "a list of experiences"),
    "a text": (lambda b: b.push("payload"), "experiences", "one TRXP payload as bytes"),
    "none": (lambda b: b.push(None), "experiences", "is None"),
    "a generator": (lambda b: b.push(iter([ONE])), "experiences", "list_iterator"),
    "append of a dict": (lambda b: b.writer().append({"a": 1}), "experiences", "a list of them"),
    "append of a text": (lambda b: b.writer().append("a"), "experiences", "a list of them"),
    "append of a generator": (lambda b: b.writer().append(iter([ONE])), "experiences", "a list"),
    "one tombstone": (lambda b: b.push([], tombstones=DEAD), "tombstones", "a list of Tombstone"),
    "texts": (lambda b: b.push([], tombstones=["a"]), "tombstones[0]", "Tombstone(eid, reason)"),
    "an eid for a tombstone": (
        lambda b: b.push([], tombstones=[DEAD, EID(1, 2)]),
        "tombstones[1]",
        "Tombstone(eid, reason)",
    ),
    "an eid as text": (
        lambda b: b.push([], tombstones=[Tombstone("0/7/1/0/x")]),  # type: ignore[arg-type]
        "tombstones[0].eid",
        "EID(batch=..., task=..., run=...)",
    ),
    "a task of none": (
        lambda b: b.push([], tombstones=[Tombstone(EID(1, None))]),  # type: ignore[arg-type]
        "eid.task",
        "text",
    ),
    "a run as text": (
        lambda b: b.push([], tombstones=[Tombstone(EID(1, 2, "3"))]),  # type: ignore[arg-type]
        "eid.run",
        "a whole number",
    ),
    "a reason that is none": (
        lambda b: b.push([], tombstones=[Tombstone(EID(1, 2), None)]),  # type: ignore[arg-type]
        "tombstones[0].reason",
        "give text",
    ),
    "half a pair in a task": (
        lambda b: b.push([], tombstones=[Tombstone(EID(1, "\udfff"))]),
        "tombstones[0].eid.task",
        "UTF-8",
    ),
    "a group size as text": (lambda b: b.push([ONE], group_size="4"), "group_size", "is '4'"),
    "a group size below 0": (lambda b: b.push([ONE], group_size=-1), "group_size", "at least 0"),
    "a buffer's number": (lambda b: b.push([ONE], buffer=7), "buffer", "a buffer's name as text"),
    "a timeout as text": (lambda b: b.push([ONE], timeout="1"), "timeout", "number of seconds"),
    # Groups and uids.
    "a group's number": (
        lambda b: b.drop_group(7),
        "group",
        "group is 7; give a group's key as text",
    ),
    "a group's eid": (lambda b: b.seal_group(EID(0, 7)), "group", GROUP),
    "a group's parts": (lambda b: b.drop_group(("0", "7")), "group", "is ('0', '7'); give"),
    "a pair's half in a group": (lambda b: b.drop_group("\ud800"), "group", "UTF-8"),
    "groups' number": (lambda b: b.reserve_groups(7), "groups", GROUP),
    "groups' numbers": (lambda b: b.reserve_groups(["a", 7]), "groups[1]", GROUP),
    "groups' eids": (lambda b: b.reserve_groups([EID(0, 7)]), "groups[0]", GROUP),
    "seconds as text": (lambda b: b.reserve_groups([], ttl_seconds="1"), "ttl_seconds", "number"),
    "a uid's number": (lambda b: b.get(7), "uid", UID),
    "an experience for its uid": (lambda b: b.get(ONE), "uid", UID),
    "uids' number": (lambda b: b.delete(7), "uids", UID),
    "uids' eids": (lambda b: b.delete([ONE.eid]), "uids[0]", UID),
    "uids and keys": (lambda b: b.delete("a", tid="b"), "uids", "one of the two"),
    "a task's number": (lambda b: b.delete(tid=7), "tid", "a task's key as text"),
    "uids to release": (lambda b: b.release_quarantined([7]), "uids[0]", UID),
    "a state": (lambda b: list(b.list(state="redy")), "state", "'ready'"),
    "a page's size": (lambda b: list(b.list(page_size="1")), "page_size", "a whole number"),
    # Delivery.
    "a batch's size as text": (lambda b: b.sample("8"), "batch_size", "how many units"),
    "a batch's size below 0": (lambda b: b.sample(-1), "batch_size", "at least 1"),
    "a batch's size of parts": (lambda b: b.sample(8.5), "batch_size", "a whole number"),
    "a batch's size that is true": (lambda b: b.sample(True), "batch_size", "is True"),
    "a consumer's number": (lambda b: b.sample(1, consumer=7), "consumer", "give text"),
    "a format": (lambda b: b.sample(1, format="pack"), "format", "'trxp', 'packed'"),
    "a rank alone": (lambda b: b.sample(1, rank=0), "world_size", "give both"),
    "a rank as text": (lambda b: b.sample(1, rank="0", world_size=2), "rank", "whole number"),
    "a lease's seconds": (lambda b: b.sample(1, lease_seconds="1"), "lease_seconds", "a number"),
    "a stream's timeout": (lambda b: b.stream(1, timeout="1"), "timeout", "give a number"),
    "a stream's first timeout": (lambda b: b.stream(1, first_timeout="1"), "first_timeout", "'1'"),
    "what is read ahead": (lambda b: b.stream(1, prefetch="2"), "prefetch", "from 1 to"),
    "nothing read ahead": (lambda b: b.stream(1, prefetch=0), "prefetch", "from 1 to"),
    "a stream's bytes": (lambda b: b.stream(1, max_bytes="1M"), "max_bytes", "at least 0"),
    "a lease's text": (lambda b: b.ack("lease"), "lease_id", "batch.lease_id"),
    "a lease of none": (lambda b: b.nack(None), "lease_id", "batch.lease_id"),
    "a step as text": (lambda b: b.ack(1, step="3"), "step", "a training step"),
    "a step of parts": (lambda b: b.rewind(1.5), "step", "a whole number"),
    "a safe step of none": (lambda b: b.declare_safe(None), "step", "is None"),
    "a state's step": (lambda b: b.state_dict("3"), "step", "is '3'"),
    "a state's step that is true": (lambda b: b.state_dict(True), "step", "is True"),
    "a state's path": (lambda b: b.load_state_dict("a.pt"), "state", "what state_dict returned"),
    "a reason's number": (lambda b: b.nack(1, reason=7), "reason", "give text"),
    "priorities' number": (lambda b: b.update_priorities(7), "priorities", "uid: priority"),
    "priorities' uids": (lambda b: b.update_priorities(["ab"]), "priorities[0]", "uid: priority"),
    "a priority as text": (
        lambda b: b.update_priorities({"a": "1"}),
        "priorities[0] of 'a'",
        "number",
    ),
    # Buffers.
    "a configuration's number": (lambda b: b.create_buffer(7), "config", "BufferConfig(...)"),
    "a configuration's table": (lambda b: b.create_buffer({"nam": "a"}), "config", "mean 'name'"),
    "a field": (lambda b: b.update_buffer("a", gruop_size=8), "gruop_size", "mean 'group_size'"),
    "a field's value": (lambda b: b.update_buffer("a", group_size="8"), "group_size", "is '8'"),
    "a field's words": (lambda b: b.update_buffer("a", on_full="drop"), "on_full", "'evict'"),
    "a version as text": (lambda b: b.publish_policy_version("3"), "version", "policy version"),
    "a version that is true": (lambda b: b.publish_policy_version(True), "version", "is True"),
    "a watched number": (lambda b: b.watch_policy_version(7), "buffer", "buffer's name"),
    "force as text": (lambda b: b.delete_buffer("a", force="yes"), "force", "True or False"),
    "a label's number": (lambda b: b.snapshot(7), "label", "give text"),
    "a name's number": (lambda b: b.get_buffer(7), "name", "a name as text"),
    "stats of none": (lambda b: b.get_stats(None), "buffer", "is None"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_argument_that_cannot_be_is_named_and_nothing_is_sent(
    script: Any, buffer: Any, what: str
) -> None:
    call, subject, words = BAD[what]
    with pytest.raises(InvalidRequestError) as caught:
        call(buffer)
    assert words in str(caught.value)
    assert caught.value.subject == subject
    assert len(str(caught.value)) < 300
    assert script.requests == []


@pytest.mark.parametrize(
    ("item", "cure"),
    [
        ({"tokens": [1, 2]}, "a dict, not an experience; make it one: Experience(**fields)"),
        (None, "a NoneType, not an experience; give experience_buffer.Experience"),
        ([ONE], "a list, not an experience"),
        (EID(1, 2), "a EID, not an experience"),
        (b"TRXP", "a bytes, not an experience"),
    ],
)
def test_what_is_no_experience_is_refused_and_its_neighbours_are_stored(
    script: Any, buffer: Any, item: Any, cure: str
) -> None:
    with pytest.raises(PushRefusedError) as caught:
        buffer.push([ONE, item, experience(2)])
    assert cure in str(caught.value)
    assert [outcome.index for outcome in caught.value.result.refused] == [1]
    assert caught.value.result.num_stored == 2
    with buffer.writer() as writer, pytest.raises(PushRefusedError) as caught:
        writer.append([item, experience(3)] if isinstance(item, (dict, list, bytes)) else item)
    assert cure in str(caught.value)


def test_a_list_may_be_any_sequence(script: Any, buffer: Any) -> None:
    array = np.empty(2, dtype=object)
    array[:] = [experience(2), experience(3)]
    assert buffer.push((ONE,)).num_stored == 1
    assert buffer.push(array).num_stored == 2
    with buffer.writer() as writer:
        writer.append(array)
    assert writer.counts.num_duplicates == 2


@pytest.mark.parametrize(
    "method", [m.name for m in service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].methods]
)
def test_a_method_has_the_name_of_the_verb_that_calls_it(method: str, buffer: Any) -> None:
    assert callable(getattr(buffer, fields.verb(method)))
