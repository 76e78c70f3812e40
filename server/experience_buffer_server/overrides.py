"""Configured settings of buffers that are stored already: what differs, and what takes over. Pure."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.buffer_settings import BufferSettings


def differences(stored: BufferSettings, given: BufferSettings) -> dict[str, Any]:
    """The keys that a configuration gives and that a stored buffer has otherwise, with their values.

    Keys that the configuration doesn't give are left as they are stored; a table or list that it
    gives, such as `consumers`, counts as a whole.
    """
    has, wants = stored.model_dump(), given.model_dump()
    return {key: wants[key] for key in sorted(given.model_fields_set) if wants[key] != has[key]}
