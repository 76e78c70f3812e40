"""What is durable: the store's interface and the LMDB implementation behind it."""

from experience_buffer_server.store.interface import (
    MAX_KEY_BYTES,
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    DamagedRecordError,
    DamagedRows,
    Found,
    GroupRow,
    LeaseRow,
    ProgressRow,
    Record,
    Store,
    StoredBuffer,
    StoreError,
    StoreFailedError,
    StoreFormatError,
    StoreFullError,
    WriteBatch,
)
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.store import LmdbStore, StoreStats

__all__ = [
    "MAX_KEY_BYTES",
    "AdvantageRow",
    "BufferRow",
    "ConsumerRow",
    "DamagedRecordError",
    "DamagedRows",
    "Found",
    "GroupRow",
    "LeaseRow",
    "LmdbReader",
    "LmdbStore",
    "ProgressRow",
    "Record",
    "Store",
    "StoreError",
    "StoreFailedError",
    "StoreFormatError",
    "StoreFullError",
    "StoreStats",
    "StoredBuffer",
    "WriteBatch",
]
