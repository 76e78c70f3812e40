"""The async client's verbs about buffers: configuration, policy versions, pacing, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from experience_buffer._arguments import Table, made
from experience_buffer._async.connection import AsyncConnection
from experience_buffer._async.policy_watch import AsyncPolicyVersions
from experience_buffer._messages import config as _config
from experience_buffer._messages import convert, fields
from experience_buffer._messages.calls import Call, number
from experience_buffer._messages.convert import reader_of
from experience_buffer._show import Rows
from experience_buffer.options import BufferChanges, BufferConfig
from experience_buffer.values import BufferInfo, Reservation, SnapshotResult, Stats


class AsyncBufferVerbs(AsyncConnection):
    """Verbs about whole buffers."""

    async def create_buffer(
        self, config: BufferConfig | str | Table, *, exist_ok: bool = False
    ) -> BufferInfo:
        """Create a buffer.

        Args:
            config: Its configuration: a `BufferConfig`, its name alone, or a dict of its fields.
            exist_ok: True: answer with the one that exists if its configuration is the same.

        Raises:
            AlreadyExistsError: The name is taken.
        """
        message = _config.config_to_message(made(BufferConfig, config, "config", alone="name"))
        return await self._call(
            "CreateBuffer", convert.buffer, idempotent=exist_ok, config=message, exist_ok=exist_ok
        )

    async def update_buffer(self, name: str, **changes: Unpack[BufferChanges]) -> BufferInfo:
        """Change fields of a buffer's configuration, named as in `BufferConfig`.

        Args:
            name: The buffer's name.
            **changes: The fields that change, with their new values; `pacing=None` ends the
                admission of tasks, `retention=None` keeps what is old.

        Raises:
            WrongStateError: `group_by` can't change while experiences are stored.
            InvalidRequestError: Nothing is given, or a value can't be; its text names the field.
        """
        request = _config.update_request(name, changes)
        return await self._run(Call("UpdateBuffer", request, convert.buffer))

    async def get_buffer(self, name: str) -> BufferInfo:
        """Read a buffer's configuration and size.

        Args:
            name: The buffer's name.
        """
        return await self._call("GetBuffer", convert.buffer, name=name)

    async def list_buffers(self) -> tuple[BufferInfo, ...]:
        """Read all buffers, by name; a notebook shows them as a table."""
        return Rows(await self._call("ListBuffers", convert.buffers))

    async def delete_buffer(self, name: str, *, force: bool = False) -> int:
        """Remove a buffer; how many experiences were in it.

        Args:
            name: The buffer's name.
            force: True: also when experiences are stored in it.

        Raises:
            WrongStateError: Experiences are stored in it, and `force` is False.
        """
        parse = number("num_items")
        return await self._call("DeleteBuffer", parse, idempotent=False, name=name, force=force)

    async def publish_policy_version(self, version: int, *, buffer: str = "default") -> int | None:
        """Say which policy the trainer has published; the version before, None if the first.

        Args:
            version: At least 0; may be lower than the last (a rollback).
            buffer: The buffer's name.
        """
        parse = convert.previous_version
        return await self._call("PublishPolicyVersion", parse, buffer=buffer, version=version)

    def watch_policy_version(self, buffer: str = "default") -> AsyncPolicyVersions:
        """Iterate over the published policy version, now and whenever it changes.

        Use it as a context manager, or close it, to end the call.

        Args:
            buffer: The buffer's name.

        Returns:
            An endless iterator of versions, the first at once; None before any was published. A
            slow reader may miss all but the newest.
        """
        return AsyncPolicyVersions(self, buffer)

    async def reserve_groups(
        self, groups: Sequence[str], *, buffer: str = "default", ttl_seconds: float = 0.0
    ) -> Reservation:
        """Ask whether new tasks may begin, by the buffer's `pacing`, and take their places.

        All may where there is no pacing. A group that has a place keeps it. Idempotent.

        Args:
            groups: The keys of the tasks' groups, "batch/task" in a buffer grouped by task; at
                most 10,000. A place ends when the group's first member is pushed or it is dropped.
            buffer: The buffer's name.
            ttl_seconds: After which a place that nothing was pushed for is free again; 0: an hour.
        """
        parse = reader_of(Reservation)
        return await self._call(
            "ReserveGroups",
            parse,
            buffer=buffer,
            groups=fields.texts("groups", groups),
            ttl_seconds=ttl_seconds,
        )

    async def snapshot(self, label: str = "", *, timeout: float = 3600.0) -> SnapshotResult:
        """Take a snapshot of the server's whole store, while it goes on.

        It holds everything that was acknowledged before the call, and is in the folder that the
        server's configuration names when this returns. While another one is taken the call waits
        for its turn. A call that ends early doesn't end the snapshot.

        Args:
            label: Ends its name: 1 to 64 letters, digits, ".", "_" and "-"; empty: a number does.
            timeout: Seconds to wait for it.

        Raises:
            WrongStateError: The server's configuration names no folder.
            ResourceExhaustedError: No room on the server's disk; or others were taken all the time.
            DataLossError: The store is damaged; no snapshot was taken.
        """
        parse = reader_of(SnapshotResult)
        return await self._call("Snapshot", parse, idempotent=False, timeout=timeout, label=label)

    async def get_stats(self, buffer: str = "") -> Stats:
        """Read counts, depths and what is waited for, of one buffer or of all.

        Args:
            buffer: The buffer's name; empty: all buffers.
        """
        return await self._call("GetStats", reader_of(Stats), buffer=buffer)
