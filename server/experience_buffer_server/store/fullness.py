"""How full a store and its disk are, and when they will be full at the rate of the last minutes."""

from __future__ import annotations

from experience_buffer.stats import DiskStats
from experience_buffer_server.runtime.growth import Growth, seconds_until
from experience_buffer_server.store.interface import Store


class Fullness:
    """Looks at a store from time to time. Belongs to the store's event loop.

    Args:
        store: An open one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._growth = Growth()

    def look(self, now: float) -> None:
        """Note how much is stored; to be called often.

        Args:
            now: Seconds since the Unix epoch.
        """
        if self._store.stats.file_bytes:  # Else the writer hasn't said yet.
            self._growth.look(now, self._store.stats.live_bytes)

    def told(self, free_bytes: int | None) -> DiskStats:
        """What is known now.

        Args:
            free_bytes: What `Store.disk_free_bytes` has returned.
        """
        store, stats = self._store, self._store.stats
        per_second = self._growth.per_second
        # What isn't live of the files is used before they grow.
        reusable = max(stats.file_bytes - stats.live_bytes, 0)
        rooms = {"store.max_map_bytes": store.append_limit_bytes - stats.live_bytes}
        if free_bytes is not None:
            rooms["disk"] = free_bytes + reusable
        full_by = min(rooms, key=lambda name: rooms[name])
        room = max(rooms[full_by], 0)
        full_in_seconds = seconds_until(room, per_second)
        return DiskStats(
            place=store.place,
            live_bytes=stats.live_bytes,
            file_bytes=stats.file_bytes,
            map_bytes=stats.map_bytes,
            limit_bytes=store.limit_bytes,
            free_bytes=free_bytes,
            used_ratio=stats.live_bytes / ((stats.live_bytes + room) or 1)
            if stats.file_bytes
            else None,
            growth_bytes_per_second=per_second,
            full_in_seconds=full_in_seconds,
            full_by="" if full_in_seconds is None else full_by,
        )
