"""A real disk that fills: a small tmpfs, where this process may mount one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.faults.full_disk import MEBI, check_full
from tests.integration.server import Server

_DISK_MEBI: Final = 40
_BALLAST_MEBI: Final = 16


def check_small_disk(folder: Path) -> str:
    """Fill a disk under a server and free some of it; what came of that, in words.

    Raises:
        AssertionError: The server did not do what it should.
    """
    place = folder / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MEBI}m", "tmpfs", str(place)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
    if mounted.returncode:
        return f"left out, it needs the right to mount a tmpfs: {mounted.stderr.strip()}"
    server = Server(place)
    try:
        ballast = place / "ballast"
        ballast.write_bytes(bytes(_BALLAST_MEBI * MEBI))
        with server.start().stub() as stub:
            room = check_full(stub, ballast.unlink, "the disk is full")
        assert server.stop() == 0
    finally:
        server.close()
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    return (
        f"full after {room} MiB: pushes refused, reads, leases and acks served; "
        "with space again without a restart"
    )
