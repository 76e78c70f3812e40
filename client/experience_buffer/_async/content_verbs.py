"""The async client's verbs about stored experiences and their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experience_buffer._arguments import as_flag, as_words
from experience_buffer._async.connection import AsyncConnection
from experience_buffer._async.listing import AsyncSummaries
from experience_buffer._async.primitives import in_thread
from experience_buffer._messages import annotate as _annotate
from experience_buffer._messages import calls, convert
from experience_buffer._messages.calls import Call, number
from experience_buffer._transport.retry import Deadline
from experience_buffer.outcomes import AnnotateOutcome, AnnotateResult
from experience_buffer.values import (
    DeleteResult,
    ExperienceState,
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
        """Read one experience.

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
        tid: str = "",
        rid: str = "",
        sid: str = "",
        state: ExperienceState | None = None,
        page_size: int = 100,
    ) -> AsyncSummaries:
        """Iterate over summaries of stored experiences, oldest first, fetching page by page.

        A notebook that shows what this returns shows the first page as a table.

        Args:
            buffer: The buffer's name.
            tid: Only those of this task.
            rid: Only those of this run.
            sid: Only those of this step.
            state: Only those in this state, one of those of `ExperienceSummary`.
            page_size: Summaries per call, at most 1,000.
        """
        where = calls.make_filter(tid=tid, rid=rid, sid=sid, state=state)
        request: dict[str, Any] = {"buffer": buffer, "filter": where, "page_size": page_size}
        calls.call_of("List", convert.page, **request)  # Checks them here, not where it iterates.
        return AsyncSummaries(self, **request)

    async def delete(
        self,
        uids: str | Sequence[str] | None = None,
        *,
        buffer: str = "default",
        tid: str = "",
        rid: str = "",
        sid: str = "",
        state: ExperienceState | None = None,
    ) -> DeleteResult:
        """Remove experiences that aren't leased, by uids (at most 10,000) or by keys and state.

        Args:
            uids: Which, or one alone; None: those that the keys and the state below name.
            buffer: The buffer's name.
            tid: Only those of this task.
            rid: Only those of this run.
            sid: Only those of this step.
            state: Only those in this state, one of those of `ExperienceSummary`.

        Raises:
            InvalidRequestError: Both uids and keys, or neither, are given.
        """
        where = calls.make_filter(tid=tid, rid=rid, sid=sid, state=state)
        call = calls.delete(uids, buffer=buffer, where=where)
        return await self._run(call) if call else calls.NOTHING_DELETED
