"""What a trainer saves with its checkpoint to find its place in a buffer again. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

from experience_buffer._arguments import refused
from experience_buffer.errors import InvalidRequestError

VERSION: Final = 1
_TEXTS: Final = ("buffer", "consumer")


def make_state(step: int, *, buffer: str, consumer: str) -> dict[str, Any]:
    """Plain data that names a step of a consumer.

    Raises:
        InvalidRequestError: `step` is no integer.
    """
    return {"version": VERSION, "buffer": buffer, "consumer": consumer, "step": _index(step)}


def read_state(state: Mapping[str, Any]) -> tuple[int, str, str]:
    """The step, buffer and consumer of what `make_state` made.

    Raises:
        InvalidRequestError: It is something else, or of a newer client.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise refused("state", state, "what state_dict returned")
    if state["version"] != VERSION:
        raise InvalidRequestError(
            f"the state has version {state['version']!r:.200}, this client reads {VERSION}: use "
            "the client that saved it, or a newer one",
            subject="version",
        )
    for name in _TEXTS:
        if not isinstance(state.get(name), str):
            raise InvalidRequestError(
                f"{name} of the state is {state.get(name)!r:.200}; give what state_dict returned",
                subject=name,
            )
    return _index(state.get("step")), state["buffer"], state["consumer"]


def _index(step: Any) -> int:
    """A step as a plain integer; those of numpy and torch are integers too."""
    try:
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)
    except TypeError:
        raise refused("step", step, "the training step as a whole number") from None
