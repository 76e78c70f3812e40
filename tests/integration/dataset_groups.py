"""Groups of different lengths for the tests of datasets, and what became of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from experience_buffer import Client
from experience_buffer.collation import padded_collate
from experience_buffer.dataset import ExperienceDataset
from tests.integration.buffers import create
from tests.integration.plain import NUM_PROMPT, experience

SIZE = 3
"""Members of a group."""
PADDED = padded_collate(pad_token_id=7, columns=["uid", "group"])


def fill(client: Client, name: str, num_groups: int) -> list[str]:
    """Create a buffer of groups and push some; their keys, oldest first."""
    create(client, name, SIZE)
    return push(client, name, range(num_groups))


def push(client: Client, name: str, tasks: range) -> list[str]:
    members = []
    for task in tasks:
        for run in range(SIZE):
            length = 2 + (5 * task + 7 * run) % 11
            members.append(
                experience(
                    task,
                    run,
                    tokens=torch.arange(NUM_PROMPT + length) + 100 * task,
                    logprobs=torch.rand(length),
                )
            )
    client.push(members, buffer=name)
    return [f"7/{task}" for task in tasks]


def padded(
    client: Client | str, name: str, batch_size: int = 1, **options: Any
) -> ExperienceDataset:
    """A dataset of a buffer's groups, one at a time and padded, unless told otherwise."""
    given: dict[str, Any] = {"batch_size": batch_size, "collate": PADDED} | options
    return ExperienceDataset(client, buffer=name, **given)


def loading(dataset: ExperienceDataset, **options: Any) -> DataLoader[Any]:
    """A loader with one worker, which isn't forked from this process, unless told otherwise.

    It has used gRPC, whose locks and threads a fork tears apart.
    """
    given: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"} | options
    return DataLoader(dataset, batch_size=None, **given)


def groups(batch: dict[str, Any]) -> list[str]:
    """The groups of a batch, each of which has to be whole."""
    counts = Counter(batch["group"])
    assert set(counts.values()) == {SIZE}, "a group is split"
    return list(counts)


def left(client: Client, name: str) -> list[str]:
    """The groups that are neither consumed nor leased."""
    batch = client.sample(99, buffer=name, min_batch_size=1, timeout=0)
    found = list(dict.fromkeys(batch.groups))
    batch.nack("only looked at")
    return found


def retained(client: Client, name: str) -> int:
    """How many groups are consumed, and kept for a rewind."""
    return sum(each.state == "retained" for each in client.list(buffer=name)) // SIZE
