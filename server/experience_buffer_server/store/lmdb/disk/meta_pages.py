"""What the first two pages of an LMDB file say, read without LMDB: why a file can't be opened.

LMDB writes its two meta pages by turns, one per commit; the newer one counts. It refuses a file as a
whole when one of them doesn't look like a meta page.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from experience_buffer_server.store.interface import StoreFormatError

DATA_NAME: Final = "data.mdb"
_HEADER_BYTES: Final = 16
"""Of every page: its number (8 bytes), padding, flags and bounds (2 bytes each)."""
_FLAGS: Final = struct.Struct("=H")
_FLAGS_PLACE: Final = 10
_META_FLAG: Final = 0x08
_META: Final = struct.Struct("=II8xQ48x48xQQ")
"""Magic, version, map size, two table roots, last page, number of the commit."""
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1


class MetaPage(NamedTuple):
    """One of the two."""

    problem: str
    """Why it is none; empty where it is one."""
    commit: int
    """Number of the commit that it describes."""


def read_meta_pages(path: Path) -> list[MetaPage]:
    """Both meta pages of the store at `path`; none where there is no file."""
    page_bytes = os.sysconf("SC_PAGESIZE")
    try:
        with open(path / DATA_NAME, "rb") as file:
            return [_read(file.read(page_bytes)) for _ in range(2)]
    except OSError:
        return []


def _read(page: bytes) -> MetaPage:
    if len(page) < _HEADER_BYTES + _META.size:
        return MetaPage(f"the file ends after {len(page)} bytes of it", 0)
    (flags,) = _FLAGS.unpack_from(page, _FLAGS_PLACE)
    magic, version, *_, commit = _META.unpack_from(page, _HEADER_BYTES)
    if not flags & _META_FLAG or magic != _MAGIC or version != _VERSION:
        return MetaPage("it isn't marked as one", commit)
    return MetaPage("", commit)


def explain_unopenable(path: Path, error: lmdb.Error) -> str:
    """Say why LMDB refuses the file at `path`, and what to do."""
    pages = read_meta_pages(path)
    sound = [number for number, page in enumerate(pages) if not page.problem]
    if len(sound) == 1:
        bad = 1 - sound[0]
        return (
            f"{path / DATA_NAME}: its meta page {bad} is damaged ({pages[bad].problem}), the other "
            f"one is of commit {pages[sound[0]].commit}; LMDB opens no such file; restore the "
            "store from a snapshot"
        )
    return (
        f"{path / DATA_NAME} is not an LMDB database of this kind ({error}); use another directory"
    )


def check_length(env: lmdb.Environment, path: Path) -> None:
    """Refuse a file that ends before its last page: reading on would end the process.

    Raises:
        StoreFormatError: It is cut short.
    """
    needed = (env.info()["last_pgno"] + 1) * int(env.stat()["psize"])
    found = (path / DATA_NAME).stat().st_size
    if found < needed:
        env.close()
        raise StoreFormatError(
            f"{path / DATA_NAME} is cut short: it has {found} bytes, its pages reach to {needed}; "
            "restore the store from a snapshot"
        )
