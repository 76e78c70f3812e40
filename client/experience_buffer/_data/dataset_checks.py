"""Which settings of a dataset go together. Pure."""

from __future__ import annotations

from experience_buffer.errors import InvalidRequestError


def check_ranks(rank: int, world_size: int, num_units: int) -> None:
    """Check that there is such a rank, and that each gets a part of every batch.

    Args:
        rank: The rank.
        world_size: How many there are.
        num_units: Fewest units of a batch that they share.

    Raises:
        InvalidRequestError: There isn't, or they don't.
    """
    if not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"rank {rank} of {world_size}: rank must be at least 0 and below world_size",
            subject="rank",
        )
    if num_units < world_size:
        raise InvalidRequestError(
            f"{num_units} units for {world_size} ranks would leave some without a batch; give "
            "batch_size, and min_batch_size if you give it, at least world_size",
            subject="batch_size",
        )


def check_workers(
    num_workers: int,
    *,
    is_auto: bool,
    has_end: bool,
    has_collate: bool,
    has_budget: bool,
    world_size: int,
) -> None:
    """Check that a dataset can be read by DataLoader workers.

    Each worker has a stream of its own, which ends with the worker's process; the training and its
    acks are in another process.

    Raises:
        InvalidRequestError: It can't.
    """
    problem = ""
    if is_auto:
        problem = "ack='auto', since workers read ahead of the training; give ack='manual'"
    elif has_end:
        problem = (
            "stop_after, since a worker that ends gives back what isn't acknowledged yet; leave it "
            "out and count steps where you iterate"
        )
    elif not has_collate:
        problem = (
            "format='packed' without collate, since a PackedBatch doesn't travel between "
            "processes; give a collation function"
        )
    elif num_workers > 1 and world_size > 1:
        problem = (
            f"world_size = {world_size} with {num_workers} workers, which would all get this "
            "rank's parts of the same batches; use num_workers of 0 or 1"
        )
    elif num_workers > 1 and has_budget:
        problem = (
            f"token_budget with {num_workers} workers, whose micro-batches would mix, so that no "
            "step trains on a whole batch; use num_workers of 0 or 1"
        )
    if problem:
        raise InvalidRequestError(
            f"a DataLoader with workers can't read a dataset with {problem}", subject="num_workers"
        )
