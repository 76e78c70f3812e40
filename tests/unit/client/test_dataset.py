"""Datasets without a server: settings, pickling, token budgets, selected rows."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer import Client, InvalidRequestError, PackedBatch
from experience_buffer._data import token_budget
from experience_buffer._packed.select import select
from experience_buffer.collation import padded_collate, trinity_collate
from experience_buffer.dataset import ExperienceDataset, LeasedBatch, LeaseTicket
from experience_buffer.packed import PackedRow
from tests.unit.client.packed.packed_rows import SINGLES, batches, parsed

TICKET = LeaseTicket(
    buffer="math", consumer="actor", lease_id=7, rank=None, micro_batch=1, num_micro_batches=3
)


# --- token budgets


@given(st.lists(st.integers(0, 41), max_size=30), st.integers(1, 53))
def test_micro_batches_are_a_partition_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = token_budget.split(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts)
    for part in parts:
        assert sum(lengths[index] for index in part) <= budget or len(part) == 1
    assert parts == token_budget.split(lengths, budget)
    if parts:
        assert max(lengths) in [lengths[index] for index in parts[0]]


@given(st.lists(st.integers(1, 41), min_size=1, max_size=30), st.integers(41, 67))
def test_micro_batches_are_few(lengths: list[int], budget: int) -> None:
    parts = token_budget.split(lengths, budget)
    sums = [sum(lengths[index] for index in part) for part in parts]
    # No two could be one: less than twice the fewest possible, whatever the lengths.
    smallest = sorted(sums)[:2]
    assert len(sums) == 1 or sum(smallest) > budget
    assert len(parts) <= 11 / 9 * max(-(-sum(lengths) // budget), 1) * 1.5 + 1


def test_best_fit_fills_gaps_exactly() -> None:
    assert token_budget.split([3, 7, 5, 2, 8, 5], 10) == [[3, 4], [0, 1], [2, 5]]
    assert token_budget.split([], 10) == []
    assert token_budget.split([0, 0], 1) == [[0, 1]]
    assert token_budget.split([23, 4, 29], 11) == [[2], [0], [1]]


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_below_one_token_is_refused(budget: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"token_budget is {budget}; give a whole number of at least 1"
    ):
        token_budget.split([], budget)
    with pytest.raises(InvalidRequestError, match="token_budget"):
        ExperienceDataset("h", batch_size=1, token_budget=budget)


# --- selected rows


def same(batch: PackedBatch, index: int, other: PackedBatch, place: int) -> bool:
    columns = all(
        batch.column(name)[index].equal(other.column(name)[place])
        or name in ("reward", "probability")
        for name in batch.columns
    )
    texts = [
        (each.uids[at], each.groups[at], each.flags[at], each.payload(at))
        for each, at in ((batch, index), (other, place))
    ]
    return columns and texts[0] == texts[1]


@given(st.data())
def test_selected_rows_are_a_batch_of_their_own(data: st.DataObject) -> None:
    rows = data.draw(batches())
    batch = parsed(rows)
    indices = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
    chosen = PackedBatch(select(batch._table, indices))
    assert len(chosen) == len(indices)
    assert all(same(batch, index, chosen, place) for place, index in enumerate(indices))
    wanted = parsed([rows[index] for index in indices])
    assert chosen.fields == wanted.fields
    for name in chosen.fields:
        if len(chosen._table.fields[name]) == 1:
            assert chosen.offsets(name).equal(wanted.offsets(name))


def test_selected_rows_are_laid_out_like_a_batch_of_them() -> None:
    names = [name for name in SINGLES if not name.startswith("dpo")][:9]
    rows = [PackedRow(uid=name, payload=SINGLES[name], tensors={}) for name in names]
    batch = parsed(rows)
    indices = [7, 2, 5]
    options: dict[str, Any] = {"pad_token_id": 3, "fields": ["logprobs"]}
    chosen = PackedBatch(select(batch._table, indices)).padded(**options)
    wanted = parsed([rows[index] for index in indices]).padded(**options)
    assert chosen.keys() == wanted.keys()
    assert all(chosen[name].equal(wanted[name]) for name in wanted)
    chosen["input_ids"].fill_(0)
    assert batch.tensor("tokens").any(), "its own memory"


# --- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": "0", "world_size": 2}, "rank is '0'"),
        ({"world_size": None}, "world_size is None"),
        ({"client": 7}, "client is 7; give a Client"),
        ({"batch_size": "8"}, "batch_size is '8'; give a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"min_batch_size": "1"}, "min_batch_size is '1'"),
        ({"stop_after": 1.5}, "stop_after is 1.5; give a whole number of at least 0, or None"),
        ({"token_budget": "4k"}, "token_budget is '4k'.*longest"),
        ({"timeout": "1"}, "timeout is '1'"),
        ({"buffer": 7}, "buffer is 7"),
        ({"rank": 1, "world_size": 5, "batch_size": 4}, "4 units for 5 ranks"),
        ({"world_size": 3, "batch_size": 7, "min_batch_size": 2}, "2 units for 3 ranks"),
        ({"ack": "later"}, "ack is 'later'"),
        ({"collate": "padded"}, "collate is 'padded'; give a function"),
        ({"collate": padded_collate}, r"write collate=padded_collate\(...\)"),
        ({"collate": trinity_collate}, "collate is trinity_collate itself"),
        ({"stop_after": -3}, "stop_after is -3"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"format": "arrow"}, "arrow"),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ExperienceDataset(**{"client": "h", "batch_size": 2, **settings})


def test_a_dataset_travels_with_its_settings() -> None:
    dataset = ExperienceDataset(
        Client("h:13", timeout=3.0),
        batch_size=4,
        buffer="math",
        consumer="actor",
        rank=1,
        world_size=2,
        collate=padded_collate(pad_token_id=5, columns=["reward"]),
        token_budget=11,
    )
    dataset.step = 17
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.client.address, copy.client.timeout) == ("h:13", 3.0)
    assert (copy.buffer, copy.consumer, copy.rank, copy.world_size) == ("math", "actor", 1, 2)
    assert (
        copy.state_dict()
        == dataset.state_dict()
        == dataset.client.state_dict(16, buffer="math", consumer="actor")
    )
    assert copy._feed._options == dataset._feed._options
    assert copy._feed._collate.keywords == dataset._feed._collate.keywords  # type: ignore[union-attr]
    copy.close()
    copy.close()


@pytest.mark.parametrize("place", [{"buffer": "other"}, {"consumer": "critic"}])
def test_the_state_of_another_consumer_is_refused(place: dict[str, str]) -> None:
    dataset = ExperienceDataset("h", batch_size=1)
    state = dataset.client.state_dict(3, **{"buffer": "default", "consumer": "trainer", **place})
    with pytest.raises(
        InvalidRequestError, match=f"the state is of .*{next(iter(place.values()))}"
    ):
        dataset.load_state_dict(state)
    with pytest.raises(InvalidRequestError, match="give what state_dict returned"):
        dataset.load_state_dict({})


def test_leased_batches_keep_their_tickets_in_what_loaders_do() -> None:
    from torch.utils.data import default_convert

    leased = LeasedBatch({"input_ids": torch.arange(3)}, TICKET)
    converted = default_convert(leased)  # type: ignore[no-untyped-call]
    assert isinstance(converted, LeasedBatch)
    assert converted.ticket == pickle.loads(pickle.dumps(TICKET)) == TICKET
    assert not TICKET.is_last
    assert TICKET._replace(micro_batch=2).is_last
