"""What needs a person: sentences with a cure, worst first, and silence where all is well."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from experience_buffer import ArchiveStats, BufferStats, ConsumerStats, DiskStats, Stats, advise

CONSUMER = ConsumerStats(
    name="trainer",
    unit="group",
    num_ready_units=0,
    num_leased_units=0,
    num_leases=0,
    num_waiting=0,
    waiting_for="",
    num_acked_units=0,
    num_redelivered_units=0,
    num_quarantined_units=0,
    num_held_units=0,
    num_stale_units=0,
    num_retained_experiences=0,
    last_step=None,
    safe_step=None,
    pushes_wait_for="",
)
BUFFER = BufferStats(
    name="math",
    num_items=0,
    num_bytes=0,
    num_open_groups=0,
    num_overdue_groups=0,
    num_computing_groups=0,
    num_quarantined_groups=0,
    num_waiting_for_fields=0,
    computing_waits_for="",
    num_damaged=0,
    num_reserved_groups=0,
    keep_ratio=None,
    num_waiting_pushes=0,
    pushes_wait_for="",
    oldest_open_group="",
    policy_version=None,
    consumers=(CONSUMER,),
)


def stats(*consumers: dict[str, Any], **buffer: Any) -> Stats:
    """A server of one buffer, of what differs from one in which nothing happens."""
    read_by = tuple(dataclasses.replace(CONSUMER, **changes) for changes in consumers)
    one = dataclasses.replace(BUFFER, consumers=read_by, **buffer)
    return Stats(buffers=(one,), server_version="1", uptime_seconds=1.0)


def test_where_nobody_waits_nothing_is_said() -> None:
    assert advise(stats()) == ()
    assert advise(stats({"num_ready_units": 3, "num_leases": 1, "num_leased_units": 2})) == ()


WAITS: dict[str, Any] = {
    "num_waiting": 1,
    "waiting_for": "3 ready of 8 groups; 2 groups incomplete",
}


def test_a_consumer_that_waits_is_told_in_its_servers_words_and_what_to_do() -> None:
    (one,) = advise(stats({**WAITS}, num_open_groups=2))
    assert one.text == "consumer trainer of math waits: 3 ready of 8 groups; 2 groups incomplete"
    assert "seal or drop the groups" in one.cure
    assert one.command == "experience-buffer groups -b math"
    assert (one.severity, one.kind, one.waits, one.view) == (
        "warning", "sample_waits", True, "groups",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("buffer", "consumer", "cure", "command"),
    [
        ({}, {}, "let workers push more", "tail -b math"),
        (
            {},
            {"num_leased_units": 4, "num_leases": 1},
            "acknowledge what is on lease",
            "leases -b math",
        ),
        ({"num_open_groups": 1}, {"num_leased_units": 4}, "see what is missing", "groups -b math"),
        ({"num_computing_groups": 1}, {}, "nothing: they are being computed", ""),
        ({"num_waiting_for_fields": 1}, {}, "annotate", "list -b math --state waiting_for_fields"),
        (
            {"num_quarantined_groups": 1},
            {},
            "annotate or delete",
            "list -b math --state quarantined",
        ),
        ({}, {"num_held_units": 1}, "publish_policy_version; none is so far", ""),
        ({"policy_version": 7}, {"num_held_units": 1}, "7 is the newest", ""),
        ({}, {"num_quarantined_units": 1}, "release or delete", "release -b math --all -c trainer"),
        ({"pushes_wait_for": "full"}, {}, "make room for pushes first", "why -b math"),
    ],
)
def test_the_nearest_cause_of_a_wait_has_its_cure(
    buffer: dict[str, Any], consumer: dict[str, Any], cure: str, command: str
) -> None:
    found = advise(stats({**WAITS, **consumer}, **buffer))
    (one,) = [each for each in found if each.kind == "sample_waits"]
    assert cure in one.cure
    assert one.command.removeprefix("experience-buffer ") == command


def test_the_worst_comes_first_and_among_equals_what_makes_somebody_wait() -> None:
    found = advise(
        stats(
            {**WAITS, "num_quarantined_units": 2, "pushes_wait_for": "max_diff"},
            num_damaged=1,
            num_overdue_groups=3,
            oldest_open_group="1 group incomplete",
        )
    )
    assert [each.kind for each in found] == [
        *("damaged", "sample_waits", "overdue_groups", "quarantined_units", "limited"),
    ]
    assert [each.severity for each in found] == ["critical", *["warning"] * 3, "info"]
    assert found[2].text == "3 groups of math are past the deadline; 1 group incomplete"


@pytest.mark.parametrize(
    ("seconds", "severity", "text"),
    [
        (0.4, "info", "(gpu-3:7 and 1 more) has waited 0 s"),
        (41.0, "warning", "has waited 41 s"),
        (3000.0, "critical", "has waited 50 min 0 s"),
    ],
)
def test_the_longer_a_wait_the_worse_it_is(seconds: float, severity: str, text: str) -> None:
    holders = ("gpu-3:7", "gpu-4:8")
    (one,) = advise(stats({**WAITS, "waiting_seconds": seconds, "waiting_holders": holders}))
    assert one.severity == severity
    assert text in one.text
    assert one.waits


@pytest.mark.parametrize(
    ("reason", "buffer", "cure"),
    [
        ("window", {"num_open_groups": 2}, "acknowledge what is on lease"),
        ("held", {"num_open_groups": 2}, "publish_policy_version"),
        ("computing", {"num_open_groups": 2, "num_computing_groups": 1}, "they are being computed"),
        ("min_size", {}, "min_size"),
        ("min_diff", {"num_open_groups": 2}, "samples_per_insert"),
        ("incomplete", {"num_open_groups": 2}, "see what is missing"),
        ("empty", {}, "let workers push more"),
    ],
)
def test_the_reason_that_the_server_gives_decides(
    reason: str, buffer: dict[str, Any], cure: str
) -> None:
    (one,) = advise(stats({**WAITS, "wait_reason": reason}, **buffer))
    assert cure in one.cure


DISK = DiskStats(
    place="/data",
    live_bytes=10**9,
    file_bytes=10**9,
    map_bytes=2**40,
    limit_bytes=10**11,
    free_bytes=10**12,
    used_ratio=0.01,
    growth_bytes_per_second=None,
    full_in_seconds=None,
    full_by="disk",
)


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, ""),
        ({"full_in_seconds": 86_400.0}, ""),
        ({"full_in_seconds": 4 * 3600.0}, "warning"),
        ({"full_in_seconds": 600.0}, "critical"),
        ({"used_ratio": 0.95}, "critical"),
    ],
)
def test_a_disk_that_will_be_full_is_said_in_time(changes: dict[str, Any], severity: str) -> None:
    disk = dataclasses.replace(DISK, **changes)
    found = advise(dataclasses.replace(stats(), disk=disk))
    assert [each.severity for each in found] == ([severity] if severity else [])
    assert [each.text for each in found] == ([str(disk)] if severity else [])


def test_a_buffer_that_will_be_full_says_when_and_by_what() -> None:
    (one,) = advise(stats(full_in_seconds=125.0, full_by="max_items"))
    assert (one.kind, one.severity) == ("filling", "info")
    assert "math will have reached its max_items in 2 min 5 s" in one.text


def test_who_keeps_a_buffer_full_is_named() -> None:
    full = {"pushes_wait_for": "the buffer is full: 10 experiences of max_items = 10"}
    (one,) = advise(stats({}, **full))
    assert (one.severity, one.consumer, one.waits) == ("warning", "", True)
    idle = {"name": "eval", "num_ready_units": 10}
    (one,) = advise(stats({"num_ready_units": 3, "num_leases": 1}, idle, **full))
    assert (one.severity, one.consumer) == ("critical", "eval")
    assert "consumer eval has 10 groups ready and takes none" in one.cure


def test_an_archive_that_is_not_written_or_lags_behind_is_said() -> None:
    sound = ArchiveStats(
        num_pending=3,
        pending_bytes=5,
        num_segments=7,
        num_rows=11,
        num_bytes=13,
        num_archived=17,
        num_lost=0,
        num_refused_lost=19,
    )
    assert advise(stats(archive=sound)) == ()
    (lagging,) = advise(stats(archive=dataclasses.replace(sound, num_lost=2)))
    assert lagging.text == "2 experiences of math left without being archived"
    assert "max_pending_bytes" in lagging.cure
    (full,) = advise(stats(archive=dataclasses.replace(sound, num_lost=2, trouble="disk full")))
    assert (full.severity, full.kind, full.view) == ("warning", "archive", "departures")
    assert full.text == "the archive of math has trouble: disk full"


def test_a_name_in_a_command_can_be_copied_to_a_shell() -> None:
    (one,) = advise(stats({**WAITS}, name="my buffer; rm x"))
    assert one.command == "experience-buffer tail -b 'my buffer; rm x'"


def test_it_is_plain_data_and_a_sentence() -> None:
    (one,) = advise(stats({**WAITS}))
    plain = json.loads(json.dumps(one.to_dict()))
    assert plain["kind"] == "sample_waits"
    assert plain["waits"] is True
    assert str(one) == f"{one.text}: {one.cure}"
    assert repr(one).startswith("<Advice warning: consumer trainer of math waits")
