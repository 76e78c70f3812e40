"""The unary calls about buffers: their configuration, policy version, pacing, statistics.

Pure: no I/O. What `Call` means is in `calls.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from experience_buffer._messages import config as _config
from experience_buffer._messages import convert
from experience_buffer._messages.build import build
from experience_buffer._messages.calls import Call
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import BufferChanges, BufferConfig
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.values import BufferInfo, Reservation, SnapshotResult, Stats


def create_buffer(config: BufferConfig | str, *, exist_ok: bool) -> Call[BufferInfo]:
    """Create a buffer, by configuration or just by name."""
    if isinstance(config, str):
        config = BufferConfig(config)
    request = build(
        pb.CreateBufferRequest, config=_config.config_to_message(config), exist_ok=exist_ok
    )
    return Call("CreateBuffer", request, _buffer_of, idempotent=exist_ok)


def update_buffer(name: str, changes: BufferChanges) -> Call[BufferInfo]:
    """Change the fields of a configuration that are given.

    Raises:
        InvalidRequestError: None is given, or a value is malformed.
    """
    config = BufferConfig(name, **changes)
    paths = _config.changed_fields(config)
    paths += [name for name in _config.OPTIONAL if name in changes and name not in paths]
    if not paths:
        raise InvalidRequestError("update_buffer changes nothing: give at least one field")
    request = build(
        pb.UpdateBufferRequest,
        config=_config.config_to_message(config),
        update_mask=FieldMask(paths=paths),
    )
    return Call("UpdateBuffer", request, _buffer_of)


def get_buffer(name: str) -> Call[BufferInfo]:
    """Read one buffer."""
    return Call("GetBuffer", build(pb.GetBufferRequest, name=name), _buffer_of)


def list_buffers() -> Call[tuple[BufferInfo, ...]]:
    """Read all buffers."""
    return Call(
        "ListBuffers",
        pb.ListBuffersRequest(),
        lambda response: tuple(_config.buffer_info(buffer) for buffer in response.buffers),
    )


def delete_buffer(name: str, *, force: bool) -> Call[int]:
    """Remove a buffer."""
    request = build(pb.DeleteBufferRequest, name=name, force=force)
    return Call("DeleteBuffer", request, lambda response: response.num_items, idempotent=False)


def publish_policy_version(version: int, *, buffer: str) -> Call[int | None]:
    """Publish a policy version; the result is the one before."""
    request = build(pb.PublishPolicyVersionRequest, buffer=buffer, version=version)
    return Call(
        "PublishPolicyVersion",
        request,
        lambda response: (
            response.previous_version if response.HasField("previous_version") else None
        ),
    )


def reserve_groups(groups: Sequence[str], *, buffer: str, ttl_seconds: float) -> Call[Reservation]:
    """Ask which tasks may begin. A group that has a place keeps it, so twice does no harm."""
    names = [groups] if isinstance(groups, str) else list(groups)
    request = build(pb.ReserveGroupsRequest, buffer=buffer, groups=names, ttl_seconds=ttl_seconds)
    return Call("ReserveGroups", request, convert.reader_of(Reservation))


def get_stats(buffer: str) -> Call[Stats]:
    """Read statistics."""
    return Call("GetStats", build(pb.GetStatsRequest, buffer=buffer), convert.stats)


def snapshot(label: str) -> Call[SnapshotResult]:
    """Take a snapshot of the store; twice takes two."""
    return Call(
        "Snapshot",
        build(pb.SnapshotRequest, label=label),
        convert.reader_of(SnapshotResult),
        idempotent=False,
    )


def _buffer_of(response: Any) -> BufferInfo:
    return _config.buffer_info(response.buffer)
