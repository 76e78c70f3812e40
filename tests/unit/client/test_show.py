"""How values look at the prompt and in a notebook, and as plain data."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

import experience_buffer
from experience_buffer import (
    EID,
    AdvantageConfig,
    AnnotateOutcome,
    AnnotateResult,
    BufferConfig,
    BufferInfo,
    BufferStats,
    Client,
    ClientOptions,
    ConsumerConfig,
    ConsumerStats,
    DeleteResult,
    Experience,
    ExperienceSummary,
    Limiter,
    PackedBatch,
    PushOutcome,
    PushResult,
    Reservation,
    Selector,
    Staleness,
    Stats,
    StoredExperience,
    Tombstone,
    WriterCounts,
    _show,
    packed,
    trxp,
)
from experience_buffer._data.dataset_feed import LeasedBatch, LeaseTicket
from experience_buffer._messages import convert
from experience_buffer.options import TlsOptions
from experience_buffer.pacing import RolloutPacer
from experience_buffer_server.rpc import config_messages
from experience_buffer_server.settings.buffer import BufferSettings

EVIL = "<script>alert(1)</script>\n\x1b[2J" * 99
CONSUMER = ConsumerStats(
    name="trainer",
    unit="group",
    num_ready_units=12,
    num_leased_units=1,
    num_leases=1,
    num_waiting=1,
    waiting_for="31 ready of 64 groups",
    num_acked_units=3300,
    num_redelivered_units=0,
    num_quarantined_units=0,
    num_held_units=0,
    num_stale_units=0,
    num_retained_experiences=0,
    last_step=41,
    safe_step=None,
    pushes_wait_for="",
)
BUFFER = BufferStats(
    name="math",
    num_items=1200,
    num_bytes=412_000,
    num_open_groups=3,
    num_overdue_groups=0,
    num_computing_groups=0,
    num_quarantined_groups=0,
    num_waiting_for_fields=0,
    computing_waits_for="",
    num_damaged=0,
    num_reserved_groups=0,
    keep_ratio=math.nan,
    num_waiting_pushes=0,
    pushes_wait_for="",
    oldest_open_group="1 group incomplete; oldest open group '0/12' has 5 of 8 after 3.2 s",
    policy_version=3,
    consumers=(CONSUMER,),
)
STATS = Stats(buffers=(BUFFER,), server_version="0.1.0", uptime_seconds=11_100.0)
SUMMARY = ExperienceSummary(
    uid="0/7/1/0/ab",
    tid="0/7",
    rid="0/7/1",
    sid="0/7/0",
    state="ready",
    reward=1.0,
    response_tokens=2,
    payload_bytes=412,
    min_policy_version=3,
    max_policy_version=4,
    push_time=1.0,
    message="",
    priority=1.0,
    generation=1,
)
REFUSED = PushOutcome(
    index=4, uid="0/7/4/0/ab", status="refused", reason="conflict", message="reward differs"
)
RESULT = PushResult(
    outcomes=(
        *(PushOutcome(index=i, uid=f"0/7/{i}/0/ab", status="stored") for i in range(3)),
        PushOutcome(index=3, uid="0/7/3/0/ab", status="duplicate"),
        REFUSED,
    ),
    policy_version=3,
)
CONFIG = BufferConfig(
    "math",
    group_size=8,
    advantage={"estimator": "grpo", "eps": 1e-4},
    consumers=[
        ConsumerConfig("trainer", "group", selector=Selector("max", key="reward")),
        ConsumerConfig("critic", limiter=Limiter(min_size=3), staleness=Staleness(max_lag=4)),
    ],
)


def experience(**fields: Any) -> Experience:
    return Experience(eid=EID(0, 7, 1, 0, "ab"), tokens=[1, 2, 3, 4, 5], prompt_length=3, **fields)


LINES: dict[str, tuple[object, str]] = {
    "an experience": (
        experience(logprobs=np.array([-0.5, -1.0]), reward=1.0, info={"model_version": 3}),
        "Experience(eid='0/7/1/0/ab', tokens=int32[5], prompt_length=3, logprobs=float64[2], "
        "reward=1.0, info={'model_version': 3})",
    ),
    "a push": (
        RESULT,
        "<PushResult: 3 stored, 1 duplicate, 1 refused; item 4 (0/7/4/0/ab): conflict: reward "
        "differs>",
    ),
    "annotations": (
        AnnotateResult(
            outcomes=(AnnotateOutcome(uid="a", status="refused", reason="invalid", message="no"),)
        ),
        "<AnnotateResult: 0 stored, 1 refused; (a): invalid: no>",
    ),
    "an outcome": (RESULT.outcomes[0], "PushOutcome(index=0, uid='0/7/0/0/ab', status='stored')"),
    "statistics": (STATS, "<Stats of server 0.1.0, up 3 h 5 min: 1 buffer, 1,200 experiences>"),
    "a buffer's": (
        BUFFER,
        "<BufferStats 'math': 1,200 experiences, 412.0 kB, 3 open groups; consumers 'trainer'>",
    ),
    "a consumer's": (
        CONSUMER,
        "<ConsumerStats 'trainer': 12 groups ready, 1 leased, 3,300 acked; waits: 31 ready of 64 "
        "groups>",
    ),
    "a summary": (
        SUMMARY,
        "<ExperienceSummary '0/7/1/0/ab': ready, reward 1, 2 response tokens, 412 B, versions 3 to "
        "4>",
    ),
    "a configuration": (
        CONFIG,
        "BufferConfig('math', group_size=8, consumers=(ConsumerConfig('trainer', 'group', "
        "selector=Selector('max', key='reward')), ConsumerConfig('critic', "
        "limiter=Limiter(min_size=3), staleness=Staleness(max_lag=4))), "
        "advantage=AdvantageConfig('grpo', {'eps': 0.0001}))",
    ),
    "defaults": (BufferConfig("math", on_full="refuse", lease_seconds=600), "BufferConfig('math')"),
    "options": (ClientOptions(max_push_items=7), "ClientOptions(max_push_items=7)"),
    "no options": (TlsOptions(), "TlsOptions()"),
    "a tombstone": (
        Tombstone(EID(0, 7, 1, 0, "ab"), "timed out"),
        "Tombstone(EID(batch=0, task=7, run=1, step=0, suffix='ab'), 'timed out')",
    ),
    "a deletion": (
        DeleteResult(num_deleted=5, leased_uids=tuple("abcdef"), unknown_uids=()),
        "DeleteResult(num_deleted=5, leased_uids=('a', 'b', 'c', 'd', … 2 more))",
    ),
    "a client": (Client("localhost:1", token="secret"), "Client('localhost:1')"),
    "a writer": (
        Client("localhost:1").writer(buffer="math"),
        "<Writer to 'math' at localhost:1: 0 appended, 0 stored, 0 refused, 0 pending>",
    ),
    "a stream": (
        Client("localhost:1").stream(8, buffer="math"),
        "<SampleStream of 'trainer' on 'math' at localhost:1: batches of 8, 0 ready>",
    ),
    "a watch": (
        Client("localhost:1").watch_policy_version("math"),
        "<PolicyVersions of 'math' at localhost:1: last seen: none yet>",
    ),
    "a list": (
        Client("localhost:1").list(buffer="math"),
        "<Pages of 'math' at localhost:1: 0 fetched, more to fetch>",
    ),
    "a pacer": (
        RolloutPacer(8, max_running=4, max_staleness=1),
        "<RolloutPacer at version 0: RolloutCounts(running=0, accepted=0, rejected=0)>",
    ),
    "what was leased": (
        LeasedBatch({"ids": np.zeros((2, 3))}, LeaseTicket("math", "trainer", 5, None, 0, 1)),
        "LeasedBatch({'ids': float64[2, 3]}, LeaseTicket(buffer='math', consumer='trainer', "
        "lease_id=5, rank=None, micro_batch=0, num_micro_batches=1))",
    ),
}


@pytest.mark.parametrize("what", LINES)
def test_a_value_takes_a_line_or_two(what: str) -> None:
    value, text = LINES[what]
    assert repr(value) == text


LONG: list[object] = [
    experience(
        response_text=EVIL,
        info={EVIL: EVIL, "b": [EVIL] * 99},
        metrics={f"m{i}": 1.0 for i in range(99)},
        action_mask=[1, 0],
        messages=[{"role": EVIL}] * 99,
        extra={EVIL: [1.0], "values": [0.5, 0.5]},
        multi_modal_inputs={"pixels": np.zeros((2, 3))},
    ),
    dataclasses.replace(SUMMARY, message=EVIL),
    dataclasses.replace(CONSUMER, waiting_for=EVIL),
    dataclasses.replace(BUFFER, consumers=(CONSUMER,) * 64),
    dataclasses.replace(REFUSED, message=EVIL),
    PushResult(outcomes=(dataclasses.replace(REFUSED, message=EVIL),) * 99, policy_version=None),
    DeleteResult(num_deleted=0, leased_uids=(EVIL,) * 99, unknown_uids=()),
    Reservation(granted=(EVIL,), reason=EVIL, retry_delay_seconds=1.0),
    Tombstone(EID(0, 7), EVIL),
    StoredExperience(summary=SUMMARY, payload=b"a" * 9999, computation={EVIL: EVIL}),
    packed.PackedRow(uid="a", payload=b"a" * 9999, tensors={}),
    PackedBatch.parse(
        b"".join(
            packed.pack([packed.PackedRow(uid="a", payload=experience().serialize(), tensors={})])
        )
    ),
    trxp.read(experience(response_text=EVIL).serialize())[0],
]


@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
def test_whatever_is_in_it(value: object) -> None:
    text = repr(value)
    assert text.isprintable()
    assert len(text) <= 400
    assert "object at 0x" not in text


def test_statistics_are_printed_as_a_table() -> None:
    assert str(STATS).splitlines() == [
        "server 0.1.0, up 3 h 5 min",
        "",
        "buffer  experiences  size      open groups  computing  quarantined  policy",
        "math          1,200  412.0 kB            3          0            0       3",
        "",
        "buffer  consumer  unit   ready  leased  acked  redelivered  step",
        "math    trainer   group     12       1  3,300            0    41",
        "",
        "math: 1 group incomplete; oldest open group '0/12' has 5 of 8 after 3.2 s",
        "math: trainer waits: 31 ready of 64 groups",
    ]
    assert str(BUFFER) == "\n".join(str(STATS).splitlines()[2:])


def test_a_notebook_shows_tables_in_which_nothing_runs() -> None:
    evil = dataclasses.replace(CONSUMER, name=EVIL, waiting_for=EVIL)
    stats = dataclasses.replace(STATS, buffers=(dataclasses.replace(BUFFER, consumers=(evil,)),))
    refused = PushResult(
        outcomes=(dataclasses.replace(REFUSED, uid=EVIL, message=EVIL),) * 3, policy_version=None
    )
    rows = _show.Rows([dataclasses.replace(SUMMARY, uid=EVIL, message=EVIL)] * 300)
    for shown in (stats, stats.buffers[0], refused, rows):
        text = shown._repr_html_()
        assert "<table>" in text
        assert "<script" not in text
        assert "&lt;script" in text
        assert len(text) < 200_000
    assert "200 more" in rows._repr_html_()
    assert "<table>" not in PushResult(outcomes=(), policy_version=None)._repr_html_()


VALUES = [value for value, _ in LINES.values() if hasattr(value, "to_dict")] + [
    value for value in LONG if hasattr(value, "to_dict")
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_becomes_plain_data(value: Any) -> None:
    described = value.to_dict()
    assert json.loads(json.dumps(described, allow_nan=False)) == described


def test_every_public_value_becomes_plain_data() -> None:
    for name in experience_buffer.__all__:
        kind = getattr(experience_buffer, name)
        is_value = dataclasses.is_dataclass(kind) and not name.endswith(("Batch", "Field"))
        assert not is_value or hasattr(kind, "to_dict"), name


def test_whole_numbers_that_javascript_would_round_become_text() -> None:
    assert _show.plain([2**53 - 1, 1 - 2**53, True]) == [2**53 - 1, 1 - 2**53, True]
    assert _show.plain([2**53, -(2**70)]) == [str(2**53), str(-(2**70))]


def test_a_configuration_is_made_of_its_plain_data_again() -> None:
    described = CONFIG.to_dict()
    assert described["advantage"] == {"estimator": "grpo", "eps": 1e-4}
    assert BufferConfig(**json.loads(json.dumps(described))) == CONFIG
    assert STATS.to_dict()["buffers"][0]["keep_ratio"] == "NaN"
    assert AdvantageConfig("gae", {"gamma": math.inf}).to_dict()["gamma"] == "Infinity"


def test_what_the_server_answers_shows_only_what_was_changed() -> None:
    class Held:
        name, policy_version, create_time, num_items, num_bytes = "math", 3, 1.0, 120, 412_000
        settings = BufferSettings(group_size=8)

    held: Any = Held()
    info = convert.value_of(BufferInfo, config_messages.buffer_message(held))
    assert all(
        getattr(info.config, field.name) is not None
        for field in dataclasses.fields(info.config)
        if field.name not in ("retention", "pacing", "archive")
    )
    assert repr(info) == (
        "<BufferInfo 120 experiences, 412.0 kB, policy version 3: BufferConfig('math', "
        "group_size=8)>"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (200_000, "2 d 7 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert _show.duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (3e13, "30.0 TB")],
)
def test_sizes_have_a_unit_that_suits_them(num_bytes: float, text: str) -> None:
    assert _show.size(num_bytes) == text


def test_pending_experiences_are_counted() -> None:
    counts = WriterCounts(
        num_appended=7, num_stored=3, num_duplicates=0, num_refused=0, num_failed=0
    )
    assert repr(counts).startswith("WriterCounts(num_appended=7, num_stored=3")
