"""The manifest of a snapshot: what it holds, as JSON that people and tools can read.

Values only. A change that an older server would misread needs another `MANIFEST_VERSION`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from experience_buffer_server.store.interface import StoreError
from experience_buffer_server.store.lmdb.disk.private_files import sync

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION: Final = 2
MAX_BYTES = 1 << 30
"""One and a half times what the default number of buffers takes with the longest settings."""

_Count = Annotated[int, Field(ge=0)]


class SnapshotError(StoreError):
    """A snapshot can't be taken, read or restored; the message says why and what to do."""


class SnapshotBusyError(SnapshotError):
    """Another process is at work in the folder of snapshots."""


class OtherVersionError(SnapshotError):
    """Another version of the server can restore it."""

    def __init__(self, message: str, create_time: datetime | None) -> None:
        super().__init__(message)
        self.create_time = create_time
        """When it was taken; None where its manifest doesn't say."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ConsumerManifest(_Part):
    """How far a consumer's trainer was."""

    name: str
    last_step: int | None
    """The highest training step acknowledged, or rewound to."""
    safe_step: int | None
    """What was acknowledged up to it can't be rewound."""


class BufferManifest(_Part):
    """What a snapshot holds of one buffer."""

    name: str
    num_experiences: _Count
    num_tombstones: _Count
    num_bytes: _Count
    """Payload bytes."""
    num_groups: _Count
    """Groups that have, or may still get, stored members."""
    num_open_leases: _Count
    policy_version: int | None
    consumers: tuple[ConsumerManifest, ...]
    """Those that have acknowledged, or declared safe, a step."""
    config: dict[str, Any]
    """The buffer's settings, with the keys of `[buffers.NAME]`."""


class Manifest(_Part):
    """What a snapshot holds."""

    manifest_version: Literal[2] = MANIFEST_VERSION
    store_format: _Count
    """The format version of the store."""
    server_version: str
    create_time: AwareDatetime
    """It holds every change that was acknowledged before."""
    label: str
    data_bytes: _Count
    """Size of `data.mdb`."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """Of `data.mdb`."""
    payloads_bytes: _Count
    """Size of `payloads.bin`, holes included; 0: there is none."""
    payloads_stored_bytes: _Count
    """Of these, what payloads take; the rest are holes, which take no room."""
    payloads_sha256: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
    """Of `payloads.bin`, holes as zeros; empty without one."""
    buffers: tuple[BufferManifest, ...]
    """By id."""

    @property
    def num_experiences(self) -> int:
        """Experiences in all buffers, tombstones not counted."""
        return sum(buffer.num_experiences for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        """What both files take on the disk."""
        return self.data_bytes + self.payloads_stored_bytes

    def to_json(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=2) + "\n"


class _Writer(BaseModel):
    """What manifests of all versions say of who wrote them."""

    manifest_version: int
    server_version: str
    create_time: AwareDatetime | None = None


def utc_now() -> datetime:
    """The time for a manifest, to the microsecond."""
    return datetime.now(UTC)


def write_manifest(snapshot: Path, manifest: Manifest) -> None:
    """Write the manifest into a snapshot's folder, and to the disk.

    Raises:
        SnapshotError: It would be longer than one that is read.
        OSError: It can't be written.
    """
    text = manifest.to_json().encode()
    if len(text) > MAX_BYTES:
        raise SnapshotError(
            f"the manifest, with the settings of {len(manifest.buffers)} buffers, would have "
            f"{len(text)} bytes, over the limit of {MAX_BYTES}; delete buffers, or "
            "shorten their settings"
        )
    path = snapshot / MANIFEST_NAME
    path.write_bytes(text)
    sync(path)


def read_manifest(snapshot: Path) -> Manifest:
    """Read the manifest in a snapshot's folder.

    Raises:
        OtherVersionError: It is of another version.
        SnapshotError: There is none, or it is damaged.
    """
    path = snapshot / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SnapshotError(f"{path} is larger than any manifest; it is damaged")
        text = path.read_bytes()
    except FileNotFoundError:
        raise SnapshotError(f"{snapshot} has no {MANIFEST_NAME}: it is no whole snapshot") from None
    except OSError as error:
        raise SnapshotError(f"can't read {path}: {error.strerror}") from error
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        _check_version(text, path)
        detail = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in detail["loc"]) or "the text"
        raise SnapshotError(
            f"{path} is damaged, or of another version than {MANIFEST_VERSION}: "
            f"{place}: {detail['msg']}"
        ) from error


def _check_version(text: bytes, path: Path) -> None:
    """Say who can read a manifest of another version; nothing of any other fault.

    Raises:
        OtherVersionError: It is of another version.
    """
    try:
        writer = _Writer.model_validate_json(text)
    except ValidationError:
        return
    if writer.manifest_version != MANIFEST_VERSION:
        raise OtherVersionError(
            f"{path} has manifest_version {writer.manifest_version}, this server reads "
            f"{MANIFEST_VERSION}; restore it with server version {writer.server_version}, which "
            "took it",
            writer.create_time,
        )
