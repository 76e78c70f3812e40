"""A buffer of a real server, driven over plain gRPC and killed on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from experience_buffer import BufferConfig, Client, ConsumerConfig, Limiter, Selector, Staleness
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from tests.integration.plain import push_request, stats, statuses, summaries
from tests.integration.server import Server, Stub, eventually
from tests.models.buffer_port import payload
from tests.models.model import SIZE, Model
from tests.models.model_place import Reader
from tests.models.port import Delivered, Item, Port, Refused
from tests.unit.builders import eid

_PATIENCE_SECONDS = 5.0
"""Removals go on for a moment after the call that caused them."""
_STATUSES = {1: "stored", 2: "duplicate", 3: "refused"}
_KINDS: dict[str, Any] = {"selector": Selector, "limiter": Limiter, "staleness": Staleness}


class ServerPort:
    """Drives one buffer of a server; see `port.Port`."""

    clock_error_seconds = 2.0

    def __init__(self, server: Server, name: str, readers: dict[str, Reader]) -> None:
        self._server = server
        self._name = name
        self._channel = grpc.insecure_channel(server.address)
        self._stub = Stub(self._channel)
        self._client = Client(server.address)
        self._client.create_buffer(
            BufferConfig(name, group_size=SIZE, consumers=_consumers(readers))
        )

    def close(self) -> None:
        """Close the connections."""
        self._channel.close()
        self._client.close()

    # --- calls

    def _call(self, method: str, **fields: Any) -> Any:
        """The answer to a request about the buffer."""
        return self._send(
            method, getattr(service_pb2, f"{method}Request")(buffer=self._name, **fields)
        )

    def _send(self, method: str, request: object) -> Any:
        try:
            return getattr(self._stub, method)(request)
        except grpc.RpcError as error:
            raise Refused(error.code().name) from error

    def push(self, live: Sequence[Item], dead: Sequence[Item]) -> list[str]:
        """Push in one call."""
        tombstones = [(eid(task, run), "gone") for task, run, _ in dead]
        request = push_request(self._name, payload(live), tombstones=tombstones)
        return [_STATUSES[status] for status in statuses(self._send("Push", request).outcomes)]

    def seal(self, key: str) -> None:
        """Close a group."""
        self._call("SealGroup", group=key)

    def drop(self, key: str) -> int:
        """Drop a group."""
        return int(self._call("DropGroup", group=key, reason="aborted").num_dropped)

    def sample(
        self, name: str, wanted: int, seconds: float, rank_of: tuple[int, int, int] | None
    ) -> Delivered | None:
        """What there is now."""
        rank = None
        if rank_of is not None:
            names = ("rank", "world_size", "after_lease_id")
            rank = types_pb2.RankOf(**dict(zip(names, rank_of, strict=True)))
        response = self._call(
            "Sample",
            consumer=name,
            batch_size=wanted,
            min_batch_size=1,
            lease_seconds=seconds,
            rank_of=rank,
        )
        if not response.HasField("lease"):
            return None
        units: list[list[str]] = []
        group = ""
        for one in response.experiences:
            # Groups are contiguous; one that is drawn again begins with its first member.
            repeated = units and one.uid == units[-1][0]
            if self._is_grouped(name) and one.group == group and not repeated:
                units[-1].append(one.uid)
            else:
                units.append([one.uid])
            group = one.group
        assert response.num_units == len(units)
        return Delivered(
            lease_id=response.lease.id,
            units=units,
            deadline=time.time() + response.lease.expires_in_seconds,
            generations={one.uid: one.generation for one in response.experiences},
        )

    def _is_grouped(self, name: str) -> bool:
        return bool(self._consumer_stats()[name].unit == config_pb2.UNIT_GROUP)

    def ack(self, lease_id: int, step: int | None, rank: int | None) -> int:
        """Acknowledge; the experiences of the lease."""
        return int(self._call("Ack", lease_id=lease_id, step=step, rank=rank).num_experiences)

    def nack(self, lease_id: int) -> int:
        """Give back; the experiences of the lease."""
        return int(self._call("Nack", lease_id=lease_id).num_experiences)

    def extend(self, lease_id: int, seconds: float) -> float:
        """The new deadline, as near as messages tell."""
        found = self._call("ExtendLease", lease_id=lease_id, lease_seconds=seconds)
        return time.time() + float(found.lease.expires_in_seconds)

    def rewind(self, name: str, step: int) -> tuple[int, int]:
        """Experiences and leases that came back."""
        found = self._call("Rewind", consumer=name, step=step)
        return found.num_experiences, found.num_leases

    def declare_safe(self, name: str, step: int) -> None:
        """Declare a step safe."""
        self._call("DeclareSafe", consumer=name, step=step)

    def release(self, name: str, uids: Sequence[str]) -> int:
        """Units that were quarantined."""
        return int(self._call("ReleaseQuarantined", consumer=name, uids=uids).num_units)

    def prioritize(self, updates: Sequence[tuple[str, float, int]]) -> tuple[int, int, int]:
        """Numbers of those updated, unknown and outdated."""
        found = self._client.update_priorities(updates, buffer=self._name)
        return found.num_updated, len(found.unknown_uids), len(found.outdated_uids)

    def delete(self, uid: str) -> bool:
        """False where somebody holds it."""
        found = self._call("Delete", uids=[uid])
        assert found.num_deleted + len(found.leased_uids) == 1
        return bool(found.num_deleted)

    def publish(self, version: int) -> None:
        """Publish a policy version."""
        self._call("PublishPolicyVersion", version=version)

    def change(self, readers: dict[str, Reader]) -> None:
        """Change the consumers."""
        self._client.update_buffer(self._name, consumers=_consumers(readers))

    # --- time and death

    def let_expire(self, lease_ids: Sequence[int]) -> None:
        """Wait until leases of a moment have expired."""
        num_open = self._num_leases()
        eventually(lambda: self._num_leases() <= num_open - len(lease_ids), "leases to expire")

    def _num_leases(self) -> int:
        return sum(told.num_leases for told in self._consumer_stats().values())

    def crash(self) -> None:
        """SIGKILL, and another life."""
        self._server.die()
        self._come_back()

    def crash_during(self, call: Callable[[Port], object], num_commits: int) -> None:
        """SIGKILL while a call is under way, or has just ended."""
        begun = threading.Event()

        def run() -> None:
            begun.set()
            try:
                call(self)
            except (Refused, grpc.RpcError):
                return

        caller = threading.Thread(target=run)
        caller.start()
        begun.wait()
        if num_commits:
            caller.join(0.002)
        self._server.die()
        caller.join()
        self._come_back()

    def _come_back(self) -> None:
        self._server.start()
        grpc.channel_ready_future(self._channel).result(30)

    # --- what there is

    def _consumer_stats(self) -> dict[str, service_pb2.ConsumerStats]:
        return {consumer.name: consumer for consumer in stats(self._stub, self._name).consumers}

    def observed(self, *expected: dict[str, Any]) -> dict[str, Any]:
        """What statistics and lists tell, once what is expected has come to pass."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self._observed()) not in expected and time.monotonic() < deadline:
            pass
        return found

    def _observed(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "members": {one.uid: one.priority for one in summaries(self._stub, self._name)}
        }
        for name, told in self._consumer_stats().items():
            found[name] = (
                told.num_ready_units + told.num_held_units,
                told.num_leased_units,
                told.num_leases,
                told.num_quarantined_units,
                told.num_retained_experiences,
                told.last_step if told.HasField("last_step") else None,
                told.safe_step if told.HasField("safe_step") else None,
            )
        return found

    def expected(self, model: Model) -> dict[str, Any]:
        """What `observed` finds where the model is right."""
        found: dict[str, Any] = {"members": {m.uid: m.priority for m in model.members().values()}}
        for name in model.places:
            place, units = model.places[name], model.stored(name)
            found[name] = (
                len(model.available(name)),
                len(model.leased(name)),
                len(model.leases_of(name)),
                len(place.quarantined),
                sum(len(place.retained(unit)) * len(ms) for unit, ms in units.items()),
                place.last,
                place.safe,
            )
        return found


def _consumers(readers: dict[str, Reader]) -> tuple[ConsumerConfig, ...]:
    return tuple(
        ConsumerConfig(
            name, **{key: _KINDS[key](**v) if key in _KINDS else v for key, v in reader.items()}
        )
        for name, reader in readers.items()
    )
