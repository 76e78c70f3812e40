"""What ends a block goes on as it is and at once, whatever the block's writers and streams hold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from experience_buffer import AsyncClient, BufferFullError, Client, DeadlineExceededError
from tests.unit.client.rpc.pushed import experience

NOBODY = "127.0.0.1:1"
TIMEOUT = 30.0
SOON = 5.0
"""Far below the client's timeout, and above what a busy machine takes."""


class NanLossError(Exception):
    """What a worker itself has to say."""


@pytest.fixture(params=["nobody", "silent"])
def gone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of no server, or of something that accepts connections and says nothing."""
    experience(0).serialize()  # Torch is imported now, not within a bound.
    if request.param == "nobody":
        yield NOBODY
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """What is within doesn't wait for the client's timeout."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON


def raised_in_block(address: str, error: BaseException) -> None:
    with Client(address, timeout=TIMEOUT) as client, client.writer(buffer="b") as writer:
        writer.append(experience(1))
        raise error


def raised_before_finally(address: str, error: BaseException) -> None:
    with Client(address, timeout=TIMEOUT) as client:
        writer = client.writer(buffer="b")
        try:
            writer.append(experience(1))
            raise error
        finally:
            writer.close()


def raised_in_stack(address: str, error: BaseException) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(address, timeout=TIMEOUT))
        stack.enter_context(client.stream(1))
        stack.enter_context(client.watch_policy_version())
        writer = stack.enter_context(client.writer())
        writer.append([experience(1), experience(2)])
        raise error


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *itertools.product(
            (raised_in_block, raised_in_stack),
            (NanLossError, KeyboardInterrupt, SystemExit, GeneratorExit),
        ),
        # After an error that may have been caught, a close is a plain one.
        (raised_before_finally, KeyboardInterrupt),
        (raised_before_finally, GeneratorExit),
    ],
)
def test_the_blocks_own_error_is_what_comes_out(
    gone: str, caplog: Any, kind: type[BaseException], way: Callable[[str, BaseException], None]
) -> None:
    error = kind("mine")
    with soon(), pytest.raises(kind) as caught:
        way(gone, error)
    assert caught.value is error
    [note] = error.__notes__
    assert "experiences are not stored" in note
    assert [kind.__name__ in each.message for each in caplog.records if "stored" in each.message]


@pytest.mark.parametrize("what", ["stream", "watch_policy_version"])
def test_a_stream_is_left_at_once(gone: str, what: str) -> None:
    with Client(gone, timeout=TIMEOUT) as client:
        stream = client.stream(1) if what == "stream" else client.watch_policy_version()
        with soon(), pytest.raises(KeyboardInterrupt), stream:
            raise KeyboardInterrupt


async def appended(address: str, seconds: float = 60.0) -> None:
    async with (
        AsyncClient(address, timeout=TIMEOUT) as client,
        client.stream(1),
        client.writer(buffer="b") as writer,
    ):
        await writer.append(experience(1))
        await asyncio.sleep(seconds)


async def test_a_time_limit_ends_a_block(gone: str) -> None:
    with soon(), pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.2):
            await appended(gone)
    assert not isinstance(caught.value, DeadlineExceededError)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert "1 experiences are not stored" in caught.value.__cause__.__notes__[0]


@pytest.mark.parametrize("seconds", [60.0, 0.0])
async def test_a_task_is_cancelled(gone: str, seconds: float) -> None:
    """In the block, and while the end of the block waits for the server."""
    task = asyncio.create_task(appended(gone, seconds))
    await asyncio.sleep(0.2)
    task.cancel()
    with soon(), pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_cancelled_task_group_is_left_at_once(gone: str) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.2)
        raise NanLossError

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(appended(gone))
            group.create_task(fail())

    with soon(), pytest.raises(ExceptionGroup) as caught:
        await work()
    assert [type(each) for each in caught.value.exceptions] == [NanLossError]


async def test_cancelling_what_waits_for_a_writer_goes_on(gone: str) -> None:
    async with AsyncClient(gone, timeout=TIMEOUT) as client:
        writer = client.writer()
        await writer.append(experience(1))
        for verb in (writer.flush, writer.close):
            with soon(), pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.2):
                    await verb()
            assert not isinstance(caught.value, DeadlineExceededError)


def test_a_writer_that_nobody_closed_lets_the_process_end_by_ctrl_c() -> None:
    script = f"""
from experience_buffer import Client
from tests.unit.client.rpc.pushed import experience
writer = Client("{NOBODY}").writer()
writer.append(experience(1))
raise KeyboardInterrupt
"""
    command = [sys.executable, "-c", script]
    # Without Ctrl-C it would wait for ten seconds.
    done = subprocess.run(command, capture_output=True, text=True, timeout=9, check=False)
    assert "1 experiences are not stored" in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("kind", [NanLossError, KeyboardInterrupt])
def test_what_was_appended_is_stored_where_a_server_is(
    script: Any, buffer: Client, kind: type[BaseException]
) -> None:
    error = kind()
    writer = buffer.writer()
    writer.append([experience(run) for run in range(300)])
    with pytest.raises(kind), writer:
        raise error
    assert len(script.stored) == 300
    assert not hasattr(error, "__notes__")


async def test_what_was_appended_is_stored_when_a_task_is_cancelled(
    script: Any, server: tuple[Any, str]
) -> None:
    task = asyncio.create_task(appended(server[1]))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(script.stored) == 1


@pytest.mark.parametrize("kind", [NanLossError, KeyboardInterrupt])
def test_a_full_buffer_keeps_nobody_who_leaves(
    script: Any, buffer: Client, kind: type[BaseException]
) -> None:
    script.push_errors += [BufferFullError("math is full", retry_delay_seconds=20.0)]
    error = kind()
    writer = buffer.writer()
    writer.append(experience(1))
    with soon(), pytest.raises(kind), writer:
        raise error
    assert "math is full" in error.__notes__[0]


def test_a_refusal_is_noted_in_what_ends_the_block(script: Any, buffer: Client) -> None:
    script.refuse = lambda uid: True
    writer = buffer.writer()
    writer.append(experience(1))
    with pytest.raises(NanLossError) as caught, writer:
        raise NanLossError
    assert "its group closed" in caught.value.__notes__[0]


def test_an_orderly_end_still_waits_for_a_server(gone: str) -> None:
    writer = Client(gone, timeout=0.5).writer()
    writer.append(experience(1))
    with pytest.raises(DeadlineExceededError, match="1 experiences have no outcome"):
        writer.close()
