"""The format version of a store, in a row of its own: what this server reads, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest

from experience_buffer_server.store.interface import StoreFormatError

FORMAT_VERSION: Final = 5
MAGIC: Final = b"experience-buffer store "
FORMAT_KEY: Final = b"format"


def format_value(version: int) -> bytes:
    """The format row of a store: plain text, because servers of all versions must understand it."""
    text = MAGIC + str(version).encode()
    return text + b", sealed " + xxh3_64_hexdigest(text).encode()


FORMAT_VALUE: Final = format_value(FORMAT_VERSION)
_ROW = re.compile(re.escape(MAGIC) + rb"([0-9]+)(, sealed [0-9a-f]{16})?")


def check_format(value: bytes | None, path: Path) -> None:
    """Compare what a store's format row says with what this code reads.

    Raises:
        StoreFormatError: It is not a store, one of another version, or its format row is damaged.
    """
    if value == FORMAT_VALUE:
        return
    found = _ROW.fullmatch(value or b"")
    if value is None or not (MAGIC in value or b", sealed " in value):
        raise StoreFormatError(
            f"{path} holds an LMDB database that is not an experience buffer store; "
            "use another directory"
        )
    version = 0 if found is None else int(found[1])
    # A version that a damaged digit made up must not send anybody to another server.
    is_torn = found is not None and (bool(found[2]) or version == FORMAT_VERSION)
    if found is None or (is_torn and value != format_value(version)):
        raise StoreFormatError(
            f"{path}: the row that says the store's format version is damaged ({value!r:.80}); "
            "restore the store from a snapshot"
        )
    cure = "upgrade this server to the version that wrote it"
    if version < FORMAT_VERSION:
        cure = (
            "run the server version that wrote it until what it holds is consumed, then start this "
            "one on an empty directory"
        )
    raise StoreFormatError(
        f"{path} holds a store of format version {version}, this server reads version "
        f"{FORMAT_VERSION}; {cure}, or use another directory"
    )
