"""The index row of one experience, in the form in which a million of them stay in memory.

Equal values of many records become one object: what stays in memory is some 150 bytes less each.
Rows read from the disk, and pushes decoded one by one, hold numbers of their own even where they
are equal: the versions of a whole batch, the time of all that came in one push.
"""

from __future__ import annotations

from dataclasses import dataclass

from experience_buffer.eid import task_in_key

OTHER_DIGEST = 1 << 60
"""Bit of `Record.fields`: `digest` isn't that of its payload, which was replaced since it was pushed,
or holds sets, whose order in it is chance."""
_CUT_BITS = 10
_CUT_MASK = (1 << _CUT_BITS) - 1
_DIGEST_BYTES = 16
_NUM_PARTS = 5
_MAX_NUMBERS = 1024


def cut_of(batch: str, task: str) -> int:
    """Where batch and task end within a uid, as `Record.cut` has it.

    A uid has at most 500 characters; see `rows.MAX_KEY_BYTES`.
    """
    return len(batch) << _CUT_BITS | len(batch) + 1 + len(task)


@dataclass(slots=True, kw_only=True)
class Record:
    """The index row of one stored experience or tombstone: everything but its payload.

    A million of them stay in memory: what the uid says already isn't kept a second time.
    """

    seq: int
    """Arrival order within the buffer, from 1, strictly increasing."""
    uid: str
    """`batch/task/run/step/suffix`."""
    cut: int
    """Where its batch and task end; see `cut_of`. Texts may hold a `/`, so the uid doesn't tell."""
    digest_number: int
    """`digest` as a number: it takes 48 bytes of memory instead of 64."""
    group_id: int
    """The group's row; 0: ungrouped."""
    tombstone: bool
    reward: float | None
    response_tokens: int
    payload_bytes: int
    """0 for a tombstone."""
    min_version: int | None
    max_version: int | None
    push_time: float
    """Seconds since the Unix epoch."""
    note: str = ""
    """A tombstone's reason. Of an experience, why it was set aside: a row of it can't be read back."""
    fields: int = 0
    """Which of an estimator's inputs it carries: one bit each, and one for being counted already."""
    priority: float = 1.0
    """0 to `rows.MAX_PRIORITY`: as pushed, or as updated since. A larger one that is stored counts as that."""
    version: int = 0
    """The number, of those that `seq` counts, given with the last update of its priority; 0: none."""

    @property
    def generation(self) -> int:
        """Changes with every update of the priority, and differs from that of any earlier push."""
        return self.version or self.seq

    @property
    def digest(self) -> bytes:
        """16 bytes over the canonical payload; tells a repeated push from a conflicting one."""
        return self.digest_number.to_bytes(_DIGEST_BYTES, "big")

    @property
    def parts(self) -> tuple[str, str, int, int]:
        """Batch, task, run and step."""
        parts = self.uid.split("/")
        if len(parts) == _NUM_PARTS:
            batch, task, run, step, _ = parts
        else:
            begin, end = self.cut >> _CUT_BITS, self.cut & _CUT_MASK
            batch, task = self.uid[:begin], self.uid[begin + 1 : end]
            run, step, _ = self.uid[end + 1 :].split("/", 2)
        return batch, task, int(run), int(step)

    @property
    def task(self) -> str:
        """The task within the batch, as text."""
        return self.parts[1]

    @property
    def run(self) -> int:
        """The rollout of the task."""
        return self.parts[2]

    @property
    def step(self) -> int:
        """The step within the run."""
        return self.parts[3]

    @property
    def tid(self) -> str:
        """Task key; see `EID.tid`."""
        end = self.cut & _CUT_MASK
        text = self.uid[:end]
        if text.count("/") == 1 and "%2" not in text:
            return text
        begin = self.cut >> _CUT_BITS
        return f"{text[:begin]}/{task_in_key(text[begin + 1 :])}"

    @property
    def rid(self) -> str:
        """Run key."""
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        """Step key."""
        return f"{self.tid}/{self.step}"


class Numbers:
    """For numbers of which many are equal, as rewards; the first 1024 are remembered."""

    def __init__(self) -> None:
        self._known: dict[float | str, float] = {}

    def intern(self, number: float) -> float:
        """The equal number that came first."""
        # By its text where it is 0: -0.0 equals 0.0 and is another number.
        key = number or repr(number)
        known = self._known.get(key)
        if known is not None:
            return known
        if len(self._known) < _MAX_NUMBERS:
            self._known[key] = number
        return number


class Interner:
    """For records that come one after another. Not thread-safe."""

    def __init__(self) -> None:
        self._previous: Record | None = None
        self._number = Numbers().intern

    def intern(self, record: Record) -> None:
        """Put what equals the previous record's, or a number seen often, in place of its own."""
        previous, self._previous = self._previous, record
        record.priority = self._number(record.priority)
        if record.reward is not None:
            record.reward = self._number(record.reward)
        if record.max_version == record.min_version:
            record.max_version = record.min_version
        if previous is None:
            return
        # Written out: it happens with every push, and a million times at the start.
        if record.cut == previous.cut:
            record.cut = previous.cut
        if record.group_id == previous.group_id:
            record.group_id = previous.group_id
        if record.response_tokens == previous.response_tokens:
            record.response_tokens = previous.response_tokens
        if record.payload_bytes == previous.payload_bytes:
            record.payload_bytes = previous.payload_bytes
        if record.min_version == previous.min_version:
            record.min_version = previous.min_version
        if record.max_version == previous.max_version:
            record.max_version = previous.max_version
        if record.push_time == previous.push_time:
            record.push_time = previous.push_time
        if record.fields == previous.fields:
            record.fields = previous.fields
