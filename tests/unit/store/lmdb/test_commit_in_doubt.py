"""A commit of which nobody knows whether it is on the disk takes nothing away that it may need."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from experience_buffer_server.store.interface import StoreFailedError
from experience_buffer_server.store.lmdb.verify.check import Kind, check
from tests.faults.power import fail_power
from tests.faults.shim import Faults
from tests.unit.store.conftest import MEBI, OpenStore, append, make_record


async def test_payloads_of_a_commit_in_doubt_stay(
    open_store: OpenStore, path: Path, faults: Faults
) -> None:
    """What LMDB writes over the page that failed is never synced: the power takes it back."""
    store = await open_store()
    await append(store, make_record(1), payload=bytes(MEBI))
    faults.fail_meta_writes(errno.EIO)
    with pytest.raises(StoreFailedError, match="Input/output error"):
        await append(store, make_record(2), payload=bytes(MEBI))
    await store.close()
    faults.fail_meta_writes(0)
    kept = path.parent / "kept"
    folders = [path, faults.files[0][1].parent]
    for folder in folders:
        shutil.copytree(folder, kept / folder.name)
    found = set()
    for seed in range(12):
        for folder in folders:
            shutil.rmtree(folder)
            shutil.copytree(kept / folder.name, folder)
        chance = random.Random(seed)
        for file, undo in faults.files:
            fail_power(file, undo, chance)
        await (await open_store()).close()
        report = check(path)
        assert not report.totals[Kind.DAMAGED_ROW], report.findings
        found.add(report.tables["extents"].rows)
    assert found == {1, 2}
