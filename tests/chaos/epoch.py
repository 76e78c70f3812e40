"""Stores under load, their servers killed at one point after the other, then drained and compared."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Final, Literal

import grpc

from experience_buffer.v1 import service_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from experience_buffer_server.store.interface import StoreError
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.snapshots.copy_process import sha256_of
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from experience_buffer_server.store.lmdb.verify.check import Kind, check
from tests.chaos import work
from tests.chaos.audit import Audit
from tests.chaos.clients import NUM_PUSHERS, Clients
from tests.chaos.fates import Sighting
from tests.chaos.learner import load_checkpoint
from tests.chaos.points import Point
from tests.chaos.report import Counts, Report
from tests.faults.power import fail_power
from tests.faults.shim import Faults
from tests.integration.plain import stats, summaries
from tests.integration.server import Server, eventually
from tests.lives import Lives

Durability = Literal["commit", "interval"]

HOOKS: Final = Path(__file__).with_name("hooks")
_END_SECONDS: Final = 30.0
_DRAIN_SECONDS: Final = 90.0
_VERIFIED_SHARE: Final = 0.3
"""Of the power failures after which every row is read."""
_CLIENT_SHARE: Final = 0.3
"""Of the kills that a worker or trainer dies with, too."""


class Epoch:
    """One store, from its first life to its last.

    Args:
        folder: Its own, made here.
        library: The fault library.
        seed: Of everything that is chosen.
        durability: What a commit waits for.
        sabotage: What the writer does wrong; empty: nothing.
    """

    def __init__(
        self,
        folder: Path,
        library: Path,
        seed: int,
        *,
        durability: Durability = "commit",
        sabotage: str = "",
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._seed = seed
        self._durability = durability
        self._sabotage = sabotage
        self._snapshots = folder / "snapshots"
        self._chance = random.Random(seed)
        self._deaths = folder / "deaths"
        self.server = Server(folder / "server", compiled_reader=True)
        self._faults = Faults(library, self.server.data, folder / "faults")
        self._clients = Clients(folder, seed)
        self._sightings: list[Sighting] = []
        self._left: frozenset[str] | None = None
        """What was still stored in the end; None: the run ended before."""
        self.report = Report()

    def run(self, points: Sequence[Point]) -> Report:
        """Die at each point, drain, and compare."""
        try:
            self._live(points)
        except (AssertionError, grpc.RpcError, TimeoutExpired) as error:
            self.report.problems.append(f"the run ended early: {_shortened(str(error))}")
        finally:
            self._clients.close()
            self.server.close()
            self._faults.close()
        if self._left is None and self.report.kills:
            # What kept it from its end may be a store that has lost something.
            self._verify()
        self._compare()
        return self.report

    def _live(self, points: Sequence[Point]) -> None:
        self._start(Point("none", "server"))
        with self.server.stub() as stub:
            for config in work.buffers():
                stub.CreateBuffer(service_pb2.CreateBufferRequest(config=config))
        self._clients.start(self.server.address)
        for number, point in enumerate(points):
            if number:
                self._start(point)
            else:
                # The first life had buffers to make; its death comes at no chosen point.
                point = Point("random moment", "both")
            self._clients.check()
            if not point.process and self._chance.random() < 0.5:
                self._look()
            self._kill(point)
        self._start(Point("none", "server"))
        self._drain()

    # --- lives

    def _start(self, point: Point) -> None:
        plan = point.plan(self._chance)
        if self._sabotage:
            plan["sabotage"] = self._sabotage
        self._faults.spare()
        self._deaths.unlink(missing_ok=True)
        inherited = os.environ.get("PYTHONPATH")
        self.server.environment = self._faults.environment(notes_writes=True) | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HOOKS), inherited))),
            "CHAOS_PLAN": json.dumps(plan),
            "CHAOS_DEATHS": str(self._deaths),
            "EXPERIENCE_BUFFER_STORE__DURABILITY": self._durability,
            "EXPERIENCE_BUFFER_SNAPSHOTS__PATH": str(self._snapshots),
            "EXPERIENCE_BUFFER_SNAPSHOTS__KEEP": "2",
        }
        try:
            self.server.start()
        except AssertionError:
            # Some points come while a server restores what it had.
            if not self._has_died:
                raise

    @property
    def _has_died(self) -> bool:
        return self._deaths.exists() or bool(self._faults.killed_at)

    # --- deaths

    def _kill(self, point: Point) -> None:
        before = self._chance.random() < 0.5
        if point.needs == "trainer":
            self._kill_client(self._clients.learner)
        elif point.needs == "snapshot":
            threading.Thread(target=self._take_snapshot, daemon=True).start()
        elif self._chance.random() < _CLIENT_SHARE and before:
            self._kill_client(self._chance.choice(self._clients.all))
        if point.process:
            reached = self._await_death(point)
            self.report.points[point.name if reached else "random moment"] += 1
            self.report.missed[point.name] += not reached
        else:
            self.report.points[point.name] += 1
            _pause(self._chance.uniform(0.1, 1.2))
        self._end_life(point)
        self.report.kills[point.victim] += 1
        if self._chance.random() < _CLIENT_SHARE and not before:
            self._kill_client(self._chance.choice(self._clients.all))

    def _take_snapshot(self) -> None:
        with self.server.stub() as stub, contextlib.suppress(grpc.RpcError):
            stub.Snapshot(service_pb2.SnapshotRequest())

    def _await_death(self, point: Point) -> bool:
        """Wait until the process that is watched has died; false if it lives on."""
        deadline = time.monotonic() + point.patience_seconds
        while time.monotonic() < deadline:
            if self._has_died:
                return True
            _pause(0.005)
        return False

    def _end_life(self, point: Point) -> None:
        if point.victim == "compute":
            self._kill_child("compute.worker")
            # Life goes on without it, for a moment.
            _pause(self._chance.uniform(0.3, 1.5))
        if point.victim == "writer":
            self._kill_child("lmdb.writer_process")
            self._await_end()
        else:
            if point.victim in ("both", "power"):
                self._kill_child("lmdb.writer_process")
            self.server.die()
        if point.victim == "power":
            self.server.wait(_END_SECONDS)
            for file, undo in self._faults.files:
                # How much there is to lose differs: what is chosen next is not to depend on it.
                loss = fail_power(file, undo, random.Random(self._chance.random()))
                self.report.lost_sectors[file.name] += loss.num_lost_sectors
            if self._chance.random() < _VERIFIED_SHARE:
                self._verify()
        elif point.victim != "server":
            self.server.wait(_END_SECONDS)

    def _kill_child(self, module: str) -> None:
        # The server, or the child, may just be ending by itself.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in self.server.children(module):
                os.kill(pid, signal.SIGKILL)

    def _await_end(self) -> None:
        """Without its writer a server ends by itself, and says so."""
        status = self.server.wait(_END_SECONDS)
        if status != 1:
            self.report.problems.append(f"the server ended with {status} without its writer")

    def _kill_client(self, client: Lives) -> None:
        client.kill()
        assert not client.complaint, f"{client.name}: {client.complaint}"
        self.report.client_kills[client.name.partition("-")[0]] += 1
        client.start()

    # --- what is there

    def _look(self) -> None:
        """List what evictions and ages have left."""
        with self.server.stub() as stub:
            began = time.monotonic()
            names = ("replay", "fresh")
            uids = frozenset(one.uid for name in names for one in summaries(stub, name))
            self._sightings.append(Sighting(began, time.monotonic(), uids))

    def _drain(self) -> None:
        """Stop the workers, and wait until the trainers have consumed everything."""
        self._clients.stop_pushing(_DRAIN_SECONDS)
        with self.server.stub() as stub:
            try:
                self._settle_down(stub)
            finally:
                self._look()
                names = ("queue", "groups", "steps")
                found = [one.uid for name in names for one in summaries(stub, name)]
                self._left = frozenset(found)
        self._clients.check()
        self.report.problems += self._clients.close()
        status = self.server.stop()
        if status:
            self.report.problems.append(f"the last life ended with {status}")
        self.report.problems += _check_snapshots(self._snapshots, self.report.counts)
        self._verify()

    def _verify(self) -> None:
        """Every row is whole, and rows fit one another."""
        try:
            found = check(self.server.data)
        except StoreError as error:
            self.report.problems.append(f"verify: {error}")
            return
        self.report.counts.verified_rows += found.num_rows
        for one in found.findings:
            if one.kind is Kind.LEFTOVER:
                continue
            row = f"row {one.row} of {one.table}"
            self.report.problems.append(f"verify: {row}: {one.message} ({one.kind})")

    def _settle_down(self, stub: ExperienceBufferStub) -> None:
        def is_drained() -> bool:
            self._clients.check()
            learner = stats(stub, "steps").consumers[0]
            busy = learner.num_ready_units + learner.num_leased_units
            state = load_checkpoint(self._folder / "checkpoint")
            saved = not learner.HasField("last_step") or learner.last_step == state["step"]
            empty = all(not stats(stub, name).num_items for name in ("queue", "groups", "fresh"))
            return empty and not busy and saved

        try:
            eventually(is_drained, "everything to be consumed", seconds=_DRAIN_SECONDS)
        except AssertionError as error:
            left = {name: stats(stub, name) for name in ("queue", "groups", "steps", "fresh")}
            waits = [f"{name}: {one.num_items} items" for name, one in left.items()]
            waits += [one.oldest_open_group for one in left.values() if one.oldest_open_group]
            raise AssertionError(f"{error}: {'; '.join(waits)}") from error

    def _compare(self) -> None:
        audit = Audit(self._folder, self._seed, NUM_PUSHERS, self._sightings)
        audit.check(self._left)
        self.report.counts.add(audit.counts)
        self.report.problems += audit.problems


def run(
    points: Sequence[Point],
    *,
    folder: Path,
    library: Path,
    seed: int,
    epoch_kills: int,
    sabotage: str = "",
    say: Callable[[str], object] = lambda text: None,
) -> Report:
    """Go through the points in epochs; a sound epoch's files are removed."""
    total = Report()
    for number, start in enumerate(range(0, len(points), epoch_kills)):
        began = time.monotonic()
        place = folder / f"epoch-{number}"
        part = list(points[start : start + epoch_kills])
        durability: Durability = "interval" if number % 4 == 3 else "commit"
        if durability == "interval":
            part = [point.without_syncs() for point in part]
        epoch = Epoch(place, library, seed + number, durability=durability, sabotage=sabotage)
        report = epoch.run(part)
        total.add(report, where=f"epoch {number} (seed {seed + number})")
        say(
            f"epoch {number} ({durability}): {sum(report.kills.values())} kills, "
            f"{report.counts.acked_experiences} experiences, {report.counts.deliveries} deliveries, "
            f"{len(report.problems)} problems, {time.monotonic() - began:.0f} s"
        )
        if not report.problems:
            shutil.rmtree(place)
        elif sabotage:
            break
    return total


def _check_snapshots(path: Path, counts: Counts) -> Iterator[str]:
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


def _shortened(text: str) -> str:
    """Its first line and its last ones: in between are the lines of a server's log."""
    first, *rest = text.strip().splitlines() or [""]
    return "\n    ".join([first, *rest[-3:]])


def _pause(seconds: float) -> None:
    # A server isn't to be asked while it is about to die: there is no condition to wait for.
    time.sleep(seconds)
