"""Datasets of batches that can't be read, or whose leases are over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from experience_buffer import Client, LeaseNotFoundError, TrxpError
from experience_buffer.dataset import ExperienceDataset
from tests.unit.client.rpc.pushed import FAST, payload


@pytest.fixture
def dataset(server: tuple[Any, str]) -> Iterator[ExperienceDataset]:
    with Client(server[1], options=FAST) as client:
        dataset = ExperienceDataset(client, batch_size=1, prefetch=1)
        yield dataset
        dataset.close()


def test_what_cannot_be_read_is_not_acknowledged(script: Any, dataset: ExperienceDataset) -> None:
    pack, script._pack = script._pack, lambda payloads: b"nonsense"
    script.batches.append([payload(1)])
    with pytest.raises(TrxpError):
        next(iter(dataset))
    script._pack = pack
    script.deliver([payload(2)])
    assert next(iter(dataset)).column("reward").tolist() == [2.0]
    assert (script.acked, dataset.step) == ([], 0)


def test_training_goes_on_after_a_lease_was_over(script: Any, dataset: ExperienceDataset) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(1)
    script.break_when_taken = True
    batches = iter(dataset)
    next(batches)
    assert script.ended_streams.acquire(timeout=10)
    with pytest.raises(LeaseNotFoundError):
        next(batches)
    assert next(iter(dataset)).column("reward").tolist() == [2.0]
    assert dataset.step == 0, "the first batch comes again"
