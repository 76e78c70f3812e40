from __future__ import annotations

import pickle
import time
from typing import Any

import grpc
import pytest

from experience_buffer import (
    EID,
    AlreadyExistsError,
    BufferConfig,
    BufferFullError,
    CallCancelledError,
    Client,
    ClientOptions,
    DeadlineExceededError,
    InvalidRequestError,
    LeaseNotFoundError,
    PushRefusedError,
    RetryOptions,
    Tombstone,
    UnavailableError,
    UnsupportedError,
    WriterOptions,
)
from tests.unit.client.rpc.pushed import FAST, experience, payload, until


def test_push_returns_outcomes_at_the_callers_positions(script: Any, connected: Any) -> None:
    with connected(options=ClientOptions(max_push_items=3)) as client:
        result = client.push(
            [experience(run) for run in range(7)],
            tombstones=[Tombstone(EID(3, 5, 11)), Tombstone(EID(3, 5, 13))],
            group_size=11,
        )
    assert [outcome.index for outcome in result.outcomes] == list(range(9))
    assert [o.uid for o in result.outcomes[:7]] == [experience(run).eid.uid for run in range(7)]
    assert (result.num_stored, result.num_duplicates, result.refused) == (9, 0, ())
    assert result.policy_version == 17
    sizes = [len(script.singles(request)) for request in script.pushes]
    assert sizes == [3, 3, 1, 0]
    assert [request.group_size for request in script.pushes] == [11] * 4


def test_push_is_retried_until_the_server_is_back(script: Any, buffer: Client) -> None:
    script.failures += [UnavailableError("starting"), UnavailableError("starting")]
    assert buffer.push([experience(1)]).num_stored == 1
    assert len(script.requests) == 3


def test_push_to_a_full_buffer_waits_as_long_as_the_server_says(
    script: Any, buffer: Client
) -> None:
    script.failures.append(BufferFullError("full", retry_delay_seconds=0.2))
    begin_time = time.monotonic()
    assert buffer.push([experience(1)]).num_stored == 1
    assert time.monotonic() - begin_time >= 0.2
    assert len(script.requests) == 2


def test_what_never_fits_is_refused_by_name_and_its_neighbours_are_stored(
    script: Any, buffer: Client
) -> None:
    script.failures += [BufferFullError("larger than the buffer", subject="math")] * 2
    with pytest.raises(
        PushRefusedError, match=r"item 0 \(3/5/1/0/abcdef\): .*larger than"
    ) as caught:
        buffer.push([experience(1), experience(2)], buffer="math")
    assert [each.status for each in caught.value.result.outcomes] == ["refused", "stored"]
    assert len(script.requests) == 3


def test_what_cannot_be_written_is_refused_and_its_neighbours_are_stored(
    script: Any, buffer: Client
) -> None:
    bad = experience(2)
    bad.info["when"] = object()
    pushed = [experience(1), bad, experience(3)]
    result = buffer.push(pushed, raise_on_refused=False)
    assert [each.status for each in result.outcomes] == ["stored", "refused", "stored"]
    assert result.refused[0].uid == bad.eid.uid
    with pytest.raises(PushRefusedError, match=r"item 1 \(3/5/2/0/abcdef\): .*items\[1\]\.info"):
        buffer.push(pushed)
    writer = buffer.writer()
    with pytest.raises(PushRefusedError, match=r"item 1 \(3/5/2/0/abcdef\): .*items\[1\]\.info"):
        writer.append(pushed)
    writer.append(experience(4))
    writer.close()
    counts = writer.counts
    assert (counts.num_stored, counts.num_duplicates, counts.num_refused) == (1, 2, 1)


def test_a_writer_sends_less_at_once_where_all_is_too_much(script: Any, buffer: Client) -> None:
    script.push_errors += [BufferFullError("at most 3 fit at once; split it")] * 3
    with buffer.writer(options=WriterOptions(linger_seconds=30)) as writer:
        writer.append([experience(run) for run in range(9)])
        writer.append(experience(9))
    assert writer.counts.num_stored == len(script.stored) == 10
    sizes = [len(script.singles(request.push)) for request in script.requests]
    assert sizes[:3] == [10, 5, 5]
    assert sum(sizes[3:]) == 10


def test_retries_end_at_the_deadline_with_the_cause(script: Any, buffer: Client) -> None:
    script.failures.append(BufferFullError("full", retry_delay_seconds=60))
    with pytest.raises(BufferFullError) as caught:
        buffer.push([experience(1)], timeout=0.5)
    assert "gave up after 1 attempts" in caught.value.__notes__[0]


def test_no_server_is_explained(connect: Any) -> None:
    with (
        connect("127.0.0.1:1", timeout=1.0, options=FAST) as client,
        pytest.raises(UnavailableError, match=r"get_stats to 127\.0\.0\.1:1 failed .*server runs"),
    ):
        client.get_stats()


def test_calls_that_must_not_run_twice_are_not_retried(script: Any, buffer: Client) -> None:
    script.failures.append(UnavailableError("connection lost"))
    with pytest.raises(UnavailableError):
        buffer.create_buffer("math")
    script.failures.append(UnavailableError("starting", retry_delay_seconds=0.001))
    assert buffer.create_buffer("math").config.name == "math"
    script.failures.append(UnavailableError("connection lost"))
    assert buffer.create_buffer("math", exist_ok=True).config.name == "math"


def test_refused_items_raise_after_the_others_are_stored(script: Any, buffer: Client) -> None:
    bad = experience(2).eid.uid
    script.refuse = lambda uid: uid == bad
    with pytest.raises(PushRefusedError, match=r"item 1 \(3/5/2/0/abcdef\): late") as caught:
        buffer.push([experience(1), experience(2), experience(3)])
    result = caught.value.result
    assert [outcome.uid for outcome in result.refused] == [bad]
    assert len(script.stored) == 2
    again = buffer.push([experience(1), experience(2)], raise_on_refused=False)
    assert (again.num_duplicates, len(again.refused)) == (1, 1)


def test_sample_and_unary_ack(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1), payload(2)])
    batch = buffer.sample(2, timeout=5)
    assert (len(batch), batch.num_units, batch.policy_version) == (2, 2, 17)
    assert batch.flags == (("singleton", "bootstrapped"), ())
    assert batch.uids == (experience(1).eid.uid, experience(2).eid.uid)
    assert batch.groups == ("3/5", "3/5")
    assert batch.staleness == (2, 2)
    assert [item.reward for item in batch.experiences] == [1.0, 2.0]
    pickle.loads(pickle.dumps(batch)).ack()
    assert script.acked == [batch.lease_id]


def test_client_works_after_pickling_and_in_many_threads(
    script: Any, buffer: Client, pool: Any
) -> None:
    buffer.get_stats()
    with pickle.loads(pickle.dumps(buffer)) as twin:
        assert all(pool.map(twin.push, [[experience(run)] for run in range(8)]))
    assert len(script.stored) == 8
    assert script.metadata[-1]["authorization"] == "Bearer secret"


def test_closed_client_says_so(buffer: Client) -> None:
    buffer.get_stats()
    buffer.close()
    with pytest.raises(CallCancelledError, match="closed"):
        buffer.get_stats()


def test_closing_ends_a_retrying_call(script: Any, buffer: Client, pool: Any) -> None:
    script.failures.append(UnavailableError("starting", retry_delay_seconds=25))
    call = pool.submit(buffer.get_stats)
    until(lambda: script.requests)
    buffer.close()
    with pytest.raises(CallCancelledError):
        call.result(5)


def test_what_a_stopping_server_cancels_is_done_again(script: Any, buffer: Client) -> None:
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    assert buffer.get_stats().server_version == "9.8.7"
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    with buffer.writer() as writer:
        writer.append(experience(1))
    assert writer.counts.num_stored == 1
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    script.batches.append([payload(1)])
    with buffer.stream(1) as stream:
        assert len(next(stream).experiences) == 1
    assert not script.failures


def test_what_must_not_be_done_twice_is_unavailable_when_it_is_cancelled(
    script: Any, buffer: Client
) -> None:
    script.failures.append(grpc.StatusCode.CANCELLED)
    with pytest.raises(UnavailableError, match=r"delete to .*CANCELLED.*check that the server"):
        buffer.delete(["x"])


def test_closing_ends_calls_under_way(script: Any, buffer: Client, pool: Any) -> None:
    with buffer.stream(1) as stream, script.lock:
        assert script.begun.acquire(timeout=10)
        # Not tried again, so nothing else finds that it is closed.
        call = pool.submit(buffer.delete, ["x"])
        assert script.begun.acquire(timeout=10)
        buffer.close()
        with pytest.raises(CallCancelledError, match=r"^the client is closed; make a new one$"):
            call.result(10)
        with pytest.raises(CallCancelledError, match="client is closed"):
            next(stream)


@pytest.mark.parametrize("way", ["call", "stream"])
def test_a_channel_closed_just_now_says_so(server: tuple[Any, str], way: str) -> None:
    class ClosedMeanwhile(Client):
        def _get_stub(self) -> Any:
            stub = super()._get_stub()
            self.close()
            return stub

    client = ClosedMeanwhile(server[1])
    with pytest.raises(CallCancelledError, match="client is closed"):
        client.get_stats() if way == "call" else next(client.stream(1))


def test_list_walks_the_pages(script: Any, buffer: Client) -> None:
    buffer.push([experience(run) for run in range(7)])
    found = list(buffer.list(page_size=3, tid="3/5", state="ready"))
    assert [item.uid for item in found] == sorted(script.stored)
    assert {item.state for item in found} == {"ready"}
    pages = [request for request in script.requests if hasattr(request, "page_token")]
    assert [page.page_token for page in pages] == ["", "3", "6"]
    assert pages[0].filter.tid == "3/5"


def test_delete_wants_uids_or_keys(script: Any, buffer: Client) -> None:
    assert buffer.delete(["a", "x"]).unknown_uids == ("x",)
    assert buffer.delete([]).num_deleted == 0
    assert len(script.requests) == 1
    with pytest.raises(InvalidRequestError, match="at least one"):
        buffer.delete()
    with pytest.raises(InvalidRequestError, match="one of the two"):
        buffer.delete("a", tid="3/5")


def test_get_says_how_advantages_were_computed(script: Any, buffer: Client) -> None:
    uid = experience(1).eid.uid
    buffer.push([experience(1)])
    bare = buffer.get(uid)
    assert (bare.computation, bare.summary.state) == (None, "waiting_for_fields")
    script.computation = {"estimator": "grpo", "mean": 0.5, "votes": [1, {"std": float("inf")}]}
    found = buffer.get(uid)
    assert found.computation is not None
    assert found.computation == script.computation
    assert type(found.computation["votes"]) is list
    assert type(found.computation["votes"][1]) is dict
    assert found.experience is not None
    assert found.experience.eid.uid == uid


def test_a_snapshot_is_told(script: Any, buffer: Client) -> None:
    taken = buffer.snapshot("before-rewind")
    assert (taken.name, taken.removed) == ("snapshot-before-rewind", ("snapshot-old",))


def test_update_sends_a_mask_of_what_changes(script: Any, buffer: Client) -> None:
    info = buffer.update_buffer("math", group_size=8, group_by="run")
    assert info.config == BufferConfig("math", group_size=8, group_by="run")
    assert sorted(script.requests[0].update_mask.paths) == ["group_by", "group_size"]
    with pytest.raises(InvalidRequestError, match="changes nothing"):
        buffer.update_buffer("math")


def test_errors_keep_their_class(script: Any, buffer: Client) -> None:
    script.failures.append(AlreadyExistsError("taken", subject="math"))
    with pytest.raises(AlreadyExistsError, match="taken"):
        buffer.create_buffer("math")
    with pytest.raises(UnsupportedError, match="get_buffer"):
        buffer.get_buffer("math")


def test_stream_delivers_acks_and_grants_credits(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1), payload(2)], [payload(3)], [payload(4)]]
    with buffer.stream(2, prefetch=2) as stream:
        first = next(stream)
        assert [item.reward for item in first.experiences] == [1.0, 2.0]
        assert first.flags == (("singleton", "bootstrapped"), ())
        first.ack()
        second, third = next(stream), next(stream)
        assert stream.waiting == ""
        assert (*second.uids, *third.uids) == (experience(3).eid.uid, experience(4).eid.uid)
        second.ack()
        assert script.acked == [first.lease_id, second.lease_id]
        assert script.credits[:2] == [2, 1]
    assert script.ended_streams.acquire(timeout=10)
    with pytest.raises(LeaseNotFoundError):
        third.ack()
    with pytest.raises(StopIteration):
        next(stream)


def test_an_ack_goes_on_beside_the_next_batch(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)], [payload(3)]]
    with buffer.stream(1, prefetch=1) as stream:
        first = next(stream)
        pending = first.begin_ack(7)
        second = next(stream)
        assert (pending.result(), pending.result()) == (0, 0)
        assert script.acks == [(first.lease_id, 7, None)]
        assert second.begin_ack().result() == 0
        third = next(stream)
        assert script.acked == [first.lease_id, second.lease_id]
    assert script.ended_streams.acquire(timeout=10)
    late = third.begin_ack()
    with pytest.raises(LeaseNotFoundError):
        late.result()
    script.batches.append([payload(4)])
    fourth = buffer.sample(1)
    unsent = fourth.begin_ack(8)
    assert fourth.lease_id not in script.acked
    assert unsent.result() == 0
    assert script.acks[-1] == (fourth.lease_id, 8, None)


def test_stream_reconnects_and_old_acks_go_unary(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(1)
    with buffer.stream(1, prefetch=1) as stream:
        first = next(stream, None)
        while first is not None and first.uids == (experience(1).eid.uid,):
            # The break may come before the batch is handed out: it is dropped then.
            assert script.reconnected()
            with pytest.raises(LeaseNotFoundError):
                first.ack()
            first = next(stream)
        assert first is not None
        assert first.uids == (experience(2).eid.uid,)
        first.ack()
        assert script.acked == [first.lease_id]


def test_batches_read_ahead_on_a_broken_stream_are_given_back(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(2)
    with buffer.stream(1, prefetch=2) as stream:
        assert script.reconnected()
        script.deliver([payload(3)])
        assert next(stream).uids == (experience(3).eid.uid,)
        assert sorted(script.nacked) == [1, 2]


def test_stream_raises_what_the_server_ends_it_with(server: tuple[Any, str]) -> None:
    # The async client is asked with a real server (tests/integration/test_client.py): in one process
    # with a threaded one, gRPC's asyncio may never hear of a stream that ends before it has begun.
    script, address = server
    script.failures.append(InvalidRequestError("batch_size must be at least 1"))
    with (
        Client(address, options=FAST) as client,
        client.stream(0) as stream,
        pytest.raises(InvalidRequestError, match="at least 1"),
    ):
        next(stream)


def test_closing_the_stream_wakes_its_waiters(script: Any, buffer: Client, pool: Any) -> None:
    stream = buffer.stream(1)
    waiting = pool.submit(list, iter(stream))
    assert script.open_streams.acquire(timeout=10)
    stream.close()
    assert waiting.result(10) == []


def test_writer_batches_and_flushes(script: Any, buffer: Client) -> None:
    options = WriterOptions(max_batch_items=5, linger_seconds=30)
    with buffer.writer(buffer="math", group_size=7, options=options) as writer:
        for run in range(11):
            writer.append(experience(run))
        writer.append([experience(11), experience(12)])
        writer.flush()
        assert writer.counts.num_stored == 13
        assert writer.counts.num_pending == 0
    sizes = [len(script.singles(request.push)) for request in script.requests]
    assert sizes == [5, 5, 3]
    assert {request.push.buffer for request in script.requests} == {"math"}
    assert {request.push.group_size for request in script.requests} == {7}


def test_writer_sends_after_lingering(script: Any, buffer: Client) -> None:
    writer = buffer.writer(options=WriterOptions(linger_seconds=0.01))
    for run in range(3):
        writer.append(experience(run))
        until(lambda: writer.counts.num_stored == writer.counts.num_appended)
    assert len(script.requests) == 3
    writer.close()


def test_writer_sends_again_what_a_broken_stream_left_unanswered(
    script: Any, buffer: Client
) -> None:
    script.break_push_after += [2, 1]
    script.failures.append(UnavailableError("starting"))
    with buffer.writer(options=WriterOptions(max_batch_items=1)) as writer:
        for run in range(13):
            writer.append(experience(run))
        writer.flush()
        counts = writer.counts
    assert len(script.stored) == 13
    assert counts.num_stored + counts.num_duplicates == 13
    assert counts.num_duplicates == 1
    assert len(script.requests) >= 15


def test_writer_raises_refusals_at_the_next_call(script: Any, buffer: Client) -> None:
    bad = experience(2).eid.uid
    script.refuse = lambda uid: uid == bad
    writer = buffer.writer()
    writer.append([experience(1), experience(2), experience(3)])
    with pytest.raises(PushRefusedError) as caught:
        writer.flush()
    assert [(o.index, o.uid) for o in caught.value.result.refused] == [(1, bad)]
    writer.append(experience(4))
    writer.close()
    assert writer.counts.num_stored == 3
    assert writer.counts.num_refused == 1
    with pytest.raises(CallCancelledError):
        writer.append(experience(5))


def test_writer_waits_when_the_server_is_full(script: Any, buffer: Client) -> None:
    script.push_errors += [BufferFullError("full", retry_delay_seconds=0.02)] * 2
    with buffer.writer() as writer:
        writer.append(experience(1))
        writer.flush()
        assert writer.counts.num_stored == 1


def test_full_writer_blocks_until_its_deadline_and_says_why(script: Any, buffer: Client) -> None:
    script.push_errors.append(BufferFullError("math is full", retry_delay_seconds=60))
    writer = buffer.writer(options=WriterOptions(max_pending_bytes=100))
    writer.append(experience(1))
    until(lambda: script.requests)
    with pytest.raises(DeadlineExceededError, match="stayed full"):
        writer.append(experience(2), timeout=0.1)
    with pytest.raises(DeadlineExceededError, match=r"1 experiences have no outcome.*math is full"):
        writer.close(timeout=0.2)


def test_request_that_fails_as_a_whole_is_raised_and_counted(script: Any, buffer: Client) -> None:
    script.push_errors.append(InvalidRequestError("no such buffer"))
    writer = buffer.writer()
    writer.append([experience(1), experience(2)])
    with pytest.raises(InvalidRequestError, match="no such buffer"):
        writer.flush()
    assert writer.counts.num_failed == 2
    writer.close()


def test_writer_that_cannot_reach_the_server_fails_with_the_reason(connect: Any) -> None:
    retry = RetryOptions(initial_backoff_seconds=0.01, reconnect_seconds=0.2)
    with connect("127.0.0.1:1", options=ClientOptions(retry=retry)) as client:
        writer = client.writer()
        writer.append(experience(1))
        with pytest.raises(UnavailableError) as caught:
            writer.close()
    assert "1 experiences are not stored" in caught.value.__notes__
