from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from experience_buffer_server.sampling.timeline import Timeline

STEPS = st.integers(0, 12)
SEQS = st.lists(st.integers(1, 7), max_size=5)


class TimelineMachine(RuleBasedStateMachine):
    """A timeline is a list of (seq, step) and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.acks: list[tuple[int, int]] = []
        self.safe = -1
        self.reached = -1
        self.last_rewound: list[tuple[int, int]] = []

    @rule(step=STEPS, seqs=SEQS)
    def acked(self, step: int, seqs: list[int]) -> None:
        problem = self.timeline.problem_with(step)
        assert bool(problem) == (step <= self.safe)
        if problem:
            with pytest.raises(ValueError, match=f"step {step} .*safe step {self.safe}"):
                self.timeline.acked(step, seqs)
        else:
            self.timeline.acked(step, iter(seqs))
            self.acks += [(seq, step) for seq in seqs]

    @rule(step=STEPS, seqs=SEQS)
    def forget(self, step: int, seqs: list[int]) -> None:
        self.timeline.forget(step, iter(seqs))
        for seq in seqs:
            places = [place for place, ack in enumerate(self.acks) if ack == (seq, step)]
            if places:
                del self.acks[places[-1]]

    @rule(step=STEPS)
    def declare_safe(self, step: int) -> None:
        released = self.timeline.declare_safe(step)
        assert released == sorted((a for a in self.acks if a[1] <= step), key=lambda a: a[1])
        self.acks = [a for a in self.acks if a[1] > step]
        self.safe = max(self.safe, step)
        self.reached = max(self.reached, self.safe)

    @rule(step=st.integers(-1, 12))
    def rewind(self, step: int) -> None:
        if step < self.safe:
            with pytest.raises(
                ValueError, match=f"step {step} is before the safe step {self.safe}"
            ):
                self.timeline.rewind(step)
            return
        last = self.last
        self.last_rewound = self.timeline.rewind(step)
        assert self.last_rewound == sorted(
            (a for a in self.acks if a[1] > step), key=lambda a: a[1]
        )
        self.acks = [a for a in self.acks if a[1] <= step]
        if last > step:
            self.reached = step

    @precondition(lambda self: self.last_rewound)
    @rule()
    def rewind_was_not_stored(self) -> None:
        self.timeline.restore(iter(self.last_rewound))
        self.acks += self.last_rewound
        self.last_rewound = []

    @rule()
    def restart(self) -> None:
        self.timeline = Timeline()
        if self.safe >= 0:
            assert self.timeline.declare_safe(self.safe) == []
        self.timeline.restore(self.acks)
        self.reached = self.safe

    @property
    def last(self) -> int:
        return max([self.reached, *(step for _, step in self.acks)])

    @invariant()
    def counts_are_right(self) -> None:
        assert self.timeline.num_retained == len(self.acks)
        assert self.timeline.safe_step == (self.safe if self.safe >= 0 else None)
        assert self.timeline.last_step == (self.last if self.last >= 0 else None)


TestTimelineModel = TimelineMachine.TestCase
TestTimelineModel.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (-1, "training step -1 is negative; they count from 0"),
        (3, "training step 3 is not after the safe step 5; acknowledge with step 6 or later"),
        (5, "training step 5 is not after the safe step 5; acknowledge with step 6 or later"),
        (6, ""),
        (7, ""),
    ],
)
def test_what_an_ack_can_carry(step: int, problem: str) -> None:
    timeline = Timeline()
    timeline.declare_safe(5)
    timeline.acked(7, [11])
    assert timeline.problem_with(step) == problem


def test_a_negative_step_is_never_safe() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="step -1 is negative"):
        timeline.declare_safe(-1)
    assert timeline.safe_step is None


def test_what_is_restored_before_the_safe_step_is_released_next() -> None:
    timeline = Timeline()
    timeline.declare_safe(5)
    timeline.restore([(11, 7), (13, 3)])
    assert timeline.num_retained == 2
    assert timeline.rewind(5) == [(11, 7)]
    assert timeline.declare_safe(4) == [(13, 3)]
    assert timeline.safe_step == 5


def test_a_million_acknowledgements_are_handled_by_their_steps() -> None:
    timeline = Timeline()
    num_steps, per_step = 10_000, 100
    timeline.restore((seq, seq // per_step) for seq in range(num_steps * per_step))
    for step in range(9_000, num_steps):
        timeline.forget(step, [step * per_step + 7])
        timeline.acked(step, [step * per_step + 7])
    released = sum(len(timeline.declare_safe(step)) for step in range(5_000))
    assert released == 500_000
    assert len(timeline.rewind(6_999)) == 300_000
    assert (timeline.num_retained, timeline.safe_step, timeline.last_step) == (
        200_000,
        4_999,
        6_999,
    )
