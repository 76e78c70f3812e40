# Generated from _async/buffer_verbs.py by scripts/generate_sync.py; edit that file.
"""The sync client's verbs about buffers: configuration, policy versions, pacing, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from experience_buffer._messages import buffer_calls
from experience_buffer._sync.connection import Connection
from experience_buffer._sync.policy_watch import PolicyVersions
from experience_buffer.options import BufferChanges, BufferConfig
from experience_buffer.values import BufferInfo, Reservation, SnapshotResult, Stats


class BufferVerbs(Connection):
    """Verbs about whole buffers."""

    def create_buffer(self, config: BufferConfig | str, *, exist_ok: bool = False) -> BufferInfo:
        """Create a buffer.

        Args:
            config: Its configuration, or just its name.
            exist_ok: True: answer with the one that exists if its configuration is the same.

        Raises:
            AlreadyExistsError: The name is taken.
        """
        return self._run(buffer_calls.create_buffer(config, exist_ok=exist_ok))

    def update_buffer(self, name: str, **changes: Unpack[BufferChanges]) -> BufferInfo:
        """Change fields of a buffer's configuration, named as in `BufferConfig`.

        Raises:
            WrongStateError: `group_by` can't change while experiences are stored.
            InvalidRequestError: Nothing is given, or a value can't be; its text names the field.
        """
        return self._run(buffer_calls.update_buffer(name, changes))

    def get_buffer(self, name: str) -> BufferInfo:
        """Read a buffer's configuration and size."""
        return self._run(buffer_calls.get_buffer(name))

    def list_buffers(self) -> tuple[BufferInfo, ...]:
        """Read all buffers, by name."""
        return self._run(buffer_calls.list_buffers())

    def delete_buffer(self, name: str, *, force: bool = False) -> int:
        """Remove a buffer; how many experiences were in it.

        Args:
            name: The buffer's name.
            force: True: also when experiences are stored in it.

        Raises:
            WrongStateError: Experiences are stored in it, and `force` is False.
        """
        return self._run(buffer_calls.delete_buffer(name, force=force))

    def publish_policy_version(self, version: int, *, buffer: str = "default") -> int | None:
        """Say which policy the trainer has published; the version before, None if the first.

        Args:
            version: At least 0; may be lower than the last (a rollback).
            buffer: The buffer's name.
        """
        return self._run(buffer_calls.publish_policy_version(version, buffer=buffer))

    def watch_policy_version(self, buffer: str = "default") -> PolicyVersions:
        """Iterate over the published policy version, now and whenever it changes.

        Use it as a context manager, or close it, to end the call.

        Args:
            buffer: The buffer's name.

        Returns:
            An endless iterator of versions, the first at once; None before any was published. A
            slow reader may miss all but the newest.
        """
        return PolicyVersions(self, buffer)

    def reserve_groups(
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
        call = buffer_calls.reserve_groups(groups, buffer=buffer, ttl_seconds=ttl_seconds)
        return self._run(call)

    def snapshot(self, label: str = "", *, timeout: float = 3600.0) -> SnapshotResult:
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
        return self._run(buffer_calls.snapshot(label), timeout)

    def get_stats(self, buffer: str = "") -> Stats:
        """Read counts, depths and what is waited for, of one buffer or of all."""
        return self._run(buffer_calls.get_stats(buffer))
