"""The comparison behind the crash matrix finds each broken promise, and nothing where none is."""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer.v1 import types_pb2
from tests.chaos import work
from tests.chaos.audit import Audit, advantages, checksum
from tests.chaos.calls import describe
from tests.chaos.fates import Sighting

SEED = 11
START = 1000.0


@cache
def first(kind: str) -> tuple[int, work.Operation]:
    """The first operation of a kind, and its number."""
    numbered = ((index, work.operation(SEED, 0, index)) for index in itertools.count())
    return next((index, operation) for index, operation in numbered if operation.kind == kind)


class Story:
    """Journals as a run would write them, line by line, of the first operation of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = START
        self.left: set[str] | None = set()
        self.sightings: list[Sighting] = []
        self._num_leases = 0

    def _write(self, name: str, event: str, **fields: Any) -> Story:
        self.time += 0.01
        with (self.folder / name).open("a") as file:
            file.write(json.dumps({"event": event, "time": self.time} | fields) + "\n")
        return self

    def call(self, kind: str, number: int, result: Any, *, retried: bool = False) -> Story:
        """One call; not answered if the result is None. A push's is the status of each."""
        index, operation = first(kind)
        call = list(operation.calls())[number]
        note: dict[str, Any] = {"index": index, "verb": call.verb, "part": call.part}
        self._write("pusher-0", "calling", **note)
        if result is not None:
            result = [result] * len(call.runs) if call.verb == "push" else result
            self._write("pusher-0", "called", result=result, retried=retried, **note)
        return self

    def push(self, kind: str, status: str = "stored") -> Story:
        """All calls, answered."""
        for number, call in enumerate(first(kind)[1].calls()):
            self.call(kind, number, status if call.verb == "push" else 1)
        return self

    def lease(
        self, consumer: str, kind: str, *, end: str = "acked", runs: Any = None, **changes: Any
    ) -> Story:
        """Deliver an operation's experiences, and end that."""
        self._num_leases += 1
        operation = first(kind)[1]
        items = [self._item(operation, run, changes) for run in runs or operation.runs]
        self.note(consumer, kind, "leased", asked=self.time, items=items)
        return self.note(consumer, kind, end) if end else self

    def note(self, consumer: str, kind: str, event: str, **fields: Any) -> Story:
        """What happens to the last lease."""
        name = "learner" if consumer == "learner" else "trainer-0-all-of-them"
        place = {"buffer": first(kind)[1].buffer, "consumer": consumer, "lease": self._num_leases}
        return self._write(name, event, **place, **fields)

    def _item(self, operation: work.Operation, run: int, changes: dict[str, Any]) -> list[Any]:
        grouped = operation.buffer in ("groups", "steps")
        item = {
            "uid": work.uid(operation.task, run),
            "group": operation.key if grouped else "",
            "advantage": advantages(operation)[run] if operation.buffer == "groups" else None,
            "checksum": checksum(operation, run),
        }
        return list((item | changes).values())

    def consume(self, *kinds: str) -> Story:
        """Push, and every consumer of its buffer gets it."""
        for kind in kinds:
            self.push(kind)
            for consumer in ("trainer",) if kind == "queue" else ("actor", "critic"):
                self.lease(consumer, kind)
        return self

    def rewind(self) -> Story:
        return self._write("learner", "rewinding", buffer="steps", consumer="learner", step=-1)

    def save(self, *kinds: str) -> Story:
        """The learner's checkpoint, a step for each of these."""
        groups = [[first(kind)[1].key] for kind in kinds]
        checkpoint = {"step": len(groups) - 1, "groups": groups}
        (self.folder / "checkpoint").write_text(json.dumps(checkpoint))
        return self

    def wait(self, seconds: float) -> Story:
        self.time += seconds
        return self

    def keep(self, kind: str) -> Story:
        """It is still stored in the end."""
        operation = first(kind)[1]
        self.left = {work.uid(operation.task, run) for run in operation.runs}
        return self

    def end_early(self) -> Story:
        """Nobody has looked what is left."""
        self.left = None
        return self

    def check(self, found: dict[str, int]) -> None:
        """Exactly these problems are told, each so often."""
        audit = Audit(self.folder, SEED, 1, self.sightings)
        audit.check(None if self.left is None else frozenset(self.left))
        told = (next((text for text in found if text in one), one) for one in audit.problems)
        assert Counter(told) == found


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


REFUSED_AGAIN = "its push was refused after it had been acknowledged"
STORIES: dict[str, tuple[Callable[[Story], Story], dict[str, int]]] = {
    "all is well": (
        lambda story: (
            story.consume("queue", "whole", "halves", "sealed")
            .push("dropped")
            .push("delete")
            .push("steps")
            .rewind()
            .lease("learner", "steps")
            .save("steps")
        ),
        {},
    ),
    "acknowledged, and nowhere": (
        lambda story: story.push("queue"),
        {"acknowledged, and lost before trainer got it": 2},
    ),
    "still there": (lambda story: story.push("queue").keep("queue"), {}),
    "nobody looked": (lambda story: story.push("queue").end_early(), {}),
    "a push without an answer may be lost": (lambda story: story.call("queue", 0, None), {}),
    "a group that the learner missed": (
        lambda story: story.push("steps").lease("learner", "steps"),
        {"acknowledged, and the learner was never trained on it": 1},
    ),
    "a group that the learner had twice": (
        lambda story: story.push("steps").lease("learner", "steps").save("steps", "steps"),
        {"in the learner's checkpoint 2 times": 1},
    ),
    "a group that is stored and was never offered": (
        lambda story: story.push("steps").rewind().keep("steps"),
        {"acknowledged, and the learner was never trained on it": 1},
    ),
    "a rewind brings back what was acknowledged": (
        lambda story: (
            story.push("steps")
            .save("steps")
            .lease("learner", "steps")
            .rewind()
            .lease("learner", "steps")
        ),
        {},
    ),
    "a group that is split": (
        lambda story: (
            story.push("halves")
            .lease("critic", "halves")
            .lease("actor", "halves", runs=[0, 1, 2])
            .lease("actor", "halves", runs=[3])
        ),
        {f"group {first('halves')[1].key}: delivered with": 2},
    ),
    "a wrong advantage": (
        lambda story: story.consume("whole").lease("critic", "whole", runs=[2], advantage=0.5),
        {"advantage 0.5, expected": 1, "delivered to groups/critic again after": 1},
    ),
    "a stranger": (
        lambda story: story.consume("queue").lease("trainer", "queue", uid="7/9/0/0/5", runs=[0]),
        {"7/9/0/0/5: delivered and never pushed": 1},
    ),
    "what was deleted": (
        lambda story: story.push("delete").wait(1).lease("trainer", "delete"),
        {"delivered to queue/trainer after it was removed": 1},
    ),
    "what was dropped": (
        lambda story: story.push("dropped").wait(1).lease("critic", "dropped"),
        {"after it was removed": 2, "delivered to groups/critic, and its group was never whole": 2},
    ),
    "an answered ack that is forgotten": (
        lambda story: (
            story.consume("queue")
            .note("trainer", "queue", "reacking")
            .note("trainer", "queue", "lost", verb="reack", details="gone")
        ),
        {"its answered ack is forgotten": 1},
    ),
    "a lease cut short": (
        lambda story: (
            story.push("whole")
            .lease("actor", "whole")
            .lease("critic", "whole", end="acking")
            .note("critic", "whole", "lost", verb="ack", details="gone")
        ),
        {"ended before its time": 1, "critic never consumed it, and it is gone": 4},
    ),
    "a push again": (lambda story: story.consume("queue").push("queue", "duplicate"), {}),
    "a push that is stored a second time": (
        lambda story: story.consume("queue").push("queue", "stored"),
        {"stored by a push after it had been acknowledged before": 2},
    ),
    "what was consumed is a duplicate": (
        lambda story: story.consume("whole").call("whole", 0, "duplicate"),
        {},
    ),
    "what was consumed is refused": (
        lambda story: story.consume("whole").call("whole", 0, "refused"),
        {REFUSED_AGAIN: 4},
    ),
    "a dropped group takes nobody": (
        lambda story: story.push("dropped").call("dropped", 0, "refused"),
        {},
    ),
    "a dropped group takes somebody": (
        lambda story: story.push("dropped").call("dropped", 0, "stored"),
        {"stored after its group was dropped": 2},
    ),
    "a sealed group is gone": (
        lambda story: story.call("sealed", 0, "stored").call("sealed", 1, "gone").end_early(),
        {"gone before its seal": 1},
    ),
    "a dropped group is gone": (
        lambda story: story.call("dropped", 0, "stored").call("dropped", 1, "gone").end_early(),
        {"gone before its drop": 1},
    ),
    "of a second attempt it says nothing": (
        lambda story: (
            story.call("sealed", 0, "stored")
            .call("sealed", 1, None)
            .call("sealed", 1, "gone")
            .end_early()
        ),
        {},
    ),
    "a retried call finds a group gone": (
        lambda story: story.call("dropped", 0, "stored").call("dropped", 1, "gone", retried=True),
        {},
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_is_told_of_a_story(story: Story, name: str) -> None:
    tell, found = STORIES[name]
    tell(story).check(found)


def test_what_a_trainer_complained_of_is_no_journal(story: Story) -> None:
    (story.folder / "trainer-0.errors").write_text("Traceback (most recent call last):\n")
    story.check({})


@pytest.mark.parametrize(
    ("end", "seconds", "found"),
    [
        ("acked", 60.0, {"again after its answered ack": 2}),
        ("", 1.0, {"two leases at once": 2}),
        ("acking", 1.0, {"two leases at once": 2}),
        ("forgotten", 2.9, {"two leases at once": 2}),
        ("nacking", 0.1, {}),
        ("acking", 4.0, {}),
        ("", 4.0, {}),
    ],
)
def test_a_second_delivery(story: Story, end: str, seconds: float, found: dict[str, int]) -> None:
    story.push("queue").lease("trainer", "queue", end=end).wait(seconds)
    story.lease("trainer", "queue").check(found)


@pytest.mark.parametrize(
    ("kind", "consumer"),
    [("queue", "trainer"), ("steps", "learner"), ("whole", "critic"), ("replay", "sampler")],
)
def test_a_payload_is_compared_in_every_buffer(story: Story, kind: str, consumer: str) -> None:
    story.push(kind).lease(consumer, kind, checksum=1).end_early()
    story.check({"its payload has changed": len(first(kind)[1].runs)})


def test_what_the_server_adds_is_no_part_of_what_was_pushed() -> None:
    operation = work.operation(SEED, 0, 0)
    member = work.member(operation.task, operation.variant, 0)
    column = trxp.TensorView("F32", (2,), memoryview(b"\0" * 8))
    for names in ((), ("advantages", "returns")):
        payload = trxp.with_tensors(member, dict.fromkeys(names, column))
        *_, checksum = describe(types_pb2.SampledExperience(payload=payload))
        assert checksum == zlib.crc32(member)


@pytest.mark.parametrize("kind", ["sealed", "dropped", "queue", "delete"])
def test_a_first_push_is_not_refused(story: Story, kind: str) -> None:
    num_refused = 1 if kind == "delete" else 2
    story.call(kind, 0, "refused").check({"its push was refused": num_refused})


@pytest.mark.parametrize(
    ("results", "retried", "num_lost"),
    [([1], False, 0), ([0], False, 1), ([0], True, 0), ([None], False, 0), ([None, 0], False, 0)],
)
def test_only_a_deletion_that_removed_something_excuses_a_loss(
    story: Story, results: list[int | None], retried: bool, num_lost: int
) -> None:
    story.call("delete", 0, "stored")
    for result in results:
        story.call("delete", 1, result, retried=retried)
    story.check({"acknowledged, and lost before trainer got it": num_lost} if num_lost else {})


AGED = work.FRESH_SECONDS + 1


@pytest.mark.parametrize(
    ("kind", "looks", "is_delivered", "found"),
    [
        ("replay", {1: False, 3: True}, False, {"too new for an eviction": 1, "listed after": 1}),
        ("replay", {1: False}, True, {"too new for an eviction": 1, "had left replay": 1}),
        ("fresh", {1: True, AGED: False}, False, {}),
        ("fresh", {1: False}, False, {"acknowledged, lost, and not too old yet": 1}),
        ("fresh", {AGED: False, AGED + 1: True}, False, {"listed after it had left": 1}),
        ("fresh", {AGED: False}, True, {"delivered after it had left fresh": 1}),
    ],
)
def test_what_has_left_by_itself_stays_away_and_nothing_leaves_too_early(
    story: Story, kind: str, looks: dict[float, bool], is_delivered: bool, found: dict[str, int]
) -> None:
    """At each time of a look it is listed, or it isn't."""
    story.push(kind)
    uids = {work.uid(first(kind)[1].task, run) for run in first(kind)[1].runs}
    for after, is_there in looks.items():
        seen = frozenset(uids if is_there else ())
        story.sightings.append(Sighting(story.time + after, story.time + after + 0.1, seen))
    if is_delivered:
        story.wait(AGED + 9).lease("sampler", kind)
    story.check(found)
