"""Which experience speaks for a run in its group's statistics.

Reads runs, steps and rewards only; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from .checks import as_float32
from .values import ExperienceInput, GroupError


def elect_voters(members: Sequence[ExperienceInput]) -> list[int]:
    """Find, for each member of a group, the member whose reward is the vote of its run.

    A run votes once however many experiences (steps) it has, with the reward at its highest step.
    A member whose run is `""` is a run of its own. Several members at the highest step of a run
    are one vote as long as their rewards agree.

    Args:
        members: The group's members.

    Returns:
        Index of the voter of each member's run, in the order of the members.

    Raises:
        GroupError: Members at the highest step of one run have different rewards, so that the
            run's vote isn't defined.
    """
    voters: dict[str, int] = {}
    for index, member in enumerate(members):
        if member.run and (
            member.run not in voters or member.step > members[voters[member.run]].step
        ):
            voters[member.run] = index
    for index, member in enumerate(members):
        voter = voters.get(member.run, index)
        if member.step == members[voter].step and not _agree(member, members[voter]):
            raise GroupError(
                f"experiences {voter} and {index} of the group share run {member.run!r} and step "
                f"{member.step} but have rewards {members[voter].reward!r} and {member.reward!r}; "
                "give each rollout its own run, or each step its own number"
            )
    return [voters.get(member.run, index) for index, member in enumerate(members)]


def _agree(one: ExperienceInput, other: ExperienceInput) -> bool:
    if one.reward is None or other.reward is None:
        return one.reward is other.reward
    return as_float32(one.reward) == as_float32(other.reward)
