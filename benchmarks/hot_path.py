"""Microseconds per experience of each step inside the server, without gRPC and without clients."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.workload import GROUP_SIZE, Size, group
from experience_buffer import trxp
from experience_buffer.v1 import service_pb2
from experience_buffer_server.admission import admit
from experience_buffer_server.assembly import sampled
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.compute import Computer
from experience_buffer_server.config import ComputeSection, ServerSection
from experience_buffer_server.consumer_settings import ConsumerSettings
from experience_buffer_server.consumers import Want
from experience_buffer_server.ingest import Push
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import BufferRow
from experience_buffer_server.store.lmdb_store import LmdbStore

_BATCH_GROUPS = 8


async def measure(size: Size, num_groups: int) -> dict[str, float]:
    """Microseconds per experience by step.

    `read` is the frame, the metadata and the tensor table of a pushed group; `admit` adds checks
    and the canonical single payload; `push` is the whole push path up to the handover to the
    store's writer and after its commit; `commit` is the wall time that concurrent groups wait
    for the disk; `lease` is taking and leasing a batch of 64; `assemble` makes its messages;
    `serialise` is protobuf.
    """
    payloads = [trxp.encode(group(size, 0, number)) for number in range(num_groups)]
    settings = BufferSettings(
        group_size=GROUP_SIZE, consumers=(ConsumerSettings(name="trainer", unit="group"),)
    )
    steps = _decoding(payloads, settings)
    with tempfile.TemporaryDirectory() as folder:
        store = await LmdbStore.open(Path(folder) / "data")
        buffer = Buffer(
            BufferRow(
                id=1, name="bench", config=settings.model_dump_json(), policy_version=None,
                create_time=0.0,
            ),
            store=store,
            computer=Computer(ComputeSection(), Path(folder), Metrics()),
            metrics=Metrics(),
            limits=ServerSection(),
        )  # fmt: skip
        steps |= await _pushing(buffer, payloads)
        steps |= await _sampling(buffer, store, num_groups)
        await store.close()
    return steps


def _decoding(payloads: list[bytes], settings: BufferSettings) -> dict[str, float]:
    started = time.perf_counter()
    groups = [trxp.read(payload) for payload in payloads]
    read = time.perf_counter() - started
    started = time.perf_counter()
    for items in groups:
        for item in items:
            assert isinstance(item, trxp.Item)
            admit(item, settings)
    admitted = time.perf_counter() - started
    count = len(payloads) * GROUP_SIZE
    return {"read": read / count * 1e6, "admit": admitted / count * 1e6}


async def _pushing(buffer: Buffer, payloads: list[bytes]) -> dict[str, float]:
    """CPU time of pushing, and the wall time of the same with 16 pushes under way."""
    limit = asyncio.Semaphore(16)

    async def push(payload: bytes) -> None:
        async with limit:
            await buffer.ingest.push(Push(payload=payload))

    cpu, wall = time.thread_time(), time.perf_counter()
    await asyncio.gather(*map(push, payloads))
    count = len(payloads) * GROUP_SIZE
    return {
        "push": (time.thread_time() - cpu) / count * 1e6,
        "commit": (time.perf_counter() - wall) / count * 1e6,
    }


async def _sampling(buffer: Buffer, store: LmdbStore, num_groups: int) -> dict[str, float]:
    want = Want(
        batch_size=_BATCH_GROUPS,
        min_batch_size=1,
        timeout_seconds=0.0,
        lease_seconds=60.0,
        max_bytes=2**62,
    )
    lease_seconds = assemble_seconds = serialise_seconds = ack_seconds = 0.0
    stop = asyncio.Event()
    count = 0
    while count < num_groups * GROUP_SIZE:
        started = time.thread_time()
        lease, _ = await buffer.desk.sample("trainer", want, stop)
        assert lease is not None
        leased = time.thread_time()
        response = service_pb2.SampleResponse()
        for experiences in sampled(store, buffer, lease.units):
            response.experiences.extend(experiences)
        assembled = time.thread_time()
        response.SerializeToString()
        serialised = time.thread_time()
        count += len(response.experiences)
        await buffer.leasing.ack(lease.id)
        lease_seconds += leased - started
        assemble_seconds += assembled - leased
        serialise_seconds += serialised - assembled
        ack_seconds += time.thread_time() - serialised
    return {
        "lease": lease_seconds / count * 1e6,
        "assemble": assemble_seconds / count * 1e6,
        "serialise": serialise_seconds / count * 1e6,
        "ack": ack_seconds / count * 1e6,
    }
