"""How writers end: closed while others use them, with errors, with a message limit, without files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import (
    BufferFullError,
    CallCancelledError,
    Client,
    ClientOptions,
    DeadlineExceededError,
    Experience,
    InvalidRequestError,
    PushRefusedError,
    TlsOptions,
    WriterOptions,
)
from tests.unit.client.rpc.pushed import experience, until


class Hooked(list[Experience]):
    """Experiences that do something when they are about to be encoded."""

    hook: Callable[[], object]

    def __getitem__(self, place: Any) -> Any:
        self.hook()
        return super().__getitem__(place)


def test_what_comes_while_a_writer_is_closed_is_refused(script: Any, buffer: Client) -> None:
    writer = buffer.writer()
    given = Hooked([experience(1)])
    given.hook = writer.close
    with pytest.raises(CallCancelledError, match="writer is closed"):
        writer.append(given)
    assert writer.counts.num_appended == 0
    assert script.stored == {}


def test_what_was_appended_when_a_close_begins_is_stored(script: Any, buffer: Client) -> None:
    writer = buffer.writer(options=WriterOptions(max_batch_items=1, linger_seconds=30))
    closing = threading.Thread(target=writer.close)
    given = Hooked(experience(run) for run in range(5))
    num_encoded = iter(range(9))

    def close_before_the_third() -> None:
        if next(num_encoded) == 2:
            closing.start()
            until(lambda: writer._closing)

    given.hook = close_before_the_third
    with pytest.raises(CallCancelledError, match="writer is closed"):
        writer.append(given)
    closing.join(10)
    assert not closing.is_alive()
    assert writer.counts.num_appended == writer.counts.num_stored == len(script.stored) == 2


def test_a_writer_that_is_closed_just_before_it_connects_ends(
    server: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, pool: Any
) -> None:
    with Client(server[1]) as client:
        writer = client.writer()
        closing: list[Future[None]] = []
        await_work = writer._await_work

        def closed_meanwhile() -> bool:
            has_work = await_work()
            if has_work:
                closing.append(pool.submit(writer.close, timeout=0.01))
                until(lambda: writer._done)
            return has_work

        monkeypatch.setattr(writer, "_await_work", closed_meanwhile)
        writer.append(experience(1))
        until(lambda: writer._done)
        # It doesn't wait for a thread that waits for the server.
        with pytest.raises(DeadlineExceededError, match="1 experiences have no outcome"):
            closing[0].result(5)


def test_a_refusal_does_not_hide_what_has_no_outcome(script: Any, buffer: Client) -> None:
    def refuse(uid: str) -> bool:
        """The first one; and have no room for the next request."""
        script.push_errors.append(BufferFullError("full", retry_delay_seconds=60))
        return True

    script.refuse = refuse
    writer = buffer.writer(options=WriterOptions(max_batch_items=1))
    writer.append([experience(1), experience(2)])
    until(lambda: writer._queue.last_delay)
    with pytest.raises(PushRefusedError) as caught:
        writer.close(timeout=0)
    [note] = caught.value.__notes__
    assert "1 experiences have no outcome" in note


@pytest.mark.parametrize("length", [1_000, 2_500])
def test_requests_of_a_writer_fit_into_messages(script: Any, connected: Any, length: int) -> None:
    options = ClientOptions(max_message_bytes=64 * 1024)
    with (
        connected(options=options) as client,
        client.writer(options=WriterOptions(linger_seconds=30)) as writer,
    ):
        for run in range(23):
            writer.append(experience(run, length))
    assert writer.counts.num_stored == 23
    assert all(request.ByteSize() <= 64 * 1024 for request in script.requests)
    assert len(script.requests) < 23


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path, connect: Any) -> None:
    tls = TlsOptions(ca_file=str(tmp_path / "ca.pem"))
    with connect("127.0.0.1:1", tls=tls) as client:
        writer = client.writer()
        writer.append(experience(1))
        for call in (client.get_stats, writer.flush, client.stream(1).__next__, writer.close):
            with pytest.raises(
                InvalidRequestError, match=r"ca_file of tls: .*No such file.*ca\.pem"
            ):
                call()


@pytest.mark.parametrize("seconds", [float("inf"), 1e300])
def test_any_number_of_seconds_is_a_timeout(script: Any, connected: Any, seconds: float) -> None:
    with connected(timeout=seconds) as client, client.writer() as writer:
        assert client.timeout == seconds
        writer.append(experience(1), timeout=seconds)
        writer.flush(timeout=seconds)
        client.push([experience(2)], timeout=seconds)
        script.batches.append([])
        client.sample(1, timeout=seconds)
        with client.stream(1, timeout=seconds, first_timeout=seconds):
            pass


def test_what_is_no_number_is_no_timeout(connected: Any) -> None:
    nan = float("nan")
    with pytest.raises(ValueError, match="timeout is nan"):
        connected(timeout=nan)
    with connected() as client, client.writer() as writer:
        verbs: list[Callable[[], Any]] = [
            lambda: writer.append(experience(1), timeout=nan),
            lambda: writer.flush(timeout=nan),
            lambda: client.push([experience(2)], timeout=nan),
            lambda: client.sample(1, timeout=nan),
            lambda: client.stream(1, first_timeout=nan),
        ]
        for verb in verbs:
            with pytest.raises(InvalidRequestError, match="timeout is nan"):
                verb()
        assert writer.counts.num_appended == 0
