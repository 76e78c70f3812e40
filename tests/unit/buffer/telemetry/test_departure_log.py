"""What left is counted in windows of a quarter of an hour, and no reason pushes out another's examples."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.telemetry.departure_log import (
    MOST_KEPT,
    NUM_WINDOWS,
    WINDOW_SECONDS,
    DepartureLog,
)
from experience_buffer_server.store.record import Record


def entry(seq: int) -> Entry:
    uid = f"0/{seq}/0/0/a"
    numbers: dict[str, Any] = {"seq": seq, "digest_number": seq, "group_id": 0, "cut": 0}
    return Entry(
        Record(
            uid=uid,
            tombstone=False,
            reward=seq / 7,
            response_tokens=5,
            payload_bytes=11,
            min_version=None,
            max_version=None,
            push_time=1.0,
            **numbers,
        ),
        None,
    )


def leave(log: DepartureLog, reason: str, *seqs: int, now: float, unused: bool = False) -> None:
    left = [entry(seq) for seq in seqs]
    of_all = set(seqs) if unused else set()
    log.left(left, [()] * len(left), reason=reason, message="", unused=of_all, now=now)


def test_a_flood_of_one_reason_leaves_the_others_to_be_seen() -> None:
    log = DepartureLog()
    leave(log, "group_dropped", 1, 2, now=100.0, unused=True)
    for part in range(40):
        leave(log, "consumed", *range(10 + 97 * part, 10 + 97 * (part + 1)), now=200.0 + part)
    kept = list(log.departures(limit=10_000))
    assert len(kept) == MOST_KEPT + 2
    assert [one.reason for one in kept[-2:]] == ["group_dropped"] * 2
    assert kept[0].uid == f"0/{10 + 97 * 40 - 1}/0/0/a"
    assert [one.time for one in kept] == sorted((one.time for one in kept), reverse=True)
    assert [one.uid for one in log.departures(unused_only=True, limit=9)] == [
        "0/2/0/0/a",
        "0/1/0/0/a",
    ]
    (consumed, dropped) = log.counts(log.window_times(300.0))
    assert (consumed.reason, consumed.total) == ("consumed", 40 * 97)
    assert (dropped.reason, dropped.total) == ("group_dropped", 2)


def test_one_that_is_larger_than_what_is_kept_leaves_its_last() -> None:
    log = DepartureLog()
    leave(log, "deleted", *range(1, MOST_KEPT + 500), now=1.0)
    kept = list(log.departures(limit=10_000))
    assert len(kept) == MOST_KEPT
    assert kept[0].uid == f"0/{MOST_KEPT + 499}/0/0/a"


def test_windows_go_on_while_nothing_leaves() -> None:
    log = DepartureLog()
    assert log.window_times(1e6) == ()
    begin = 1000 * WINDOW_SECONDS
    leave(log, "evicted", 1, now=begin + 1)
    leave(log, "evicted", 2, 3, now=begin + 2.5 * WINDOW_SECONDS)
    now = begin + 4.9 * WINDOW_SECONDS
    times = log.window_times(now)
    assert times == tuple(begin + i * WINDOW_SECONDS for i in range(5))
    (evicted,) = log.counts(times)
    assert evicted.recent == (1, 0, 2, 0, 0)
    later = begin + 500 * WINDOW_SECONDS
    leave(log, "evicted", 4, now=later)
    times = log.window_times(later)
    assert len(times) == NUM_WINDOWS
    (evicted,) = log.counts(times)
    assert (evicted.total, sum(evicted.recent), evicted.recent[-1]) == (4, 1, 1)
