"""Whether what the experiences of a push take, each alone, is in proportion to the push.

Pure. A text that experiences share travels once and is stored with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from experience_buffer.errors import InvalidRequestError
from experience_buffer.trxp import DEFAULT_LIMITS, Limits
from experience_buffer_server.admission import Candidate, Refusal


def each_alone(
    candidates: Iterable[Candidate | Refusal | None],
    *,
    pushed_bytes: int,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Candidate | Refusal | None]:
    """Pass on the candidates of one push, as long as what they share stays in proportion.

    Args:
        candidates: Made one by one as they are asked for; None takes nothing.
        pushed_bytes: Size of the payloads that they came in.
        limits: Bounds on what it may ask for.

    Raises:
        InvalidRequestError: Together they take far more than the payload; no more are made.
    """
    room = most = limits.max_alone_bytes(pushed_bytes)
    for candidate in candidates:
        room -= len(candidate.payload) if isinstance(candidate, Candidate) else 0
        if room < 0:
            raise InvalidRequestError(
                f"the experiences of this push share so much that stored each alone they take over "
                f"{most} bytes, where the payload has {pushed_bytes}; push the group in parts "
                "(the client's max_push_items), or raise server.max_message_bytes",
                subject="payload",
            )
        yield candidate
