"""What is compared: systems, their modes, cases, and how long each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NUM_WRITERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system as it is run."""

    name: str
    adapter: str
    variant: str = ""
    """What its server is told."""
    title: str
    """For people."""
    durable: bool = False
    """Whether an ack says that it is on disk."""
    writes: Sequence[str] = ()
    """Modes of writing; the first one fills."""
    reads: Sequence[str] = ()
    """Modes of reading."""
    mixes: Sequence[tuple[str, str]] = ()
    """Modes of writing and reading at once."""
    latencies: Sequence[str] = ()
    """Modes of writing one experience at a time."""
    images: Sequence[str] = ()
    """Modes of writing images; they are read in all modes of reading."""
    reading_of: Mapping[str, str] = field(default_factory=dict)
    """By mode of reading, the mode of writing that it needs, if not any."""


SYSTEMS = (
    System(
        name="ours",
        adapter="ours",
        title="experience buffer",
        durable=True,
        writes=("writer", "push", "stubs"),
        reads=("packed", "trxp"),
        mixes=(("writer", "packed"), ("push", "trxp")),
        latencies=("push",),
        images=("push", "writer"),
    ),
    System(
        name="ours-grpc",
        adapter="ours",
        title="experience buffer, gRPC alone",
        durable=True,
        writes=("writer-grpc",),
        reads=("packed-grpc", "trxp-grpc"),
        mixes=(("writer-grpc", "packed-grpc"),),
        images=("writer-grpc",),
    ),
    System(
        name="redis",
        adapter="redis_lists",
        variant="off",
        title="Redis",
        writes=("lists", "hand-laid", "keys"),
        reads=("lists", "hand-laid"),
        mixes=(("lists", "lists"),),
        latencies=("lists",),
        images=("lists", "hand-laid"),
        reading_of={"lists": "lists", "hand-laid": "hand-laid"},
    ),
    System(
        name="redis-everysec",
        adapter="redis_lists",
        variant="everysec",
        title="Redis, AOF every second",
        writes=("lists",),
    ),
    System(
        name="redis-always",
        adapter="redis_lists",
        variant="always",
        title="Redis, AOF always",
        durable=True,
        writes=("lists", "hand-laid", "keys"),
        latencies=("lists",),
    ),
    System(
        name="reverb",
        adapter="reverb_tables",
        title="Reverb",
        writes=("items", "groups"),
        reads=("items", "groups"),
        mixes=(("items", "items"),),
        latencies=("items",),
        images=("items",),
        reading_of={"items": "items", "groups": "groups"},
    ),
    System(
        name="transferqueue",
        adapter="transfer_queue_partition",
        title="TransferQueue",
        writes=("group", "many"),
        reads=("group",),
        mixes=(("group", "group"),),
        latencies=("group",),
    ),
    System(
        name="floor",
        adapter="floor",
        title="gRPC and LMDB alone",
        durable=True,
        writes=("stream",),
        reads=("stream",),
        mixes=(("stream", "stream"),),
        latencies=("stream",),
        images=("stream",),
    ),
    System(
        name="floor-direct",
        adapter="floor",
        variant="direct",
        title="the same, past the page cache",
        durable=True,
        writes=("stream",),
    ),
    System(
        name="echo",
        adapter="echo",
        title="bare gRPC echo",
        images=("sink", "both"),
        reads=("source",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    repetitions: int = 3
    window_seconds: float = 1.5
    fill_seconds: float = 2.5
    latency_seconds: float = 2.0
    num_latencies: int = 400
    sizes: Sequence[str] = ("S", "M", "L")
    latency_size: str = "M"
    images: bool = True
    systems: Sequence[str] = tuple(system.name for system in SYSTEMS)


QUICK = Plan(
    repetitions=1,
    window_seconds=0.6,
    fill_seconds=1.0,
    latency_seconds=0.8,
    num_latencies=150,
    sizes=("S", "M"),
)
FILL = {"S": 48_000, "M": 24_000, "L": 12_000, "image": 48}
"""Experiences stored before they are sampled, at most; those of size L take 1.5 GB."""
READ_LEAD_SECONDS = {"S": 0.15, "M": 0.15, "L": 0.4, "image": 0.15}
"""For which a reader works before a window of time begins, so that what it reads ahead is under way, and
memory for it, which batches of 8 MB take long to touch for the first time, in use."""
