"""A buffer of a real server, driven over plain gRPC and killed on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.plain import push_request, statuses, summaries
from tests.integration.server import Server, Stub, eventually
from tests.models.buffer_port import payload
from tests.models.model import SIZE, Model
from tests.models.model_place import Reader
from tests.models.port import Delivered, Item, Port, Refused
from tests.unit.builders import eid

_PATIENCE_SECONDS = 5.0
"""Removals go on for a moment after the call that caused them."""
_STATUSES = {1: "stored", 2: "duplicate", 3: "refused"}


class ServerPort:
    """Drives one buffer of a server; see `port.Port`."""

    clock_error_seconds = 2.0

    def __init__(self, server: Server, name: str, readers: dict[str, Reader]) -> None:
        self._server = server
        self._name = name
        self._channel = grpc.insecure_channel(server.address)
        self._stub = Stub(self._channel)
        self._published: int | None = None
        config = config_pb2.BufferConfig(name=name, group_size=SIZE)
        config.consumers.extend(_consumers(readers))
        self._stub.CreateBuffer(service_pb2.CreateBufferRequest(config=config))

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    # --- calls

    def push(self, live: Sequence[Item], dead: Sequence[Item]) -> list[str]:
        """Push in one call."""
        tombstones = [(eid(task, run), "gone") for task, run, _ in dead]
        request = push_request(self._name, payload(live), tombstones=tombstones)
        with _errors():
            found = statuses(self._stub.Push(request).outcomes)
        return [_STATUSES[status] for status in found]

    def seal(self, key: str) -> None:
        """Close a group."""
        with _errors():
            self._stub.SealGroup(service_pb2.SealGroupRequest(buffer=self._name, group=key))

    def drop(self, key: str) -> int:
        """Drop a group."""
        request = service_pb2.DropGroupRequest(buffer=self._name, group=key, reason="aborted")
        return self._stub.DropGroup(request).num_dropped

    def sample(
        self, name: str, wanted: int, seconds: float, rank_of: tuple[int, int, int] | None
    ) -> Delivered | None:
        """What there is now."""
        request = service_pb2.SampleRequest(
            buffer=self._name,
            consumer=name,
            batch_size=wanted,
            min_batch_size=1,
            lease_seconds=seconds,
        )
        if rank_of is not None:
            request.rank_of.rank, request.rank_of.world_size = rank_of[:2]
            request.rank_of.after_lease_id = rank_of[2]
        with _errors():
            response = self._stub.Sample(request)
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
        stats = self._consumer_stats()[name]
        return bool(stats.unit == config_pb2.UNIT_GROUP)

    def ack(self, lease_id: int, step: int | None, rank: int | None) -> int:
        """Acknowledge; the experiences of the lease."""
        request = service_pb2.AckRequest(buffer=self._name, lease_id=lease_id, step=step, rank=rank)
        with _errors():
            return self._stub.Ack(request).num_experiences

    def nack(self, lease_id: int) -> int:
        """Give back; the experiences of the lease."""
        request = service_pb2.NackRequest(buffer=self._name, lease_id=lease_id)
        with _errors():
            return self._stub.Nack(request).num_experiences

    def extend(self, lease_id: int, seconds: float) -> float:
        """The new deadline, as near as messages tell."""
        request = service_pb2.ExtendLeaseRequest(
            buffer=self._name, lease_id=lease_id, lease_seconds=seconds
        )
        return time.time() + self._stub.ExtendLease(request).lease.expires_in_seconds

    def rewind(self, name: str, step: int) -> tuple[int, int]:
        """Experiences and leases that came back."""
        with _errors():
            found = self._stub.Rewind(
                service_pb2.RewindRequest(buffer=self._name, consumer=name, step=step)
            )
        return found.num_experiences, found.num_leases

    def declare_safe(self, name: str, step: int) -> None:
        """Declare a step safe."""
        self._stub.DeclareSafe(
            service_pb2.DeclareSafeRequest(buffer=self._name, consumer=name, step=step)
        )

    def release(self, name: str, uids: Sequence[str]) -> int:
        """Units that were quarantined."""
        request = service_pb2.ReleaseQuarantinedRequest(buffer=self._name, consumer=name, uids=uids)
        return self._stub.ReleaseQuarantined(request).num_units

    def prioritize(self, updates: Sequence[tuple[str, float, int]]) -> tuple[int, int, int]:
        """Numbers of those updated, unknown and outdated."""
        request = service_pb2.UpdatePrioritiesRequest(buffer=self._name)
        for uid, priority, generation in updates:
            request.updates.add(uid=uid, priority=priority, generation=generation)
        found = self._stub.UpdatePriorities(request)
        return found.num_updated, len(found.unknown_uids), len(found.outdated_uids)

    def delete(self, uid: str) -> bool:
        """False where somebody holds it."""
        found = self._stub.Delete(service_pb2.DeleteRequest(buffer=self._name, uids=[uid]))
        assert found.num_deleted + len(found.leased_uids) == 1
        return bool(found.num_deleted)

    def publish(self, version: int) -> None:
        """Publish a policy version."""
        request = service_pb2.PublishPolicyVersionRequest(buffer=self._name, version=version)
        self._stub.PublishPolicyVersion(request)

    def change(self, readers: dict[str, Reader]) -> None:
        """Change the consumers."""
        config = config_pb2.BufferConfig(name=self._name)
        config.consumers.extend(_consumers(readers))
        request = service_pb2.UpdateBufferRequest(config=config)
        request.update_mask.paths.append("consumers")
        self._stub.UpdateBuffer(request)

    # --- time and death

    def let_expire(self, lease_ids: Sequence[int]) -> None:
        """Wait until leases of a moment have expired."""
        num_open = self._num_leases()
        eventually(lambda: self._num_leases() <= num_open - len(lease_ids), "leases to expire")

    def _num_leases(self) -> int:
        return sum(stats.num_leases for stats in self._consumer_stats().values())

    def crash(self) -> None:
        """SIGKILL, and another life."""
        self._server.restart()
        grpc.channel_ready_future(self._channel).result(30)

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
        self._server.start()
        grpc.channel_ready_future(self._channel).result(30)

    # --- what there is

    def _consumer_stats(self) -> dict[str, service_pb2.ConsumerStats]:
        stats = self._stub.GetStats(service_pb2.GetStatsRequest(buffer=self._name)).buffers[0]
        return {consumer.name: consumer for consumer in stats.consumers}

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
        for name, stats in self._consumer_stats().items():
            found[name] = (
                stats.num_ready_units + stats.num_held_units,
                stats.num_leased_units,
                stats.num_leases,
                stats.num_quarantined_units,
                stats.num_retained_experiences,
                stats.last_step if stats.HasField("last_step") else None,
                stats.safe_step if stats.HasField("safe_step") else None,
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


def _consumers(readers: dict[str, Reader]) -> Iterator[config_pb2.ConsumerConfig]:
    for name, reader in readers.items():
        message = config_pb2.ConsumerConfig(name=name)
        _fill(message, reader)
        yield message


def _fill(message: Message, values: Mapping[str, Any]) -> None:
    """Settings by the words of the configuration file."""
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if isinstance(value, dict):
            _fill(getattr(message, name), value)
        elif field.enum_type is not None:
            (number,) = [
                one.number
                for one in field.enum_type.values
                if one.name.endswith(f"_{value.upper()}")
            ]
            setattr(message, name, number)
        else:
            setattr(message, name, value)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise Refused(error.code().name) from error
