"""What one consumer acknowledged at which training step. Storing it is the caller's business."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence


class Timeline:
    """The acknowledgements of one consumer that a rewind can still take back.

    `acked -> released` (its step was declared safe), or `acked -> rewound` (to be delivered again).

    Steps are the trainer's, from 0; an acknowledgement of step s was trained on in step s or
    before it. They need not be consecutive or ascending. An experience (seq) that was acknowledged
    several times, as replay does, is retained as often.

    Not thread-safe; owned by its buffer.
    """

    def __init__(self) -> None:
        self._seqs: dict[int, list[int]] = {}
        self._steps: list[int] = []
        """The keys of `_seqs`, ascending."""
        self._num_retained = 0
        self._safe_step: int | None = None
        self._reached_step: int | None = None
        """The last step, apart from what is retained."""

    @property
    def safe_step(self) -> int | None:
        """Acknowledgements at or before it can't be rewound any more; None: none was declared."""
        return self._safe_step

    @property
    def last_step(self) -> int | None:
        """The highest step acknowledged, rewound to or declared safe; None: there was none."""
        last = self._steps[-1] if self._steps else None
        return max((step for step in (last, self._reached_step) if step is not None), default=None)

    @property
    def num_retained(self) -> int:
        """Acknowledgements held, each seq as often as it was acknowledged."""
        return self._num_retained

    @property
    def steps(self) -> Sequence[int]:
        """Steps of which acknowledgements can be rewound, ascending."""
        return self._steps

    def at(self, step: int) -> Sequence[int]:
        """What was acknowledged at a step and is retained, each seq as often as it was."""
        return self._seqs.get(step, ())

    def seqs_of(self, step: int) -> Sequence[int]:
        """What is held of a step, in the order of its acknowledgements, each seq as often as it was."""
        return self._seqs.get(step, ())

    def problem_with(self, step: int) -> str:
        """Say why an acknowledgement can't carry this step; empty if it can.

        A step at or before the last one is fine as long as it comes after the safe one.
        """
        if step < 0:
            return f"training step {step} is negative; they count from 0"
        if self._safe_step is not None and step <= self._safe_step:
            return (
                f"training step {step} is not after the safe step {self._safe_step}; "
                f"acknowledge with step {self._safe_step + 1} or later"
            )
        return ""

    def acked(self, step: int, seqs: Iterable[int]) -> None:
        """Retain what was acknowledged at a step.

        Raises:
            ValueError: `problem_with` finds one.
        """
        if problem := self.problem_with(step):
            raise ValueError(problem)
        self._retain(step, list(seqs))

    def forget(self, step: int, seqs: Iterable[int]) -> None:
        """Take back what `acked` was told: its commit failed, the acknowledgement never happened.

        What was released or rewound since is no longer here to be taken back.
        """
        retained = self._seqs.get(step)
        if retained is None:
            return
        missing = Counter(seqs)
        kept = []
        # From the end: a commit that fails is one of the latest.
        while retained and missing:
            seq = retained.pop()
            if seq not in missing:
                kept.append(seq)
                continue
            self._num_retained -= 1
            missing[seq] -= 1
            if not missing[seq]:
                del missing[seq]
        retained += reversed(kept)
        if not retained:
            del self._seqs[step]
            self._steps.remove(step)

    def declare_safe(self, step: int) -> list[tuple[int, int]]:
        """Release all acknowledgements at or before a step, which its checkpoint has seen.

        A step before the safe one releases what was restored since, and doesn't lower it.

        Returns:
            `(seq, step)` of each one released, ascending by step.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"training step {step} is negative; they count from 0")
        released = self._remove(0, bisect_right(self._steps, step))
        self._safe_step = max(step, -1 if self._safe_step is None else self._safe_step)
        self.reach(self._safe_step)
        return released

    def rewind(self, step: int) -> list[tuple[int, int]]:
        """Take back all acknowledgements after a step: the trainer resumes from its checkpoint.

        A negative step comes before all others. `last_step` becomes `step` if it was later.

        Returns:
            `(seq, step)` of each one taken back, ascending by step, within a step as acknowledged.

        Raises:
            ValueError: `step` is before the safe step; nothing has changed.
        """
        if self._safe_step is not None and step < self._safe_step:
            raise ValueError(
                f"training step {step} is before the safe step {self._safe_step}, up to which "
                "acknowledgements are final; rewind to that step or a later one"
            )
        last = self.last_step
        rewound = self._remove(bisect_right(self._steps, step), len(self._steps))
        if last is not None and last > step:
            self._reached_step = step if step >= 0 else None
        return rewound

    def restore(self, acks: Iterable[tuple[int, int]]) -> None:
        """Put back `(seq, step)` pairs, at start or when a rewind could not be stored.

        Those at or before the safe step can't be rewound; the next `declare_safe` releases them.
        """
        by_step: dict[int, list[int]] = {}
        for seq, step in acks:
            by_step.setdefault(step, []).append(seq)
        for step, seqs in by_step.items():
            self._retain(step, seqs)

    def reach(self, step: int) -> None:
        """Be at a step or a later one, at start: acknowledgements needn't have been retained there."""
        if self._reached_step is None or self._reached_step < step:
            self._reached_step = step

    def _retain(self, step: int, seqs: list[int]) -> None:
        if not seqs:
            return
        if step not in self._seqs:
            self._seqs[step] = []
            insort(self._steps, step)
        self._seqs[step] += seqs
        self._num_retained += len(seqs)

    def _remove(self, start: int, stop: int) -> list[tuple[int, int]]:
        steps = self._steps[start:stop]
        removed = [(seq, step) for step in steps for seq in self._seqs.pop(step)]
        del self._steps[start:stop]
        self._num_retained -= len(removed)
        return removed
