"""What the trainer's ranks do together: torch.distributed with gloo, over the loopback interface."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the others; longer than a server takes to restart."""


class Ranks:
    """One rank's tie to the others; a context manager. Every rank must make the same calls.

    A call raises RuntimeError when another rank has died or doesn't come within `TIMEOUT`.

    Args:
        rank: Which one this process is, from 0.
        world_size: How many there are.
        rendezvous: File by which they find each other; none exists there yet.
    """

    def __init__(self, rank: int, world_size: int, *, rendezvous: Path) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous

    @property
    def is_first(self) -> bool:
        """True for the one rank that does what must be done once."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by the sum of all ranks'; to the bit the same on each."""
        dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Exchange small values; those of all ranks, in their order. Nobody returns early."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast("list[T]", values)

    def meet(self) -> None:
        """Wait until all ranks have called this."""
        dist.barrier()

    def __enter__(self) -> Self:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(  # type: ignore[attr-defined]
                str(self._rendezvous), self.world_size
            ),
            rank=self.rank,
            world_size=self.world_size,
            timeout=TIMEOUT,
        )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        dist.destroy_process_group()
