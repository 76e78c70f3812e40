"""The tokens of an experience as columns: a window of them, or the whole in a few hundred points.

Legend: N tokens of the part that is looked at, W of the window, B points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from experience_buffer import errors
from experience_buffer._codec.item import Item
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense.arrays import array_of
from experience_buffer._show import Shown
from experience_buffer_server.web.inside.texts import Texts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

Part: TypeAlias = Literal["response", "prompt", "all", "chosen", "rejected"]
MOST_TOKENS: Final = 4096
MOST_POINTS: Final = 4096
_COLUMNS: Final = (
    *("logprobs", "advantages", "returns", "values", "ref_logprobs", "teacher_logprobs"),
    *("token_level_reward", "versions"),
)
"""Tensors with one number for each token of the response."""
_WHOLE: Final = frozenset(("versions",))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scale(Shown):
    """Between what the numbers of a column lie, over all tokens that train: for one scale of colours.

    Attributes:
        min: The least; null where there is no finite one.
        max: The greatest; null where there is no finite one.
        mean: Their mean; null where there is no finite one.
    """

    min: float | None
    max: float | None
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TokenColumns(Shown):
    """A window of the tokens of an experience; each column has an entry per token.

    Attributes:
        part: Which tokens: "response", "prompt", "all" (prompt, then response), "chosen" or
            "rejected".
        num_tokens: Tokens of that part.
        num_prompt_tokens: Tokens of the prompt.
        start: The window's first token, counted from the part's beginning.
        ids: Token ids.
        texts: What each token reads, where the server has a tokenizer, else null. A character of several
            tokens stands at the last of them.
        mask: Whether each token trains; null where nothing says so.
        columns: By name, such as "advantages": a number per token, or null where it has none.
        scales: By the same names, over the whole response.
    """

    part: str
    num_tokens: int
    num_prompt_tokens: int
    start: int
    ids: tuple[int, ...]
    texts: tuple[str, ...] | None
    mask: tuple[bool | None, ...] | None
    columns: dict[str, Any]
    scales: dict[str, Scale]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TokenOverview(Shown):
    """A whole response in a bounded number of points, each of about as many tokens.

    Attributes:
        num_tokens: Tokens of the response.
        starts: The first token of each point.
        mask: The part of each point's tokens that trains, 0 to 1.
        columns: By name, such as "advantages": of each point the number farthest from zero among those
            that train; null where none has one.
        scales: By the same names, over the whole response.
    """

    num_tokens: int
    starts: tuple[int, ...]
    mask: tuple[float, ...]
    columns: dict[str, Any]
    scales: dict[str, Scale]


class _Tokens:
    """The arrays of one experience."""

    def __init__(self, item: Item) -> None:
        self.ids_N = _ids(item.tensors.get("tokens"))
        length = int(item.meta.get("prompt_length", 0))
        self.num_prompt = min(max(length, 0), len(self.ids_N))
        self.num_response = len(self.ids_N) - self.num_prompt
        self.columns: dict[str, Array] = {}
        for name in _COLUMNS:
            view = item.tensors.get(name)
            if view is not None and len(view.shape) == 1:
                numbers = _numbers(view, is_whole=name in _WHOLE)[: self.num_response]
                if len(numbers):
                    self.columns[name] = numbers
        mask = item.tensors.get("action_mask")
        self.mask_N: Array | None = None
        if mask is not None and len(mask.shape) == 1:
            self.mask_N = _numbers(mask)[: self.num_response] != 0

    def scales(self) -> dict[str, Scale]:
        return {name: _scale(numbers, self.mask_N) for name, numbers in self.columns.items()}


def window(item: Item, part: Part, start: int, count: int, texts: Texts | None) -> TokenColumns:
    """A window of tokens.

    Args:
        item: The experience as it lies in its payload.
        part: Which of its tokens.
        start: The first one, from the part's beginning.
        count: At most so many, and at most `MOST_TOKENS`.
        texts: The tokenizer; None: there is none.

    Raises:
        InvalidRequestError: The window begins behind the last token.
    """
    tokens = _Tokens(item)
    begin, end = 0, len(tokens.ids_N)
    if part == "prompt":
        end = tokens.num_prompt
    elif part == "response":
        begin = tokens.num_prompt
    ids_N = tokens.ids_N[begin:end]
    if part in ("chosen", "rejected"):
        ids_N, begin = _ids(item.tensors.get(part)), 0
    if start > len(ids_N):
        raise errors.InvalidRequestError(
            f"start {start} is behind the last of {len(ids_N)} tokens of the {part}",
            subject="start",
        )
    ids_W = ids_N[start : start + min(count, MOST_TOKENS)].tolist()
    has_columns = part in ("response", "all")
    first = begin + start - tokens.num_prompt
    columns = {
        name: _cut(numbers, first, len(ids_W))
        for name, numbers in (tokens.columns.items() if has_columns else ())
    }
    mask = None
    if has_columns and tokens.mask_N is not None:
        mask = tuple(_cut(tokens.mask_N, first, len(ids_W)))
    return TokenColumns(
        part=part,
        num_tokens=len(ids_N),
        num_prompt_tokens=tokens.num_prompt,
        start=start,
        ids=tuple(ids_W),
        texts=None if texts is None else tuple(texts.of(ids_W)),
        mask=mask,
        columns=columns,
        scales=tokens.scales() if has_columns else {},
    )


def overview(item: Item, points: int) -> TokenOverview:
    """A whole response in at most so many points."""
    import numpy as np

    tokens = _Tokens(item)
    num_tokens = tokens.num_response
    num_points = min(points, MOST_POINTS, num_tokens)
    edges_B = np.linspace(0, num_tokens, num_points + 1).astype(np.int64)
    starts_B = edges_B[:-1]
    trains_N = np.ones(num_tokens, bool)
    if tokens.mask_N is not None:
        trains_N[:] = False
        trains_N[: len(tokens.mask_N)] = tokens.mask_N
    columns: dict[str, Any] = {}
    for name, numbers in tokens.columns.items() if num_points else ():
        found_N = np.full(num_tokens, np.nan)
        found_N[: len(numbers)] = numbers
        found_N[~trains_N] = np.nan
        highest_B = np.fmax.reduceat(found_N, starts_B)
        lowest_B = np.fmin.reduceat(found_N, starts_B)
        farthest_B = np.where(np.abs(highest_B) >= np.abs(lowest_B), highest_B, lowest_B)
        columns[name] = _plain(farthest_B)
    share_B = np.add.reduceat(trains_N, starts_B) / np.diff(edges_B) if num_points else starts_B
    return TokenOverview(
        num_tokens=num_tokens,
        starts=tuple(starts_B.tolist()),
        mask=tuple(np.round(share_B, 4).tolist()),
        columns=columns,
        scales=tokens.scales(),
    )


def _ids(view: TensorView | None) -> Array:
    import numpy as np

    if view is None:
        return np.zeros(0, np.int64)
    return _numbers(view, is_whole=True)


def _numbers(view: TensorView, *, is_whole: bool = False) -> Array:
    """A tensor's elements in one row: as float64, or as they are."""
    import numpy as np

    if view.dtype == "BF16":
        raw = np.frombuffer(view.data, np.uint16).astype(np.uint32) << 16
        return raw.view(np.float32).astype(np.float64)
    try:
        found = array_of(view).reshape(-1)
    except TypeError:
        return np.zeros(0)
    if found.dtype.kind == "c":
        return np.zeros(0)
    return found if is_whole or found.dtype.kind == "b" else found.astype(np.float64)


def _scale(numbers: Array, mask_N: Array | None) -> Scale:
    import numpy as np

    if mask_N is not None:
        length = min(len(mask_N), len(numbers))
        numbers = numbers[:length][mask_N[:length]]
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return Scale(min=None, max=None, mean=None)
    lowest, highest, mean = map(_short, (numbers.min(), numbers.max(), numbers.mean()))
    return Scale(min=lowest, max=highest, mean=mean)


def _short(number: float) -> float:
    """Six digits: nobody reads more of a float32, and they are half of an answer."""
    return float(f"{number:.6g}")


def _cut(numbers: Array, first: int, count: int) -> list[Any]:
    """So many entries from a place of the response on; None where it has none."""
    before = [None] * min(max(-first, 0), count)
    inside = _plain(numbers[max(first, 0) : max(first + count, 0)])
    return [*before, *inside, *[None] * (count - len(before) - len(inside))]


def _plain(numbers: Array) -> list[Any]:
    """As Python's; NaN, which says that there is none, as None."""
    import numpy as np

    if numbers.dtype.kind != "f":
        found: list[Any] = numbers.tolist()
        return found
    if numbers.dtype == np.float64:
        numbers = np.array([_short(value) for value in numbers.tolist()])
    return [None if value != value else value for value in numbers.tolist()]
