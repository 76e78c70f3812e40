"""Which engine keeps the store: chosen by the settings, here and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path

from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import Settings, StoreSection
from experience_buffer_server.store.gauges import StoreGauges
from experience_buffer_server.store.interface import Snapshots, Store, StoreReader
from experience_buffer_server.store.memory import MemoryStore

_log = logging.getLogger(__name__)

NOTHING_SURVIVES = "the store is in memory: NOTHING SURVIVES this process, neither what is acknowledged nor any buffer"


async def open_store(settings: StoreSection, metrics: Metrics) -> Store:
    """Open the configured store, and show how full it is.

    Raises:
        StoreError: It can't be opened; see `interface.Store`.
    """
    store = _open_memory(settings) if settings.memory else await _open_lmdb(settings, metrics)
    metrics.registry.register(StoreGauges(store))
    return store


def _open_memory(settings: StoreSection) -> Store:
    _log.warning(NOTHING_SURVIVES)
    return MemoryStore(max_bytes=settings.max_map_bytes)


async def _open_lmdb(settings: StoreSection, metrics: Metrics) -> Store:
    from experience_buffer_server.store.lmdb.disk import private_files
    from experience_buffer_server.store.lmdb.snapshots.restore import check_not_interrupted
    from experience_buffer_server.store.lmdb.store import LmdbStore

    check_not_interrupted(settings.path)
    if settings.path.exists() and private_files.others_may_enter(settings.path):
        _log.warning(
            "every user of this machine may enter the store's folder %s and read what is pushed: "
            "chmod 700",
            settings.path,
        )
    return await LmdbStore.open(
        settings.path,
        durability=settings.durability,
        interval_seconds=settings.sync_interval_seconds,
        max_map_bytes=settings.max_map_bytes,
        on_written=metrics.written,
    )


def snapshots_of(settings: Settings, metrics: Metrics) -> Snapshots | None:
    """What takes snapshots of the configured store; None where its engine has none."""
    if settings.store.memory:
        return None
    from experience_buffer_server.store.lmdb.snapshots import snapshots

    return snapshots.Snapshots(settings.snapshots, settings.store.path, metrics)


def open_reader(spec: str) -> StoreReader:
    """Read a store in another process than its owner's.

    Args:
        spec: Its `Store.reader_spec`.

    Raises:
        StoreError: It can't be read.
    """
    from experience_buffer_server.store.lmdb.reader import LmdbReader

    return LmdbReader(Path(spec))
