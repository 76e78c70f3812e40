"""Where a server dies: the crash matrix. A point is one line; every full run goes through all."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

Victim = Literal["server", "writer", "both", "compute", "power"]
"""Who dies. With `power`, writer and server, and what no sync has made durable may be lost."""

_PACKAGE: Final = "experience_buffer_server"
_DISK_PHASES: Final = (
    "before",
    "torn-write",
    "before-sync",
    "after-sync",
    "after-meta",
    "committed",
    "answered",
)
"""Of one commit: begun, pages half written, all written, synced, decided, reported, answered."""
_PAYLOAD_PHASES: Final = (
    "before-payload",
    "torn-payload",
    "after-payload",
    "before-payload-sync",
    "after-payload-sync",
    "before-sync",
    "after-meta",
    "answered",
)
"""Of one with large payloads: these are written and synced first, to a file of their own."""
_SYNC_PHASES: Final = (
    *("before-sync", "after-sync", "after-meta"),
    *("before-payload-sync", "after-payload-sync"),
)
"""Those that come only where commits wait for the disk."""


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    victim: Victim
    process: Literal["", "server", "writer", "snapshot"] = ""
    """Whose code is watched; empty: no code, a random moment."""
    of: str = ""
    module: str = ""
    phase: str = ""
    where: str = ""
    max_count: int = 12
    """The moment is the n-th of its kind; n is at most this."""
    needs: Literal["", "trainer", "snapshot"] = ""
    """What makes it come: the learner begins anew, or a snapshot is taken."""

    @property
    def patience_seconds(self) -> float:
        """How long to wait for it: the process that computes advantages takes its time to start."""
        return 15.0 if "advantage" in self.name else 5.0

    def without_syncs(self) -> Point:
        """The like of it where commits don't wait for the disk, and nothing is said about power."""
        point = self
        if point.phase in _SYNC_PHASES:
            name = f"{point.name.partition(':')[0]}: committed"
            point = dataclasses.replace(point, name=name, phase="committed")
        return dataclasses.replace(point, victim="both") if point.victim == "power" else point

    def plan(self, chance: random.Random) -> dict[str, Any]:
        """What `hooks/dying.py` is told; nothing for a random moment."""
        if not self.process:
            return {}
        count = chance.randint(1, self.max_count)
        fields = ("name", "process", "of", "module", "phase", "where")
        return {name: getattr(self, name) for name in fields} | {"count": count}


_GROUPS: Final = {
    "": "random moments",
    "server": "moments in the server",
    "writer": "moments in the writer",
    "snapshot": "snapshots",
}
"""By process; the points of one group come by one mechanism."""


_COMMITS: Final = {
    "append": 30,
    "large-append": 6,
    "group-whole": 12,
    "group-sealed": 2,
    "group-dropped": 2,
    "advantages": 8,
    "lease": 20,
    "ack": 16,
    "nack": 2,
    "expiry": 1,
    "timeline": 6,
    "removal": 12,
    "prune": 1,
}
"""What a commit holds, and how many of these a life of the server sees."""
_PHASES: Final = {"prune": ("before", "committed"), "large-append": _PAYLOAD_PHASES}

_CALLS: Final = (
    # name, module, method, phase, what counts, how many a life sees
    ("push-stored", "buffer.flow", "Flow.stored", "before", "", 20),
    ("push-stored", "buffer.flow", "Flow.stored", "after", "", 20),
    ("group-completion", "buffer.state.group_table", "GroupTable.join", "after", "", 20),
    ("group-checked", "buffer.flow", "Flow.check_whole", "before", "", 20),
    ("advantage-result", "buffer.compute.computing", "Computing._computed", "after", "", 6),
    ("advantage-write-back", "buffer.compute.computing", "Computing._commit", "before", "", 6),
    ("advantage-stored", "buffer.compute.computing", "Computing._stored", "after", "", 6),
    ("lease-granted", "buffer.delivery.leasing", "Leasing._granted", "before", "", 16),
    ("lease-back", "buffer.delivery.leasing", "Leasing._give_back", "after", "", 2),
    ("ack-submitted", "buffer.delivery.acks", "Acks._begin_ack", "after", "", 12),
    ("ack-done", "buffer.delivery.leasing", "Leasing.close", "before", "", 12),
    ("part-acked", "buffer.delivery.acks", "Acks._store_part", "after", "", 4),
    ("eviction", "buffer.leaving.eviction", "Eviction.make_room", "after", "num_items", 6),
    ("rewind", "buffer.delivery.rewind", "Timelines._rewind", "after", "", 1),
    ("safe", "buffer.delivery.rewind", "Timelines._release", "after", "", 2),
    ("retention-removal", "buffer.leaving.retention", "Retention._gone", "before", "", 4),
    ("push-in-line", "buffer.intake.push_room", "PushRoom.join", "after", "", 2),
    ("push-let-in", "buffer.intake.push_room", "PushRoom.leave", "before", "", 2),
    ("delete", "buffer.leaving.removal", "Removal._submit_removal", "after", "", 6),
    ("group-dropped", "buffer.leaving.group_closing", "Grouping._drop", "before", "", 2),
    ("restore", "buffer.restore", "restore_leases", "after", "", 4),
)

_SNAPSHOTS: Final = (
    # name, module, method, phase
    ("snapshot begun", "store.lmdb.snapshots.folder", "SnapshotFolder.begin", "after"),
    ("snapshot copied", "store.lmdb.snapshots.manifest", "Manifest.to_json", "before"),
    ("snapshot published", "store.lmdb.snapshots.folder", "SnapshotFolder.publish", "before"),
    ("snapshot published", "store.lmdb.snapshots.folder", "SnapshotFolder.publish", "after"),
)
"""In the process that takes it; the server dies with it."""


def matrix() -> list[Point]:
    """Every point.

    Raises:
        LookupError: The server doesn't have the code of one any more; `points.py` has to follow.
    """
    points = [
        Point("random moment", "server"),
        Point("random moment", "writer"),
        Point("random moment", "both"),
        Point("random moment", "power"),
        Point("random moment", "compute"),
    ]
    for number, (kind, count) in enumerate(_COMMITS.items()):
        # A life finds nothing to forget yet: that commit writes nothing.
        phases = _PHASES.get(kind, _DISK_PHASES)
        for place, phase in enumerate(phases):
            # One of two loses its power; the other kind of death comes with the next phase.
            victim: Victim = "power" if (number + place) % 2 else "writer"
            points.append(
                Point(f"commit of {kind}: {phase}", victim, "writer", kind, "", phase, "", count)
            )
    growth: dict[str, Victim] = {"before": "writer", "after": "power"}
    points += [
        Point(f"map growth: {phase}", victim, "writer", "map-growth", "", phase, "", 1)
        for phase, victim in growth.items()
    ]
    for name, module, method, phase, where, count in _CALLS:
        code = (method, _existing(module, method), phase, where, count)
        needs: Literal["", "trainer"] = "trainer" if name == "rewind" else ""
        points.append(Point(f"{name}: {phase}", "server", "server", *code, needs))
    for name, module, method, phase in _SNAPSHOTS:
        code = (method, _existing(module, method), phase, "", 1)
        points.append(Point(f"{name}: {phase}", "both", "snapshot", *code, "snapshot"))
    return points


def _existing(module: str, method: str) -> str:
    """The whole name of a module that has this method."""
    try:
        owner: Any = importlib.import_module(f"{_PACKAGE}.{module}")
        for part in method.split("."):
            owner = getattr(owner, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise LookupError(f"points.py names {module}:{method}, which is gone: {error}") from error
    return f"{_PACKAGE}.{module}"


def unreached(points: Iterable[Point], reached: Iterable[str]) -> tuple[list[str], list[str]]:
    """Which kinds (such as "commit of ack") and which groups (such as "snapshots") never came.

    Args:
        points: Those that were asked for.
        reached: Names of those that came.
    """
    # A store that doesn't wait for the disk has other phases of the same kinds.
    came = {name.partition(":")[0] for name in reached}
    groups = {point.name.partition(":")[0]: _GROUPS[point.process] for point in points}
    lived = {group for kind, group in groups.items() if kind in came}
    return sorted(groups.keys() - came), sorted(set(groups.values()) - lived)


def schedule(num_kills: int, chance: random.Random) -> list[Point]:
    """So many points: all of them as often as that allows, random moments for one in three."""
    points = matrix()
    at_random = [point for point in points if not point.process]
    named = [point for point in points if point.process]
    chosen: list[Point] = []
    while len(chosen) < num_kills:
        turn = named.copy()
        chance.shuffle(turn)
        for index, point in enumerate(turn):
            if index % 2 == 0:
                chosen.append(at_random[(index // 2) % len(at_random)])
            chosen.append(point)
    return chosen[:num_kills]
