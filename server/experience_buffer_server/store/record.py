"""The index row of one experience, in the form in which a million of them stay in memory."""

from __future__ import annotations

from dataclasses import dataclass

OTHER_DIGEST = 1 << 60
"""Bit of `Record.fields`: `digest` isn't that of its payload, which was replaced since it was pushed,
or holds sets, whose order in it is chance."""
_CUT_BITS = 10
_CUT_MASK = (1 << _CUT_BITS) - 1
_DIGEST_BYTES = 16
_NUM_PARTS = 5


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
            batch, task = self.uid[: self.cut >> _CUT_BITS], self.tid
            run, step, _ = self.uid[len(task) + 1 :].split("/", 2)
            task = task[len(batch) + 1 :]
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
        """Task key."""
        return self.uid[: self.cut & _CUT_MASK]

    @property
    def rid(self) -> str:
        """Run key."""
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        """Step key."""
        return f"{self.tid}/{self.step}"
