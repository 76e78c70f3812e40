"""Settings of the snapshots that a server takes of its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from experience_buffer_server.consumer_settings import Section


class SnapshotsSection(Section):
    """Snapshots of the store."""

    path: Path | None = None
    """The folder that they are written to; None: snapshots are off."""
    keep: int = Field(0, ge=0)
    """How many stay; 0: all."""
    interval_seconds: float = Field(0.0, ge=0)
    """From one to the next; 0: only on request."""
    nice: int = Field(10, ge=0, le=19)
    """Of the process that takes them: 0 has the server's priority, 19 the least."""

    @field_validator("path", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        # As an environment variable that is set to nothing: not the folder that the server runs in.
        return None if value == "" else value
