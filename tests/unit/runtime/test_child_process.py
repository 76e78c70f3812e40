"""The child's end of what a process of the server's talks to the server by."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from experience_buffer_server.runtime.child_process import Parent


@pytest.fixture
def server_end() -> Iterator[tuple[socket.socket, Parent]]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours, theirs = socket.socketpair()
    parent = Parent(theirs.detach())
    try:
        yield ours, parent
    finally:
        parent._file.close()
        parent._socket.close()
        ours.close()
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("has_unread", [False, True])
def test_a_server_that_is_gone_ends_the_requests(
    server_end: tuple[socket.socket, Parent], has_unread: bool
) -> None:
    """One that is killed before it has read an answer resets the connection."""
    server, parent = server_end
    if has_unread:
        parent.answer({"done": 7})
    server.close()
    assert parent.receive() is None
    parent.answer({"done": 9})
