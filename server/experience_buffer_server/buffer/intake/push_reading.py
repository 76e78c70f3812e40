"""Reading a push: what its items are, which of them are new, and where these would go.

Nothing is changed here. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, starmap
from typing import NamedTuple

from experience_buffer import errors
from experience_buffer.eid import EID
from experience_buffer.errors import InvalidRequestError
from experience_buffer.trxp import DEFAULT_LIMITS, Limits
from experience_buffer_server.buffer.intake.admission import PayloadReader, entomb
from experience_buffer_server.buffer.intake.placement import Forecast, forecast
from experience_buffer_server.buffer.intake.repeats import Repeats, difference_of, was_the_same
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Candidate, Entry, Reason, Refusal
from experience_buffer_server.buffer.state.group_keys import group_key, key_problem
from experience_buffer_server.runtime.loop_turns import Turn
from experience_buffer_server.settings.buffer import BufferSettings


class PushStatus(StrEnum):
    """What became of one item; the wire has the same names."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


class Outcome(NamedTuple):
    """What became of one pushed experience or tombstone."""

    uid: str
    status: PushStatus
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One request."""

    payloads: Sequence[bytes | memoryview] = ()
    """TRXP; the experiences of one follow those of the one before."""
    tombstones: Sequence[tuple[EID, str]] = ()
    """Failed rollouts: identity and reason."""
    group_size: int = 0
    is_lent: bool = False
    """Whether the sender can still change the payloads."""

    @property
    def num_bytes(self) -> int:
        """Size of all payloads."""
        return sum(map(len, self.payloads))


@dataclass(frozen=True, slots=True)
class Admitted:
    """A push that was read, each of its experiences for itself."""

    candidates: list[Candidate | Refusal]
    settings: BufferSettings
    """The buffer's, by which they were admitted."""
    published: int | None
    """The policy version that was published then."""


@dataclass(slots=True)
class Arrived:
    """A push that was read and compared with what is known."""

    outcomes: list[Outcome | None]
    """One per item; None for what is new."""
    repeats: dict[int, int]
    """Items that repeat an earlier one of the push, whose fate they share."""
    forecast: Forecast
    """What is new, and where it would go."""

    @property
    def fresh(self) -> Sequence[tuple[int, Candidate]]:
        """What is new, with its index."""
        return self.forecast.fresh


class Reading:
    """Reads the pushes of one buffer. Not thread-safe."""

    def __init__(self, state: BufferState, payloads: PayloadReader) -> None:
        self._state = state
        self._payloads = payloads
        self._max_items = state.limits.max_push_items
        self._repeats = Repeats(state)
        self._pending: dict[int, Sequence[tuple[int, Candidate]]] = {}
        """What came with pushes that are on their way to the disk: it can't be read back yet."""

    def begin(self, entries: Sequence[Entry], fresh: Sequence[tuple[int, Candidate]]) -> None:
        """Entries are on their way to the disk, made of some of these; `end` follows."""
        self._pending[id(entries)] = fresh

    def end(self, entries: Sequence[Entry]) -> None:
        """They are there, or couldn't be stored."""
        self._pending.pop(id(entries), None)

    async def admit(self, push: Push, turn: Turn) -> Admitted:
        """Read a push, a slice at a time.

        Args:
            push: The request.
            turn: The caller's, which pauses between the slices.

        Raises:
            TrxpError: A payload as a whole can't be read.
            InvalidRequestError: More items, or payloads, than a push may hold.
        """
        settings, published = self._state.settings, self._state.row.policy_version
        candidates = []
        for candidate in self._candidates(push):
            if candidate is not None:
                candidates.append(candidate)
            if turn.is_long:
                await turn.pause()
        if self._state.store.reads_wait:
            await self._have_remembered(candidates)
        by_uid = self._state.contents.by_uid
        for candidate in candidates:
            # Of what is new, nothing is asked but this.
            if by_uid(candidate.uid) is None or isinstance(candidate, Refusal):
                continue
            if await self._repeats.look(candidate) and turn.is_long:
                await turn.pause()
        return Admitted(candidates, settings, published)

    async def _have_remembered(self, candidates: Iterable[Candidate | Refusal]) -> None:
        """Have at hand what `read`, and who places what is new, will ask whether it is remembered."""
        group_by = self._state.settings.group_by
        keys: dict[tuple[str, str], None] = {}
        for candidate in candidates:
            if isinstance(candidate, Candidate):
                keys["uid", candidate.uid] = None
                if group_by != "none":
                    keys["group", group_key(candidate.eid, group_by)] = None
        await self._state.store.at_hand(self._state.id, remembered=keys)

    def read(self, push: Push, admitted: Admitted | None = None) -> Arrived:
        """See what of a push is new.

        Args:
            push: The request.
            admitted: What `admit` made of it, for which the rules may have changed since then; None:
                it is admitted now.

        Raises:
            TrxpError: A payload as a whole can't be read.
            InvalidRequestError: More items, or payloads, than a push may hold.
        """
        if (
            admitted is None
            or admitted.settings is not self._state.settings
            or admitted.published != self._state.row.policy_version
        ):
            candidates = [one for one in self._candidates(push) if one is not None]
        else:
            candidates = admitted.candidates
        outcomes, repeats, fresh = self._compared(candidates)
        return Arrived(outcomes, repeats, forecast(self._state, fresh, push.group_size))

    def _candidates(self, push: Push) -> Iterator[Candidate | Refusal | None]:
        """What the push holds; None: a payload was read in which nothing is, which takes time, too."""
        admitted = self._admitted(push)
        found = chain(
            each_alone(admitted, pushed_bytes=push.num_bytes, limits=self._payloads.limits),
            starmap(entomb, push.tombstones),
        )
        group_by = self._state.settings.group_by
        return map(_without_tombstone, found) if group_by == "none" else _of_groups(found, group_by)

    def _admitted(self, push: Push) -> Iterator[Candidate | Refusal | None]:
        """What all payloads hold, each experience at the gate as soon as its payload is read.

        So what was read of one goes before the next is read: a push may hold hundreds of them.
        """
        settings, published = self._state.settings, self._state.row.policy_version
        # A payload takes time to read even where nothing is in it.
        self.check_count(len(push.payloads), "payloads")
        count = len(push.tombstones)
        self.check_count(count, "experiences")
        for payload in push.payloads:
            num_items, candidates = self._payloads.read(
                payload, settings, published=published, is_lent=push.is_lent
            )
            count += num_items
            self.check_count(count, "experiences")
            yield from candidates if num_items else (None,)

    def check(self, *, num_tombstones: int, group_size: int) -> None:
        """Refuse a push before anything is made of it.

        An empty tombstone takes two bytes on the wire, and far more time and memory from then on.

        Raises:
            InvalidRequestError: More items than a push may hold, or a size that no group may have.
        """
        if problem := self._state.settings.group_size_problem(group_size):
            raise errors.InvalidRequestError(problem, subject="group_size")
        self.check_count(num_tombstones, "experiences")

    def check_count(self, count: int, what: str) -> None:
        """Refuse more than a push may hold.

        Raises:
            InvalidRequestError: More.
        """
        if count > self._max_items:
            raise errors.InvalidRequestError(
                f"{count} {what} in one push, the limit server.max_push_items is "
                f"{self._max_items}; split the push",
                subject="payload",
            )

    def _compared(
        self, candidates: Sequence[Candidate | Refusal]
    ) -> tuple[list[Outcome | None], dict[int, int], list[tuple[int, Candidate]]]:
        """Tell refusals, repeats and conflicts from what is new."""
        uids = [candidate.uid for candidate in candidates if isinstance(candidate, Candidate)]
        remembered = iter(self._state.store.recall(self._state.id, "uid", uids))
        most_bytes = self._state.settings.max_bytes
        in_this_push: dict[str, tuple[int, Candidate]] = {}
        outcomes: list[Outcome | None] = []
        repeats: dict[int, int] = {}
        fresh: list[tuple[int, Candidate]] = []
        for index, candidate in enumerate(candidates):
            uid = candidate.uid
            if isinstance(candidate, Refusal):
                refused = Outcome(uid, PushStatus.REFUSED, candidate.reason, candidate.message)
                outcomes.append(refused)
                continue
            entry, past = self._state.contents.by_uid(uid), next(remembered)
            first, first_candidate = in_this_push.setdefault(uid, (index, candidate))
            if entry is not None:
                differs = self._difference(entry, candidate)
                outcomes.append(_repeated(uid, "is stored", differs))
            elif past is not None:
                is_same = was_the_same(past, candidate)
                differs = "" if is_same else "other bytes, whose fields are not kept"
                outcomes.append(_repeated(uid, "was consumed", differs))
            elif first != index:
                differs = difference_of(first_candidate, candidate)
                outcomes.append(_repeated(uid, "is in this push", differs))
                if not differs:
                    repeats[index] = first
            elif len(candidate.payload) > most_bytes:
                message = (
                    f"uid {uid!r}: its payload of {len(candidate.payload)} bytes is over max_bytes = "
                    f"{most_bytes} of the buffer, alone; shorten it, or raise max_bytes"
                )
                outcomes.append(Outcome(uid, PushStatus.REFUSED, Reason.INVALID, message))
            else:
                outcomes.append(None)
                fresh.append((index, candidate))
        return outcomes, repeats, fresh

    def _difference(self, entry: Entry, candidate: Candidate) -> str:
        """What a candidate has otherwise than what is here under its uid, in words; or empty."""
        if entry.record.digest == candidate.digest:
            return ""
        if entry.durable:
            return self._repeats.difference(entry, candidate)
        came = (one for fresh in self._pending.values() for _, one in fresh)
        return difference_of(next(one for one in came if one.uid == candidate.uid), candidate)


def _repeated(uid: str, where: str, differs: str) -> Outcome:
    """What becomes of what is known already: a duplicate, or a conflict that says what differs."""
    if not differs:
        return Outcome(uid, PushStatus.DUPLICATE)
    message = (
        f"uid {uid!r} {where} with other content ({differs}); give the experience its own suffix"
    )
    return Outcome(uid, PushStatus.REFUSED, Reason.CONFLICT, message)


def _without_tombstone(candidate: Candidate | Refusal | None) -> Candidate | Refusal | None:
    """In a buffer without groups a tombstone has nothing to complete and would never leave."""
    if not isinstance(candidate, Candidate) or not candidate.tombstone:
        return candidate
    return Refusal(
        Reason.INVALID,
        f"a tombstone ({candidate.note}) completes its group, but this buffer has group_by = "
        '"none"; leave it out',
        candidate.uid,
    )


def _of_groups(
    found: Iterable[Candidate | Refusal | None], group_by: str
) -> Iterator[Candidate | Refusal | None]:
    """Refuse what no group could be told of."""
    for candidate in found:
        if isinstance(candidate, Candidate) and (problem := key_problem(candidate.eid, group_by)):
            yield Refusal(Reason.INVALID, problem, candidate.uid)
        else:
            yield candidate


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
