"""What iterates over a dataset, as far as acks go by it: a torch DataLoader, and who wraps it.

Torch tells a dataset nothing of its loader. But it is the loader's fetcher that calls `iter`, in the
trainer's process or in a worker, and it knows; so the calls that are under way are looked through,
once for each iteration.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch.utils.data import _utils, default_collate

from experience_buffer.errors import InvalidRequestError

_READ_AHEAD: Final = frozenset({"accelerate", "lightning", "pytorch_lightning"})
"""Packages whose loops ask for the next batch before they hand out the one before."""


def check(*, is_auto: bool) -> None:
    """Check that whoever begins to iterate asks for a batch only when it's done with the last one.

    Args:
        is_auto: Whether asking for a batch acknowledges the one before.

    Raises:
        InvalidRequestError: A DataLoader puts batches together, or reads ahead.
    """
    fetcher, package = _iterating()
    if fetcher is None:
        return
    if fetcher.auto_collation and is_auto:
        raise InvalidRequestError(
            "a DataLoader with a batch_size asks for the next batches before the trainer has the "
            "first one, which would acknowledge it untrained; the dataset's batches are whole "
            "already: write DataLoader(dataset, batch_size=None)",
            subject="batch_size",
        )
    if fetcher.auto_collation and fetcher.collate_fn is default_collate:
        raise InvalidRequestError(
            "a DataLoader with a batch_size would stack whole batches, and make tensors of their "
            "tickets: write DataLoader(dataset, batch_size=None), or give a collate_fn that takes a "
            "list of LeasedBatch",
            subject="batch_size",
        )
    if package in _READ_AHEAD and is_auto:
        raise InvalidRequestError(
            f"{package} reads a batch ahead of the training, which would acknowledge the one before "
            "untrained; give ack='manual', and call ack(ticket, step=...) after the step",
            subject="ack",
        )


def _iterating() -> tuple[Any, str]:
    """The fetcher that iterates, None without a DataLoader, and the package that asks the loader."""
    fetcher = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if fetcher is None:
            # Of no other frame: a look at its variables would keep them alive.
            if module == _utils.fetch.__name__:
                fetcher = frame.f_locals.get("self")
        elif not module.startswith("torch.utils.data"):
            return fetcher, module.partition(".")[0]
        frame = frame.f_back
    return fetcher, ""
