"""What a server does while there is no room: the same of a full map, a fault and a real small disk."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from experience_buffer import Experience
from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.plain import (
    STORED,
    ack,
    create,
    error_of,
    experience,
    push,
    sample,
    states,
    statuses,
    uids,
)
from tests.integration.server import Server, Stub

MEBI: Final = 1 << 20
_DISK_MEBI: Final = 40
_BALLAST_MEBI: Final = 16


def large(number: int) -> Experience:
    return experience(number, 0, response_text=f"{number:4}" * (MEBI // 4))


def push_until_full(stub: Stub) -> tuple[list[str], tuple[str, str, Any]]:
    """Uids of what was stored, and how the first push that wasn't was refused."""
    stored: list[str] = []
    for number in range(100):
        one = large(number)
        try:
            assert statuses(push(stub, "b", [one])) == [STORED]
        except grpc.RpcError:
            return stored, error_of(functools.partial(push, stub, "b", [one]))
        stored.append(one.eid.uid)
    raise AssertionError("it was never full")


def check_full(stub: Stub, free: Callable[[], object], reason: str) -> int:
    """Pushes are refused with the reason, everything else goes on; with space all is as before.

    Returns:
        How many experiences of a mebibyte there was room for.
    """
    create(stub, "b", group_by=config_pb2.GROUP_BY_NONE)
    stored, (code, details, more) = push_until_full(stub)
    assert code == "RESOURCE_EXHAUSTED", details
    assert reason in details, details
    assert more["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
    assert len(stored) > 5
    found = stub.Get(service_pb2.GetRequest(buffer="b", uid=stored[0]))
    assert found.summary.uid == stored[0]
    held = sample(stub, "b", 2)
    assert uids(held) == stored[:2]
    stub.Nack(service_pb2.NackRequest(buffer="b", lease_id=held.lease.id))
    again = sample(stub, "b", 3)
    assert uids(again) == stored[:3]
    assert ack(stub, "b", again) == 3
    free()
    newer = [large(1000 + number) for number in range(2)]
    for one in newer:
        assert statuses(push(stub, "b", [one])) == [STORED]
    everything = stored[3:] + [one.eid.uid for one in newer]
    rest = sample(stub, "b", len(everything))
    assert uids(rest) == everything
    assert ack(stub, "b", rest) == len(everything)
    assert states(stub, "b") == []
    return len(stored)


def check_small_disk(folder: Path) -> str:
    """Fill a tmpfs under a server, where one may be mounted, and free some; what came of it.

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
