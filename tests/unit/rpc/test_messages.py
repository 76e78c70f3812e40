"""Messages and values that are filled by the names of their fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from google.protobuf.message import Message

from experience_buffer import consumer_options, values
from experience_buffer._messages import convert, names
from experience_buffer._messages.delivery_calls import Acked
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer import stats as server_stats
from experience_buffer_server.buffer.inspection.places import STATES
from experience_buffer_server.buffer.intake.annotation import AnnotateReason
from experience_buffer_server.buffer.intake.push_reading import PushStatus
from experience_buffer_server.buffer.state.entries import Reason
from experience_buffer_server.rpc import messages
from experience_buffer_server.store.lmdb.snapshots.copy_process import Answer

FILLED: dict[type[Message], tuple[type[Any], ...]] = {
    service_pb2.BufferStats: (values.BufferStats, server_stats.BufferStats),
    service_pb2.ConsumerStats: (values.ConsumerStats,),
    service_pb2.GetStatsResponse: (values.Stats,),
    service_pb2.SnapshotResponse: (values.SnapshotResult,),
    service_pb2.ReserveGroupsResponse: (values.Reservation,),
    service_pb2.AckResponse: (Acked,),
    service_pb2.RewindResponse: (values.RewindResult,),
    service_pb2.DeclareSafeResponse: (values.SafeResult,),
    service_pb2.UpdatePrioritiesResponse: (values.PriorityResult,),
    types_pb2.ExperienceSummary: (values.ExperienceSummary,),
}
COUNTED_ONLY = {"num_used", "num_unused"}
"""Counters that callers get as one ratio."""


@pytest.mark.parametrize("message", FILLED)
def test_each_field_has_a_source_and_is_handed_out(message: type[Message]) -> None:
    """A new field that nobody fills, or that callers never see, is noticed here."""
    for kind in FILLED[message]:
        names = {field.name for field in dataclasses.fields(kind)}
        assert names - COUNTED_ONLY == set(message.DESCRIPTOR.fields_by_name)


def numbered(kind: type[Any], number: int, **given: Any) -> Any:
    """A value whose fields all differ."""
    for each in dataclasses.fields(kind):
        if each.name not in given:
            number += 1
            given[each.name] = str(number) if each.type == "str" else number
    return kind(**given)


def test_statistics_arrive_field_by_field() -> None:
    consumers = (
        numbered(values.ConsumerStats, 100, unit="group", waiting_holders=("a", "b")),
        numbered(
            values.ConsumerStats,
            200,
            unit="item",
            last_step=None,
            safe_step=None,
            waiting_holders=(),
        ),
    )
    given = {
        "consumers": consumers,
        "policy_version": None,
        "archive": numbered(values.ArchiveStats, 400, trouble="its disk is full"),
    }
    sent = numbered(server_stats.BufferStats, 300, **given)
    response = service_pb2.GetStatsResponse(buffers=[messages.stats_message(sent)])
    (received,) = convert.value_of(values.Stats, response).buffers
    names = [field.name for field in dataclasses.fields(values.BufferStats)]
    assert [getattr(received, name) for name in names] == [getattr(sent, name) for name in names]
    assert received.consumers == consumers


def test_what_may_be_absent_is_none_and_zero_is_not() -> None:
    absent = convert.value_of(values.SafeResult, service_pb2.DeclareSafeResponse(num_experiences=3))
    assert absent == values.SafeResult(num_experiences=3, safe_step=None)
    zero = convert.value_of(values.SafeResult, service_pb2.DeclareSafeResponse(safe_step=0))
    assert zero.safe_step == 0


def test_a_message_is_filled_by_its_own_fields_alone() -> None:
    @dataclasses.dataclass
    class Lacking:
        num_experiences: int = 7

    with pytest.raises(AttributeError, match="num_waiting_ranks"):
        messages.filled(service_pb2.AckResponse, Lacking())


def test_a_snapshot_has_all_that_callers_are_told() -> None:
    assert Answer.model_fields.keys() >= set(service_pb2.SnapshotResponse.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (PushStatus, names.PUSH_STATUS),
        (Reason, names.REFUSAL_REASON),
        (AnnotateReason, names.ANNOTATE_REFUSAL),
        (STATES, names.STATE),
        (get_args(consumer_options.Unit), names.UNIT),
    ],
)
def test_each_word_of_the_server_is_one_of_the_contract(words: Any, known: names.Names) -> None:
    assert set(words) <= known.by_name.keys()
    assert words
