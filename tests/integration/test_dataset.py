"""Datasets against a real server: acks, steps, checkpoints, micro-batches."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from experience_buffer import (
    Client,
    ClientOptions,
    DeadlineExceededError,
    InvalidRequestError,
    LeaseNotFoundError,
    RetryOptions,
    UnavailableError,
    WrongStateError,
    collation,
)
from experience_buffer.collation import padded_collate, varlen_collate
from experience_buffer.dataset import LeaseTicket
from tests.integration.dataset_groups import (
    SIZE,
    fill,
    groups,
    left,
    loading,
    padded,
    retained,
)
from tests.integration.plain import NUM_PROMPT
from tests.integration.server import MakeServer, eventually

COLLATE = padded_collate(pad_token_id=7, columns=["uid", "task"])

# --- one process


def test_asking_for_the_next_batch_acknowledges_the_one_before(client: Client, name: str) -> None:
    keys = fill(client, name, 6)
    dataset = padded(client, name, 2)
    batches = iter(dataset)
    assert groups(next(batches)) == keys[:2]
    assert retained(client, name) == 0
    assert groups(next(batches)) == keys[2:4]
    assert retained(client, name) == 2
    assert dataset.step == 1
    assert dataset.state_dict() == client.state_dict(1, buffer=name)
    assert retained(client, name) == 4, "the checkpoint has learned from it"
    assert groups(next(batches)) == keys[4:]
    dataset.close()
    eventually(lambda: left(client, name) == keys[4:], "what isn't acknowledged to come back")
    assert list(batches) == []


def test_a_new_iteration_goes_on_after_a_server_was_away_for_too_long(
    make_server: MakeServer, name: str
) -> None:
    server = make_server()
    options = ClientOptions(retry=RetryOptions(initial_backoff_seconds=0.02, reconnect_seconds=0.2))
    with Client(server.address, options=options) as client:
        keys = fill(client, name, 4)
        dataset = padded(client, name, ack="manual", prefetch=1)
        data, ticket = next(iter(dataset))
        dataset.ack(ticket, step=0)
        seen = groups(data)
        server.stop()
        with pytest.raises(UnavailableError):
            # What was read ahead may come first: it was given back, and comes again.
            list(dataset)
        server.start()
        # gRPC waits before it connects again, longer than a stream of these options does.
        client.get_stats()
        for data, ticket in itertools.islice(dataset, len(keys) - 1):
            dataset.ack(ticket, step=len(seen))
            seen += groups(data)
        assert seen == keys
        dataset.close()


def test_steps_end_an_iteration_and_the_next_goes_on(client: Client, name: str) -> None:
    keys = fill(client, name, 7)
    dataset = padded(client, name, stop_after=3)
    assert [groups(batch) for batch in dataset] == [[key] for key in keys[:3]]
    assert dataset.step == 3
    assert retained(client, name) == 3, "the last one too, as the end was asked for"
    for batch in dataset:
        assert groups(batch) == keys[3:4]
        break
    assert [groups(batch) for batch in DataLoader(dataset, batch_size=None)] == [
        [key] for key in keys[4:7]
    ]
    assert retained(client, name) == 7
    assert list(padded(client, name, stop_after=0)) == []


def test_a_loader_that_makes_batches_acknowledges_nothing(client: Client, name: str) -> None:
    keys = fill(client, name, 3)
    dataset = padded(client, name)
    loaders: list[dict[str, Any]] = [{}, {"batch_size": 2}]
    for options in loaders:
        with pytest.raises(InvalidRequestError, match="batch_size=None"):
            next(iter(DataLoader(dataset, **options)))
    assert left(client, name) == keys
    assert retained(client, name) == 0


def test_loaders_keep_order_and_acks(client: Client, name: str) -> None:
    keys = fill(client, name, 8)
    dataset = padded(client, name, stop_after=2)
    plain = DataLoader(dataset, batch_size=None)
    shape: Any = groups
    shaped = DataLoader(dataset, batch_size=None, collate_fn=shape, worker_init_fn=print)
    assert [groups(batch) for batch in plain] == [[key] for key in keys[:2]]
    assert retained(client, name) == 2
    assert list(shaped) == [[key] for key in keys[2:4]]
    batches = iter(plain)
    assert groups(next(batches)) == [keys[4]]
    assert retained(client, name) == 4, "it is being trained on"
    assert dataset.state_dict()["step"] == 4
    assert retained(client, name) == 5
    with pytest.raises(TypeError):
        len(plain)
    dataset.close()
    manual = padded(client, name, ack="manual", prefetch=1)
    pairs: Any = DataLoader(manual, batch_size=2, collate_fn=list)
    for leased in itertools.islice(pairs, 1):
        assert [groups(data) for data, _ in leased] == [[key] for key in keys[5:7]]
        for _, ticket in leased:
            manual.ack(ticket, step=5)
    assert retained(client, name) == 7
    manual.close()


def test_memory_is_pinned_where_there_is_a_device(client: Client, name: str) -> None:
    keys = fill(client, name, 2)
    loader = DataLoader(padded(client, name, stop_after=1), batch_size=None, pin_memory=True)
    if torch.accelerator.is_available():
        [batch] = loader
        assert batch["input_ids"].is_pinned()
    else:
        with pytest.warns(UserWarning, match="no accelerator is found"):
            [batch] = loader
    assert groups(batch) == keys[:1]


def test_an_older_iteration_ends_when_another_has_begun(client: Client, name: str) -> None:
    keys = fill(client, name, 5)
    dataset = padded(client, name)
    older, newer = iter(dataset), iter(dataset)
    assert groups(next(older)) == keys[:1]
    assert groups(next(newer)) == keys[1:2]
    with pytest.raises(InvalidRequestError, match="another iteration over this dataset has begun"):
        next(older)
    assert retained(client, name) == 1
    assert groups(next(newer)) == keys[2:3]
    dataset.close()
    manual = padded(client, name, ack="manual", prefetch=1)
    older, newer = iter(manual), iter(manual)
    assert [groups(next(each).data) for each in (older, newer, older)] == [
        [key] for key in keys[2:5]
    ]
    manual.close()


def test_torchs_default_device_changes_no_batch(client: Client, name: str) -> None:
    fill(client, name, 2)
    options: dict[str, Any]
    for options in ({}, {"format": "trxp"}, {"format": "trxp", "token_budget": 20}):
        dataset = padded(client, name, stop_after=1, ack="manual", collate=COLLATE, **options)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        try:
            batches = [batch for batch, _ in dataset]
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        assert {batch["input_ids"].device.type for batch in batches} == {"cpu"}
        assert {batch["logprobs"].dtype for batch in batches} == {torch.float32}
        dataset.close()
        eventually(lambda: len(left(client, name)) == 2, "the batch to come back")


def test_padded_batches_equal_what_collate_gathers(client: Client, name: str) -> None:
    fill(client, name, 5)
    found = []
    for format, make in (("packed", COLLATE), ("trxp", COLLATE), ("trxp", None)):
        dataset = padded(client, name, 5, format=format, collate=make, stop_after=1, ack="manual")
        [(batch, _)] = dataset
        found.append(batch)
        dataset.close()
        eventually(lambda: len(left(client, name)) == 5, "the batch to come back")
    packed, trxp, experiences = found
    assert packed.keys() == trxp.keys()
    num_response = max(len(each.tokens) - NUM_PROMPT for each in experiences)
    expected = {
        "input_ids": collation.gather_token_ids(experiences, NUM_PROMPT, num_response, 7),
        "attention_mask": collation.gather_attention_masks(experiences, NUM_PROMPT, num_response),
        "action_mask": collation.gather_action_masks(experiences, num_response),
        "logprobs": collation.gather_response_attrs(experiences, "logprobs", num_response),
    }
    for name_, tensor in expected.items():
        assert packed[name_].equal(tensor), name_
        assert trxp[name_].equal(tensor), name_
    assert packed["task"] == trxp["task"]
    dataset = padded(client, name, 5, format="trxp", stop_after=1)
    with pytest.raises(
        InvalidRequestError, match=r"doesn't know column 'group', .*format='packed'"
    ):
        next(iter(dataset))


def test_a_resumed_dataset_repeats_what_the_checkpoint_has_not_learned(
    client: Client, name: str
) -> None:
    keys = fill(client, name, 8)
    dataset = padded(client, name)
    batches = iter(dataset)
    assert [groups(next(batches)) for _ in range(3)] == [[key] for key in keys[:3]]
    state = json.loads(json.dumps(dataset.state_dict()))
    assert [groups(next(batches)) for _ in range(3)] == [[key] for key in keys[3:6]]
    dataset.close()
    resumed = padded(client, name)
    assert resumed.load_state_dict(state).num_experiences == 2 * SIZE
    assert resumed.step == 3
    assert [groups(each) for each in itertools.islice(resumed, 5)] == [[key] for key in keys[3:]]
    assert resumed.declare_safe(3).safe_step == 3
    with pytest.raises(WrongStateError, match="safe"):
        resumed.load_state_dict(state)
    resumed.close()


def refuse_the_second(batch: Any) -> list[str]:
    """A collation function with a limit."""
    if batch.groups[0] == "7/1":
        raise ValueError("too long for me")
    return list(batch.uids)


def test_what_cannot_be_laid_out_is_not_acknowledged(client: Client, name: str) -> None:
    keys = fill(client, name, 3)
    dataset = padded(client, name, collate=refuse_the_second)
    for _ in range(2):
        with pytest.raises(ValueError, match="too long for me"):
            list(dataset)
    assert retained(client, name) == 1
    del dataset
    eventually(lambda: left(client, name) == keys[1:], "the leases of a dataset that is gone")


def test_the_first_batch_is_waited_for_as_long_as_asked(client: Client, name: str) -> None:
    fill(client, name, 1)
    dataset = padded(client, name, 2, first_timeout=0.3)
    with pytest.raises(DeadlineExceededError, match="no first batch of 2"):
        next(iter(dataset))
    loader = loading(padded(client, name, 2, first_timeout=0.3, ack="manual"))
    with pytest.raises(DeadlineExceededError, match="no first batch of 2"):
        next(iter(loader))


# --- micro-batches


@pytest.mark.parametrize("format", ["packed", "trxp"])
def test_a_token_budget_splits_batches_and_the_last_ack_counts(
    client: Client, name: str, format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, name, 8)
    dataset = padded(
        client,
        name,
        4,
        format=format,
        collate=varlen_collate(columns=["uid"]),
        token_budget=23,
        ack="manual",
        stop_after=2,
    )
    tickets: list[LeaseTicket] = []
    uids: list[str] = []
    for batch, ticket in dataset:
        assert len(batch["input_ids"]) == batch["cu_seqlens"][-1] <= 23
        uids += batch["uid"]
        tickets.append(ticket)
        dataset.ack(ticket, step=11)
        assert retained(client, name) == (4 if ticket.is_last else 0) + (
            4 if ticket.lease_id != tickets[0].lease_id else 0
        )
    assert sorted(uids) == sorted(each.uid for each in client.list(buffer=name))
    for _, part in itertools.groupby(tickets, lambda ticket: ticket.lease_id):
        numbers = [(ticket.micro_batch, ticket.num_micro_batches) for ticket in part]
        assert numbers == [(index, len(numbers)) for index in range(len(numbers))]
        assert len(numbers) > 2
    assert dataset.state_dict() == client.state_dict(11, buffer=name)
    assert not caplog.records


def test_what_is_longer_than_the_budget_comes_alone(
    client: Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, name, 1)
    dataset = padded(client, name, token_budget=4, stop_after=1)
    assert [len(batch["uid"]) for batch in dataset] == [1, 1, 1]
    assert "above token_budget = 4" in caplog.text


def test_a_checkpoint_amid_micro_batches_has_not_learned_from_the_batch(
    client: Client, name: str
) -> None:
    keys = fill(client, name, 3)
    dataset = padded(client, name, token_budget=1)
    batches = iter(dataset)
    for _ in range(SIZE):
        assert (dataset.step, retained(client, name)) == (0, 0)
        assert len(next(batches)["uid"]) == 1
    next(batches)
    assert (dataset.step, retained(client, name)) == (1, 1), "all of it was trained on"
    state = dataset.state_dict()
    assert state["step"] == 0
    dataset.close()
    resumed = padded(client, name, 2, stop_after=1)
    resumed.load_state_dict(state)
    assert [groups(batch) for batch in resumed] == [keys[1:]], "whole"
    resumed.close()


def test_a_nacked_batch_comes_again_and_its_micro_batches_do_not(client: Client, name: str) -> None:
    fill(client, name, 1)
    dataset = padded(client, name, token_budget=1, ack="manual")
    batches = iter(dataset)
    _, first = next(batches)
    dataset.nack(first, reason="out of memory")
    again = [next(batches) for _ in range(SIZE)]
    assert {ticket.lease_id for _, ticket in again} == {again[0].ticket.lease_id}
    assert again[0].ticket.lease_id != first.lease_id
    with pytest.raises(LeaseNotFoundError, match="nacked"):
        dataset.ack(first._replace(micro_batch=SIZE - 1), step=0)
    dataset.close()
