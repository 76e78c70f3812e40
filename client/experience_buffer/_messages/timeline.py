"""What a trainer saves with its checkpoint to find its place in a buffer again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from experience_buffer._arguments import as_text, as_whole, pairs, refused, shown
from experience_buffer.errors import InvalidRequestError

VERSION: Final = 1


def make_state(step: int, *, buffer: str, consumer: str) -> dict[str, Any]:
    """Plain data that names a step of a consumer.

    Raises:
        InvalidRequestError: `step` is no integer.
    """
    return {
        "version": VERSION,
        "buffer": as_text("buffer", buffer),
        "consumer": as_text("consumer", consumer),
        "step": training_step(step),
    }


def read_state(state: Mapping[str, Any]) -> tuple[int, str, str]:
    """The step, buffer and consumer of what `make_state` made.

    Raises:
        InvalidRequestError: It is something else, or of a newer client.
    """
    wanted = "what state_dict returned"
    entries = dict(pairs("state", state, wanted))
    version = entries.get("version")
    if version is None:
        raise refused("state", state, wanted)
    if not isinstance(version, int) or version != VERSION:
        raise InvalidRequestError(
            f"the state has version {shown(version)}, this client reads {VERSION}: use the client "
            "that saved it, or a newer one",
            subject="version",
        )
    buffer, consumer = (
        as_text(f"{name} of the state", entries.get(name), wanted)
        for name in ("buffer", "consumer")
    )
    return training_step(entries.get("step")), buffer, consumer


def training_step(step: Any) -> int:
    """A step as a plain integer; those of numpy and torch are integers too.

    Raises:
        InvalidRequestError: It is none.
    """
    wanted = "the training step as a whole number"
    return as_whole("step", step, least=-(2**63), most=2**63 - 1, wanted=wanted)
