"""What looks like a slip of who pushes and may be meant: said in the log, once per buffer and server."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from experience_buffer_server.buffer.state.entries import Candidate

_log = logging.getLogger(__name__)


class Notices:
    """Those of one buffer. Not thread-safe."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, candidates: Iterable[Candidate], *, buffer: str, group_by: str) -> None:
        """Say what hasn't been said of experiences that are stored now."""
        for candidate in candidates:
            if candidate.trains_all and "prompt" not in self._said:
                self._say(
                    "prompt",
                    f"buffer {buffer!r}: {candidate.uid!r} has prompt_length 1 and no action_mask, or "
                    f"one of ones, so that all of its {candidate.response_tokens + 1} tokens but the "
                    "first are trained on; if its prompt is longer, push it with prompt_length, or as "
                    "Experience(prompt=..., response=...)",
                )
            is_of_batch = candidate.eid.task == "" and group_by in ("task", "step")
            if is_of_batch and "task" not in self._said:
                self._say(
                    "task",
                    f"buffer {buffer!r}: {candidate.uid!r} has a batch and no task, so that all of its "
                    "batch are compared as answers to one prompt; if they aren't, set EID(task=...)",
                )

    def _say(self, what: str, text: str) -> None:
        self._said.add(what)
        _log.warning("%s. This is said once per buffer", text)
