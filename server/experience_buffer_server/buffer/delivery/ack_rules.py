"""What an acknowledgement of a lease may say, and what it counts for. No state, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experience_buffer import errors
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease


def check_ack(
    lease: Lease,
    step: int | None,
    rank: int | None,
    problem_with: Callable[[int], str],
    buffer_name: str,
) -> None:
    """See whether an open lease can be acknowledged with this step, by this rank.

    `problem_with` says why an ack can't carry a step; empty if it can.

    Raises:
        InvalidRequestError: The lease is shared and the rank is none of those that share it.
        WrongStateError: The step is safe already.
    """
    if (rank is None) != (not lease.world_size) or (rank or 0) >= max(lease.world_size, 1):
        shared = f"is shared by {lease.world_size} ranks" if lease.world_size else "isn't shared"
        raise errors.InvalidRequestError(
            f"lease {lease.id} of buffer {buffer_name!r} {shared}; acknowledge it "
            f"{'as one of them' if lease.world_size else 'without a rank'}, not as {rank}",
            subject="rank",
        )
    if step is None or 0 <= step <= max(_given(lease.acked_parts.values()), default=-1):
        # A step that another rank has acknowledged with may have become safe since: the ranks that
        # come later must still be able to end the lease.
        return
    if problem := problem_with(step):
        raise errors.WrongStateError(
            f"lease {lease.id} of buffer {buffer_name!r}: {problem}", subject="step"
        )


def step_of(steps: Iterable[int | None], problem_with: Callable[[int], str]) -> int | None:
    """The step that the ranks' acks of a lease count for; None, for good, if it is safe by now."""
    last = max(_given(steps), default=None)
    return None if last is None or problem_with(last) else last


def not_found(lease: Lease | None, lease_id: int, buffer_name: str) -> errors.LeaseNotFoundError:
    """Say why nothing can be done with a lease."""
    if lease is None:
        state = "is not known; it may have ended long ago"
    elif lease.state == "ending":
        state = "is being acknowledged"
    else:
        ago = max(clock.now() - lease.deadline, 0.0)
        again = "" if lease.state == "acked" else "; its experiences were offered again"
        state = f"was {lease.state} {ago:.1f} s ago{again}"
    return errors.LeaseNotFoundError(
        f"lease {lease_id} of buffer {buffer_name!r} {state}", subject=str(lease_id)
    )


def _given(steps: Iterable[int | None]) -> list[int]:
    return [step for step in steps if step is not None]
