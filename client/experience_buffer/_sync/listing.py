# Generated from _async/listing.py by scripts/generate_sync.py; edit that file.
"""What the sync client lists, as an iterator that fetches page by page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from experience_buffer._messages.calls import call_of
from experience_buffer._show import html_lines, html_of_values
from experience_buffer._sync.primitives import peek
from experience_buffer.errors import ExperienceBufferError

if TYPE_CHECKING:
    from experience_buffer._sync.connection import Connection

T = TypeVar("T")


class Pages(Generic[T]):
    """What a server lists, as an iterator that fetches page by page.

    What is added or leaves meanwhile neither doubles nor hides the others. A notebook shows those that
    were fetched and come next, as a table. One at a time iterates.
    """

    def __init__(
        self,
        client: Connection,
        method: str,
        read: Callable[[Any], tuple[tuple[T, ...], str]],
        **request: Any,
    ) -> None:
        call_of(method, read, **request)  # Checks the request here, not where it iterates.
        self._client = client
        self._method = method
        self._read = read
        self._request = request
        self._ready: deque[T] = deque()
        self._token = ""
        self._has_more = True

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next one, from the next page where need be.

        Raises:
            StopIteration: There are no more.
        """
        while self._has_more and not self._ready:
            self._fetch()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _fetch(self) -> None:
        page, self._token = self._client._call(
            self._method, self._read, page_token=self._token, **self._request
        )
        self._ready += page
        self._has_more = bool(self._token)

    def __repr__(self) -> str:
        more = ", more to fetch" if self._has_more else ""
        return (
            f"<{type(self).__name__} of {self._request['buffer']!r} at {self._client.address}: "
            f"{len(self._ready)} fetched{more}>"
        )

    def _repr_html_(self) -> str:
        try:
            if self._has_more and not self._ready:
                peek(self._fetch)
        except ExperienceBufferError as error:
            return html_lines([str(error)])
        return html_lines([repr(self)]) + html_of_values(tuple(self._ready))
