"""Which DataLoaders a dataset refuses, before it connects to anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from experience_buffer import InvalidRequestError
from experience_buffer.collation import padded_collate
from experience_buffer.dataset import ExperienceDataset


def dataset(ack: Any = "auto", **options: Any) -> ExperienceDataset:
    collate = padded_collate(pad_token_id=0)
    return ExperienceDataset("127.0.0.1:1", batch_size=2, collate=collate, ack=ack, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 1},
        {"batch_size": 4},
        {"batch_size": 2, "drop_last": True},
        {"batch_size": 2, "collate_fn": list},
        {"batch_size": 1, "num_workers": 1, "multiprocessing_context": "forkserver"},
    ],
)
def test_a_loader_that_makes_batches_is_told_what_to_write(options: dict[str, Any]) -> None:
    loader = DataLoader(dataset(), **options)
    with pytest.raises(InvalidRequestError, match=r"write DataLoader\(dataset, batch_size=None\)"):
        next(iter(loader))


def test_batches_with_tickets_arent_stacked() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"make tensors of their tickets: write DataLoader"
    ):
        iter(DataLoader(dataset("manual"), batch_size=2))
    # Who takes a list of them knows what it is.
    iter(DataLoader(dataset("manual"), batch_size=2, collate_fn=list))
    iter(DataLoader(dataset("manual"), batch_size=2, collate_fn=list, drop_last=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shuffle": True}, "shuffle"),
        ({"sampler": SequentialSampler([1, 2])}, "sampler"),
        ({"batch_sampler": [[0], [1]]}, "batch_sampler"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
    ],
)
def test_torch_refuses_orders_of_its_own(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(dataset(), **options)


class Wrapping(IterableDataset[Any]):
    """Takes batches apart, as a user may."""

    def __init__(self, inner: ExperienceDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            yield from batch["input_ids"]


class Subclassing(ExperienceDataset):
    """Does something before it iterates."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


def test_a_loader_is_seen_through_what_wraps_the_dataset() -> None:
    for wrapped in (Wrapping(dataset()), Subclassing("127.0.0.1:1", batch_size=2)):
        with pytest.raises(InvalidRequestError, match="batch_size=None"):
            next(iter(DataLoader(wrapped, batch_size=8)))


READS_AHEAD = """
class Shard(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        last = next(batches)
        for batch in batches:
            yield last
            last = batch
"""


@pytest.mark.parametrize("module", ["accelerate.data_loader", "lightning.pytorch.loops.fetchers"])
def test_a_loader_that_reads_ahead_needs_acks_of_its_own(module: str) -> None:
    names: dict[str, Any] = {"__name__": module, "DataLoader": DataLoader}
    exec(READS_AHEAD, names)
    reason = f"{module.partition('.')[0]} reads a batch ahead .*; give ack='manual'"
    with pytest.raises(InvalidRequestError, match=reason):
        next(iter(names["Shard"](dataset(), batch_size=None)))


def test_plain_loaders_and_loops_are_fine() -> None:
    for ack in ("auto", "manual"):
        iter(dataset(ack))
        iter(DataLoader(dataset(ack), batch_size=None))
        iter(DataLoader(dataset(ack), batch_size=None, collate_fn=dict, timeout=0))
