"""What a writer process receives: whole batches in order, by one thread or by two."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import pytest

from experience_buffer_server.store.lmdb import writer_inbox, writer_protocol
from experience_buffer_server.store.lmdb.writer_inbox import Frame, Inbox, _Helper, _Stream

SECONDS = 30.0


class Owner:
    """The other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, *frames_: bytes) -> None:
        self.connection.sendall(b"".join(frames_))

    def send_all(self, batches: Iterable[tuple[bytes, bytes]]) -> None:
        """Send documents, each with its large payload, and hang up."""
        with self.connection:
            for document, large in batches:
                self.send(_frame(document, large))


class WatchedStream(_Stream):
    """Receives when it is told to; where it is full, there is no memory for what comes."""

    def __init__(self, connection: socket.socket, *, is_full: bool) -> None:
        super().__init__(connection)
        self.is_in = threading.Event()
        self.may_go = threading.Event()
        self._is_full = is_full

    def receive(self) -> int:
        self.is_in.set()
        if self._is_full:
            raise MemoryError
        assert self.may_go.wait(SECONDS)
        return super().receive()


@contextmanager
def receiving(*, is_full: bool = False) -> Iterator[tuple[WatchedStream, _Helper]]:
    """A second thread that is receiving."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = WatchedStream(theirs, is_full=is_full)
        with closing(_Helper(stream)) as helper:
            helper.start()
            ours.send(b"x")
            assert stream.is_in.wait(SECONDS)
            yield stream, helper


@pytest.fixture
def ends() -> Iterator[tuple[Owner, Inbox]]:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Inbox(theirs)) as received:
        yield Owner(ours), received


def _frame(document: bytes, large: bytes = b"") -> bytes:
    return writer_protocol.PARTS.pack(len(document), len(large), 0) + document + large


def _parts(turn: list[Frame]) -> list[tuple[bytes, bytes]]:
    return [(bytes(frame.document), bytes(frame.large)) for frame in turn]


def _turn_sizes(received: Inbox) -> list[int]:
    """How many batches each turn has, up to the end."""
    sizes, is_open = [], True
    while is_open:
        turn, is_open = received.take(SECONDS)
        sizes.append(len(turn))
    return sizes


def _take_all(received: Inbox) -> list[tuple[bytes, bytes]]:
    found, is_open = [], True
    while is_open:
        turn, is_open = received.take(SECONDS)
        found += _parts(turn)
    return found


def test_what_is_there_comes_at_once_and_in_order(ends: tuple[Owner, Inbox]) -> None:
    owner, received = ends
    owner.send(_frame(b"one"), _frame(b"two", b"large"), _frame(b"three"))
    turn, is_open = received.take(SECONDS)
    assert _parts(turn) == [(b"one", b""), (b"two", b"large"), (b"three", b"")]
    assert is_open
    assert received.is_idle
    assert received.take(0.0) == ([], True)


def test_a_batch_in_pieces_comes_when_it_is_whole(ends: tuple[Owner, Inbox]) -> None:
    owner, received = ends
    data = _frame(b"document", b"large")
    for start in range(len(data) - 1):
        owner.send(data[start : start + 1])
        assert received.take(0.0) == ([], True)
    owner.send(data[-1:])
    assert not received.is_idle
    turn, _ = received.take(SECONDS)
    assert _parts(turn) == [(b"document", b"large")]


@pytest.mark.parametrize("cut", [0, 5, 12])
def test_the_end_comes_after_all_whole_batches(ends: tuple[Owner, Inbox], cut: int) -> None:
    owner, received = ends
    owner.send(_frame(b"whole"), _frame(b"cut off")[:cut])
    owner.connection.close()
    turn, is_open = received.take(SECONDS)
    assert _parts(turn) == [(b"whole", b"")]
    while is_open:
        turn, is_open = received.take(SECONDS)
        assert not turn


def test_a_turn_is_bounded(ends: tuple[Owner, Inbox], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, received = ends
    monkeypatch.setattr(writer_inbox, "MAX_TURN_BATCHES", 3)
    owner.send(*[_frame(b"%d" % number) for number in range(7)])
    owner.connection.close()
    assert _turn_sizes(received) == [3, 3, 1]


def test_a_turn_is_bounded_by_what_it_has_in_the_outbox(ends: tuple[Owner, Inbox]) -> None:
    owner, received = ends
    lent = writer_protocol.PARTS.pack(1, 0, writer_inbox.MAX_TURN_BYTES // 2) + b"d"
    owner.send(*[lent] * 5)
    owner.connection.close()
    assert _turn_sizes(received) == [2, 2, 1]


def test_more_than_the_socket_holds_comes_while_a_large_turn_is_written(
    ends: tuple[Owner, Inbox],
) -> None:
    owner, received = ends
    first = _frame(b"first", os.urandom(writer_inbox.LARGE_TURN_BYTES))
    rest = [_frame(b"%d" % number, os.urandom(1 << 20)) for number in range(4)]
    sender = threading.Thread(target=owner.send, args=(first,))
    sender.start()
    turn, _ = received.take(SECONDS)
    sender.join()
    assert len(turn) == 1
    # Nobody takes anything now: without the second thread this would never end.
    owner.connection.settimeout(SECONDS)
    owner.send(*rest)
    owner.connection.close()
    assert [document for document, _ in _take_all(received)] == [b"0", b"1", b"2", b"3"]


def test_threads_that_take_turns_lose_and_mix_nothing(ends: tuple[Owner, Inbox]) -> None:
    owner, received = ends
    chance = random.Random(7)
    sizes = [chance.choice((0, 100, 5_000, 150_000, 400_000)) for _ in range(150)]
    sent = [(b"%d" % number, bytes([number]) * size) for number, size in enumerate(sizes)]
    sender = threading.Thread(target=owner.send_all, args=(sent,))
    sender.start()
    assert _take_all(received) == sent
    sender.join()


def test_who_has_said_stop_goes_on_only_when_the_other_thread_has_stopped() -> None:
    with receiving() as (stream, helper):
        stopping = threading.Thread(target=helper.stop)
        stopping.start()
        stopping.join(0.1)
        assert stopping.is_alive()
        stream.may_go.set()
        stopping.join(SECONDS)
        assert not stopping.is_alive()


@pytest.mark.timeout(20)
def test_a_thread_that_fails_leaves_nobody_waiting() -> None:
    """Its failure is raised where the other thread goes on: so the process ends, and is missed."""
    with receiving(is_full=True) as (_, helper):
        with pytest.raises(MemoryError):
            helper.stop()
        helper.start()


def test_without_a_thread_everything_comes_in_turn(
    ends: tuple[Owner, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, received = ends
    sent = [(b"%d" % number, bytes(writer_inbox.LARGE_TURN_BYTES)) for number in range(3)]
    sender = threading.Thread(target=owner.send_all, args=(sent,))
    sender.start()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert _take_all(received) == sent
    sender.join()


def test_closing_ends_the_thread_wherever_it_is() -> None:
    before = threading.active_count()
    for is_large in (False, True):
        ours, theirs = socket.socketpair()
        with ours, theirs, closing(Inbox(theirs)) as received:
            if is_large:
                data = _frame(b"x", bytes(writer_inbox.LARGE_TURN_BYTES))
                sender = threading.Thread(target=ours.sendall, args=(data,))
                sender.start()
                assert len(received.take(SECONDS)[0]) == 1
                sender.join()
                assert threading.active_count() == before + 1
        received.close()
        assert threading.active_count() == before
