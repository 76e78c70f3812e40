"""Whether the snapshots of a run are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.snapshots.copy_process import sha256_of
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from tests.chaos.report import Counts


def check_snapshots(path: Path, counts: Counts) -> Iterator[str]:
    """What is wrong, in sentences: an interrupted one leaves nothing that a server's start spares.

    Args:
        path: Their folder.
        counts: How much was compared; added to.
    """
    if not path.is_dir():
        return
    folder = SnapshotFolder(path)
    with folder.locked():
        for name in folder.clean():
            yield f"snapshot {name}: not whole"
    for one in folder.snapshots():
        problem = one.problem
        if one.manifest is not None and not problem:
            differs = sha256_of(one.path / "data.mdb") != one.manifest.sha256
            differs |= sha256_of(one.path / NAME) != one.manifest.payloads_sha256
            problem = "its data isn't what its manifest says" if differs else ""
        counts.snapshots += 1
        if problem:
            yield f"snapshot {one.name}: {problem}"
