"""A part of what is listed, and where the next one begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from experience_buffer import errors

T = TypeVar("T")

_DEFAULT_SIZE: Final = 100
_MOST: Final = 1000
_TOKEN: Final = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of what is listed."""

    found: Sequence[T]
    last: int | None = None
    """The number of the last that was looked at: the next page begins behind it. None: there is none."""

    @property
    def token(self) -> str:
        """What asks for the next page; empty: there is none."""
        return "" if self.last is None else str(self.last)


def page_size(asked: int) -> int:
    """How many a page may have.

    Raises:
        InvalidRequestError: Too many are asked for.
    """
    if asked > _MOST:
        raise errors.InvalidRequestError(
            f"page_size {asked} is over the limit of {_MOST}", subject="page_size"
        )
    return asked or _DEFAULT_SIZE


def number_of(token: str, first: int) -> int:
    """Behind which number a page begins; `first` where it is the first one.

    Raises:
        InvalidRequestError: No page ended with this token.
    """
    if not token:
        return first
    if not _TOKEN.fullmatch(token):
        raise errors.InvalidRequestError(
            f"page_token {token!r:.60} is not one that a page ended with", subject="page_token"
        )
    return int(token)
