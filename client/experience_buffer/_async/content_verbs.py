"""The async client's verbs about stored experiences and their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from experience_buffer._arguments import as_flag, as_text, as_words
from experience_buffer._async.connection import AsyncConnection
from experience_buffer._async.listing import AsyncPages
from experience_buffer._async.primitives import in_thread
from experience_buffer._async.scanning import AsyncScan
from experience_buffer._messages import annotate as _annotate
from experience_buffer._messages import calls, convert
from experience_buffer._messages.calls import Call, number
from experience_buffer._messages.filters import filter_of, group_states
from experience_buffer._messages.names import GROUP_ORDER
from experience_buffer._messages.timeline import training_step
from experience_buffer._transport.retry import Deadline
from experience_buffer.looking import GroupInfo, GroupOrder, GroupState, Where
from experience_buffer.outcomes import AnnotateOutcome, AnnotateResult
from experience_buffer.values import (
    DeleteResult,
    ExperienceSummary,
    SealedGroup,
    StoredExperience,
)


class AsyncContentVerbs(AsyncConnection):
    """Verbs about what is stored."""

    async def seal_group(
        self, group: str, *, buffer: str = "default", group_size: int = 0
    ) -> SealedGroup:
        """Say that a group gets no more members than stated, or than it has now.

        Args:
            group: The group's key, such as `experience.eid.tid` in a buffer grouped by task.
            buffer: The buffer's name.
            group_size: Members that make it whole; 0: those that it has now.

        Raises:
            GroupNotFoundError: The buffer knows no such group.
        """
        parse = convert.reader_of(SealedGroup)
        return await self._call(
            "SealGroup", parse, buffer=buffer, group=group, group_size=group_size
        )

    async def drop_group(self, group: str, *, buffer: str = "default", reason: str = "") -> int:
        """Discard the newest group of a key, whose task was aborted; how many experiences go.

        None go where none has come yet: those that come later are refused all the same, unless the
        buffer's `late_members` lets them open a new group.

        Args:
            group: The group's key, such as `experience.eid.tid` in a buffer grouped by task.
            buffer: The buffer's name.
            reason: Why; the server logs it.

        Raises:
            InvalidRequestError: No group can have this key.
        """
        parse = number("num_dropped")
        reason = as_words("reason", reason)
        return await self._call("DropGroup", parse, buffer=buffer, group=group, reason=reason)

    async def get(self, uid: str, *, buffer: str = "default") -> StoredExperience:
        """Read one experience, stored or archived.

        Args:
            uid: Its name, such as `experience.eid.uid`.
            buffer: The buffer's name.

        Raises:
            ExperienceNotFoundError: It isn't there.
            DataLossError: Its record is damaged.
        """
        return await self._call("Get", convert.stored, buffer=buffer, uid=uid)

    async def annotate(
        self,
        annotations: Mapping[str, Mapping[str, Any]],
        *,
        buffer: str = "default",
        raise_on_refused: bool = True,
        timeout: float | None = None,
    ) -> AnnotateResult:
        """Add fields that came late to stored experiences; what depends on them is computed again.

        Returns when all are durable. Idempotent; many go in several requests, and after an error
        what was sent before is stored.

        Args:
            annotations: By uid what is added, by the names that `Experience` has for it:
                `reward`, `baseline_reward`, `env_state_hash` and `num_turns` as values; `values`,
                `ref_logprobs` and other tensors as lists (float32; `versions` int64), arrays or
                tensors of any dtype. Other numbers and texts become entries of `info`, as
                everything in `info` does, a dict of plain data. Names that look like a slip of
                one of these are refused.
            buffer: The buffer's name.
            raise_on_refused: False: return refused ones in the result instead of raising.
            timeout: Seconds for all of it, retries included; None: the client's.

        Returns:
            One outcome per annotation, in order.

        Raises:
            InvalidRequestError: An annotation holds what can't be sent; none is stored then.
            AnnotateRefusedError: The server refused some; all others are stored.
            MessageTooLargeError: One annotation is over the message limit.
        """
        as_flag("raise_on_refused", raise_on_refused)
        deadline = Deadline(self._seconds(timeout))
        outcomes: list[AnnotateOutcome] = []
        requests = await in_thread(
            _annotate.requests, annotations, buffer=buffer, options=self._options
        )
        for request in requests:
            call = Call("Annotate", request, convert.annotate_outcomes)
            answer = await self._run(call, deadline.remaining())
            outcomes += answer
        result = AnnotateResult(outcomes=tuple(outcomes))
        if raise_on_refused:
            result.raise_for_refused()
        return result

    def list(
        self,
        *,
        buffer: str = "default",
        newest_first: bool = False,
        archived: bool = False,
        page_size: int = 100,
        **where: Unpack[Where],
    ) -> AsyncPages[ExperienceSummary]:
        """Iterate over summaries of stored experiences, oldest first, fetching page by page.

        Nothing is consumed by it. A notebook that shows what this returns shows the first page as a
        table. What is pushed or leaves meanwhile neither doubles nor hides the others.

        Args:
            buffer: The buffer's name.
            newest_first: True: the other way round.
            archived: True: what has left and is archived, the newest first, in place of what is stored.
            page_size: Summaries per call, at most 1,000.
            **where: Which, by the fields of `Where`, such as `state="leased"` or
                `reward=(None, 0.0)`; all that is given has to hold.
        """
        return AsyncPages(
            self,
            "List",
            convert.page,
            buffer=buffer,
            filter=filter_of(where),
            newest_first=newest_first,
            archived=archived,
            page_size=page_size,
        )

    def scan(
        self,
        *,
        buffer: str = "default",
        cursor: str = "",
        with_payloads: bool = True,
        **where: Unpack[Where],
    ) -> AsyncScan:
        """Iterate over stored experiences with their payloads, oldest first, without consuming them.

        For exports and analyses: no consumer is needed, none is held up, and what is stored stays.
        What is pushed after it has begun isn't among it; what leaves meanwhile may be missing. It
        goes on where it was when the connection breaks, and by `cursor` on another day.

        Args:
            buffer: The buffer's name.
            cursor: Go on after it: that of an experience, or of an earlier scan; empty: from the
                beginning.
            with_payloads: False: everything but payloads and what was computed per token.
            **where: Which, by the fields of `Where`; all that is given has to hold.

        Raises:
            InvalidRequestError: A filter can't be.
        """
        return AsyncScan(
            self,
            buffer=as_text("buffer", buffer),
            cursor=as_text("cursor", cursor),
            where=filter_of(where),
            with_payloads=as_flag("with_payloads", with_payloads),
        )

    def scan_step(
        self, step: int, consumer: str = "trainer", *, buffer: str = "default"
    ) -> AsyncScan:
        """Iterate over what a training step has consumed, in the order in which it was delivered.

        As far as it is kept: until the step is declared safe, or as long as others haven't consumed it,
        and afterwards as long as it is archived. Each says its `lease_id`, and which `unit` of that delivery it belongs to.

        Args:
            step: The training step, as acknowledged.
            consumer: Who acknowledged it.
            buffer: The buffer's name.

        Raises:
            InvalidRequestError: `step` is no step that an ack can say.
            ConsumerNotFoundError: The buffer has no such consumer; raised where it iterates.
        """
        return AsyncScan(
            self,
            buffer=as_text("buffer", buffer),
            cursor="",
            where=filter_of(
                {"step": training_step(step), "consumer": as_text("consumer", consumer)}
            ),
            with_payloads=True,
            delivered=True,
        )

    async def delete(
        self,
        uids: str | Sequence[str] | None = None,
        *,
        buffer: str = "default",
        **where: Unpack[Where],
    ) -> DeleteResult:
        """Remove experiences that aren't leased, by uids (at most 10,000) or by what they are.

        Args:
            uids: Which, or one alone; None: those that `where` names.
            buffer: The buffer's name.
            **where: Which, by the fields of `Where`; all that is given has to hold.

        Raises:
            InvalidRequestError: Both uids and something else, or neither, are given.
        """
        call = calls.delete(uids, buffer=buffer, where=filter_of(where))
        return await self._run(call) if call else calls.NOTHING_DELETED

    def list_groups(
        self,
        *,
        buffer: str = "default",
        state: GroupState | Sequence[GroupState] | None = None,
        prefix: str = "",
        order: GroupOrder = "stuck",
        page_size: int = 100,
    ) -> AsyncPages[GroupInfo]:
        """Iterate over groups with their members, fetching page by page.

        Args:
            buffer: The buffer's name.
            state: Only those in this state, or in one of these, of those of `GroupInfo`.
            prefix: Only those whose key begins so.
            order: "stuck": those that can't be delivered first, the oldest of them first, then the
                others, oldest first; "oldest"; "newest"; or "key".
            page_size: Groups per call, at most 1,000.
        """
        return AsyncPages(
            self,
            "ListGroups",
            convert.page_of("groups"),
            buffer=buffer,
            states=group_states(state),
            prefix=prefix,
            order=GROUP_ORDER.number(order, "order"),
            page_size=page_size,
        )

    async def get_group(self, group: str, *, buffer: str = "default") -> GroupInfo:
        """Read one group, with the advantages of its members and how they were computed.

        Args:
            group: The group's key, such as `experience.eid.tid` in a buffer grouped by task; of
                several, the newest.
            buffer: The buffer's name.

        Raises:
            GroupNotFoundError: The buffer holds no member of such a group.
        """
        return await self._call("GetGroup", convert.group, buffer=buffer, group=group)
