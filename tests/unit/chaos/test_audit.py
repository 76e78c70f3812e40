"""The comparison behind the crash matrix finds each broken promise, and nothing where none is."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer.v1 import types_pb2
from tests.chaos import work
from tests.chaos.audit import Audit
from tests.chaos.calls import describe
from tests.chaos.departures import Sighting
from tests.chaos.expected import advantages

SEED = 11
START = 1000.0


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "templates"
    work.write_templates(path)
    return path


class Story:
    """Journals as a run would write them, line by line."""

    def __init__(self, folder: Path, templates: Path) -> None:
        self.folder = folder
        self.time = START
        self._leases = itertools.count(1)
        (folder / "templates").symlink_to(templates)
        self._templates = work.Templates(templates)

    def find(self, kind: str) -> tuple[int, work.Operation]:
        """The first operation of a kind."""
        for index in itertools.count():
            operation = work.operation(SEED, 0, index)
            if operation.kind == kind:
                return index, operation
        raise AssertionError

    def write(self, name: str, event: str, **fields: Any) -> None:
        self.time += 0.01
        line = {"event": event, "time": self.time} | fields
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def push(self, kind: str, status: str = "stored") -> work.Operation:
        """All calls of the first operation of a kind, answered."""
        _, operation = self.find(kind)
        for call in operation.calls():
            self.call(kind, call, [status] * len(call.runs) if call.verb == "push" else 1)
        return operation

    def call(self, kind: str, call: work.Call, result: Any, *, retried: bool = False) -> None:
        """One call of the first operation of a kind; not answered if the result is None."""
        index, _ = self.find(kind)
        note: dict[str, Any] = {"index": index, "verb": call.verb, "part": call.part}
        self.write("pusher-0", "calling", **note)
        if result is not None:
            self.write("pusher-0", "called", result=result, retried=retried, **note)

    def lease(
        self,
        consumer: str,
        operation: work.Operation,
        *,
        end: str = "acked",
        runs: list[int] | None = None,
        **changes: Any,
    ) -> int:
        """Deliver an operation's experiences, and end that."""
        lease = next(self._leases)
        name = "learner" if consumer == "learner" else "trainer-0-all-of-them"
        place = {"buffer": operation.buffer, "consumer": consumer, "lease": lease}
        asked = self.time
        items = [self._item(operation, run, changes) for run in runs or operation.runs]
        self.write(name, "leased", asked=asked, items=items, **place)
        if end:
            self.write(name, end, **place)
        return lease

    def _item(self, operation: work.Operation, run: int, changes: dict[str, Any]) -> list[Any]:
        payload = self._templates.member(operation.task, operation.variant, run)
        grouped = operation.buffer in ("groups", "steps")
        score = advantages(operation)[run] if operation.buffer == "groups" else None
        item = {
            "uid": work.uid(operation.task, run),
            "group": operation.key if grouped else "",
            "advantage": score,
            "checksum": zlib.crc32(payload),
        } | changes
        return list(item.values())

    def problems(self, **options: Any) -> list[str]:
        audit = Audit(self.folder, SEED, 1, options.pop("sightings", []))
        audit.check(options.pop("left", frozenset()))
        return audit.problems


@pytest.fixture
def story(tmp_path: Path, templates: Path) -> Story:
    return Story(tmp_path, templates)


def consume(story: Story, operation: work.Operation) -> None:
    """Every consumer of its buffer gets it."""
    for consumer in {"queue": ["trainer"], "groups": ["actor", "critic"]}[operation.buffer]:
        story.lease(consumer, operation)


def test_a_sound_story_has_no_problem(story: Story) -> None:
    for kind in ("queue", "whole", "halves", "sealed"):
        consume(story, story.push(kind))
    story.push("dropped")
    story.push("delete")
    operation = story.push("steps")
    story.write("learner", "rewinding", buffer="steps", consumer="learner", step=-1)
    story.lease("learner", operation)
    checkpoint = {"step": 0, "groups": [[operation.key]]}
    (story.folder / "checkpoint").write_text(json.dumps(checkpoint))
    assert story.problems() == []


def test_what_was_acknowledged_and_is_nowhere_is_lost(story: Story) -> None:
    operation = story.push("queue")
    uids = [work.uid(operation.task, run) for run in operation.runs]
    assert len(story.problems()) == len(uids)
    assert all("lost before trainer got it" in one for one in story.problems())
    assert story.problems(left=frozenset(uids)) == [], "it is still there"
    assert story.problems(left=None) == [], "nobody looked"


def test_what_a_trainer_complained_of_is_no_journal(story: Story) -> None:
    (story.folder / "trainer-0.errors").write_text("Traceback (most recent call last):\n")
    assert story.problems() == []


def test_a_push_that_nobody_answered_may_be_lost(story: Story) -> None:
    index, _ = story.find("queue")
    story.write("pusher-0", "calling", index=index, verb="push", part="half")
    assert story.problems() == []


def test_a_group_that_a_learner_missed_or_had_twice(story: Story) -> None:
    operation = story.push("steps")
    story.lease("learner", operation)
    [missed] = story.problems()
    assert "never trained" in missed
    checkpoint = {"step": 1, "groups": [[operation.key], [operation.key]]}
    (story.folder / "checkpoint").write_text(json.dumps(checkpoint))
    [twice] = story.problems()
    assert "2 times" in twice


@pytest.mark.parametrize(
    ("end", "seconds", "found"),
    [
        ("acked", 60.0, "again after its answered ack"),
        ("", 1.0, "two leases at once"),
        ("acking", 1.0, "two leases at once"),
        ("forgotten", 2.9, "two leases at once"),
        ("nacking", 0.1, ""),
        ("acking", 4.0, ""),
        ("", 4.0, ""),
    ],
)
def test_a_second_delivery(story: Story, end: str, seconds: float, found: str) -> None:
    operation = story.push("queue")
    story.lease("trainer", operation, end=end)
    story.time += seconds
    story.lease("trainer", operation)
    problems = story.problems()
    assert bool(problems) == bool(found), problems
    assert all(found in one for one in problems)


def test_a_rewind_brings_back_what_was_acknowledged(story: Story) -> None:
    operation = story.push("steps")
    checkpoint = {"step": 0, "groups": [[operation.key]]}
    (story.folder / "checkpoint").write_text(json.dumps(checkpoint))
    story.lease("learner", operation)
    story.write("learner", "rewinding", buffer="steps", consumer="learner", step=-1)
    story.lease("learner", operation)
    assert story.problems() == []


def test_a_group_that_is_split_and_a_wrong_advantage(story: Story) -> None:
    operation = story.push("halves")
    story.lease("critic", operation)
    story.lease("actor", operation, runs=[0, 1, 2])
    story.lease("actor", operation, runs=[3])
    assert [one.partition(":")[0] for one in story.problems()] == [f"group {operation.key}"] * 2
    other = story.push("whole")
    story.lease("actor", other)
    story.lease("critic", other, runs=[2], advantage=0.5)
    assert any("advantage 0.5, expected" in one for one in story.problems())


def test_a_changed_payload_and_a_stranger(story: Story) -> None:
    operation = story.push("queue")
    story.lease("trainer", operation, checksum=7)
    assert all("its payload has changed" in one for one in story.problems())
    assert story.problems()
    story.lease("trainer", operation, uid="7/99999999/0/0/5eed", runs=[0])
    assert any("never pushed" in one for one in story.problems())


@pytest.mark.parametrize("kind", ["delete", "dropped"])
def test_what_was_removed_stays_away(story: Story, kind: str) -> None:
    operation = story.push(kind)
    consumer = "trainer" if kind == "delete" else "critic"
    story.time += 1
    story.lease(consumer, operation)
    assert any("after it was removed" in one for one in story.problems())


def test_an_answered_ack_that_is_forgotten_and_a_lease_cut_short(story: Story) -> None:
    operation = story.push("queue")
    lease = story.lease("trainer", operation)
    place = {"buffer": "queue", "consumer": "trainer", "lease": lease}
    story.write("trainer-0-all-of-them", "reacking", **place)
    story.write("trainer-0-all-of-them", "lost", verb="reack", details="gone", **place)
    assert ["its answered ack is forgotten" in one for one in story.problems()] == [True]
    other = story.push("whole")
    story.lease("actor", other)
    lease = story.lease("critic", other, end="acking")
    story.write(
        "trainer-0-all-of-them",
        "lost",
        buffer="groups",
        consumer="critic",
        lease=lease,
        verb="ack",
        details="gone",
    )
    assert any("ended before its time" in one for one in story.problems())


def test_a_push_that_is_stored_a_second_time(story: Story) -> None:
    consume(story, story.push("queue"))
    story.push("queue", "duplicate")
    assert story.problems() == []
    story.push("queue", "stored")
    assert all("stored by a push after" in one for one in story.problems())
    assert story.problems()


def test_what_was_evicted_stays_away_and_only_the_oldest_were(story: Story) -> None:
    operation = story.push("replay")
    name = work.uid(operation.task, operation.runs[0])
    gone = Sighting(story.time + 1, story.time + 2, frozenset())
    back = Sighting(story.time + 3, story.time + 4, frozenset({name}))
    problems = story.problems(sightings=[gone, back])
    assert [one.partition(": ")[2] for one in problems] == [
        "acknowledged, lost, and too new for an eviction",
        "listed after it had left",
    ]
    story.time += 10
    story.lease("sampler", operation)
    problems = story.problems(sightings=[gone])
    assert any("delivered after it had left replay" in one for one in problems)


def test_a_steps_group_that_is_stored_and_was_never_offered(story: Story) -> None:
    operation = story.push("steps")
    story.write("learner", "rewinding", buffer="steps", consumer="learner", step=-1)
    left = frozenset(work.uid(operation.task, run) for run in operation.runs)
    [problem] = story.problems(left=left)
    assert "the learner was never trained on it" in problem


@pytest.mark.parametrize(
    ("kind", "consumer"), [("steps", "learner"), ("whole", "critic"), ("replay", "sampler")]
)
def test_a_payload_is_compared_in_every_buffer(story: Story, kind: str, consumer: str) -> None:
    operation = story.push(kind)
    story.lease(consumer, operation, checksum=1)
    problems = [one for one in story.problems(left=None) if "its payload has changed" in one]
    assert len(problems) == len(operation.runs)


def test_what_the_server_adds_is_no_part_of_what_was_pushed(templates: Path) -> None:
    operation = work.operation(SEED, 0, 0)
    member = work.Templates(templates).member(operation.task, operation.variant, 0)
    column = trxp.TensorView("F32", (2,), memoryview(b"\0" * 8))
    for names in ((), ("advantages", "returns")):
        payload = trxp.with_tensors(member, dict.fromkeys(names, column))
        *_, checksum = describe(types_pb2.SampledExperience(payload=payload))
        assert checksum == zlib.crc32(member)


@pytest.mark.parametrize("kind", ["sealed", "dropped", "queue", "delete"])
def test_a_first_push_is_not_refused(story: Story, kind: str) -> None:
    _, operation = story.find(kind)
    call = next(operation.calls())
    story.call(kind, call, ["refused"] * len(call.runs))
    problems = [one.partition(": ")[2] for one in story.problems()]
    assert problems == ["its push was refused"] * len(call.runs)


def test_a_repeated_push_of_what_was_consumed_is_a_duplicate(story: Story) -> None:
    operation = story.push("whole")
    consume(story, operation)
    call = next(operation.calls())
    story.call("whole", call, ["duplicate"] * len(call.runs))
    assert story.problems() == []
    story.call("whole", call, ["refused"] * len(call.runs))
    assert len(story.problems()) == len(call.runs)
    assert all("refused after it had been acknowledged" in one for one in story.problems())


def test_a_dropped_group_takes_nobody_any_more(story: Story) -> None:
    operation = story.push("dropped")
    call = next(operation.calls())
    story.call("dropped", call, ["refused"] * len(call.runs))
    assert story.problems() == []
    story.call("dropped", call, ["stored"] * len(call.runs))
    assert [one.partition(": ")[2] for one in story.problems()] == [
        "stored after its group was dropped"
    ] * len(call.runs)


@pytest.mark.parametrize("verb", ["seal", "drop"])
def test_a_group_is_gone_only_after_an_attempt_without_an_answer(story: Story, verb: str) -> None:
    kind = "sealed" if verb == "seal" else "dropped"
    _, operation = story.find(kind)
    push, end = operation.calls()
    story.call(kind, push, ["stored"] * len(push.runs))
    story.call(kind, end, "gone")
    assert any(f"gone before its {verb}" in one for one in story.problems(left=None))
    story.call(kind, end, "gone")
    assert len(story.problems(left=None)) == 1, "the second attempt says nothing"


def test_a_group_that_a_retried_call_finds_gone(story: Story) -> None:
    _, operation = story.find("dropped")
    push, drop = operation.calls()
    story.call("dropped", push, ["stored"] * len(push.runs))
    story.call("dropped", drop, "gone", retried=True)
    assert story.problems() == []


@pytest.mark.parametrize(
    ("results", "retried", "lost"),
    [
        ([1], False, False),
        ([0], False, True),
        ([0], True, False),
        ([None], False, False),
        ([None, 0], False, False),
    ],
)
def test_only_a_deletion_that_removed_something_excuses_a_loss(
    story: Story, results: list[int | None], retried: bool, lost: bool
) -> None:
    _, operation = story.find("delete")
    push, deletion = operation.calls()
    story.call("delete", push, ["stored"])
    for result in results:
        story.call("delete", deletion, result, retried=retried)
    assert [one.partition(": ")[2] for one in story.problems()] == (
        ["acknowledged, and lost before trainer got it"] if lost else []
    )


def test_what_is_too_old_leaves_and_nothing_else_does(story: Story) -> None:
    operation = story.push("fresh")
    name = work.uid(operation.task, operation.runs[0])

    def look(after: float, *uids: str) -> Sighting:
        return Sighting(story.time + after, story.time + after + 0.1, frozenset(uids))

    late = look(work.FRESH_SECONDS + 1)
    assert story.problems(sightings=[look(1, name), late]) == []
    [early] = story.problems(sightings=[look(1)])
    assert early == f"{name}: acknowledged, lost, and not too old yet"
    [back] = story.problems(sightings=[late, look(work.FRESH_SECONDS + 2, name)])
    assert back == f"{name}: listed after it had left"
    story.time += work.FRESH_SECONDS + 9
    story.lease("sampler", operation)
    [again] = story.problems(sightings=[late])
    assert again == f"{name}: delivered after it had left fresh"
