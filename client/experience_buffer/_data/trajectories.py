"""Joining padded trajectories of different widths into one batch, and taking it apart again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from experience_buffer._packed.exact import holds

Field: TypeAlias = Tensor | list[Any]
_MASK: Final = "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLayout:
    """Where each trajectory is in a batch; what `split` needs to undo `concat`.

    Attributes:
        rows: Number of rows of each trajectory.
        widths: Padded width of each trajectory before it was joined.
        token_fields: Fields with one column per token: padded by `concat`, cut by `split`.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    token_fields: frozenset[str]

    @property
    def num_rows(self) -> int:
        """B, the rows of the batch."""
        return sum(self.rows)

    @property
    def width(self) -> int:
        """W, the padded width of the batch."""
        return max(self.widths)


def concat(
    trajectories: Sequence[Mapping[str, Field]], *, pad_values: Mapping[str, float] | None = None
) -> tuple[dict[str, Field], TrajectoryLayout]:
    """Join padded trajectories of different widths into one batch, padded on the right.

    A field whose second dimension is the trajectory's width, in all trajectories, has a column per
    token and is padded to the widest; other fields are joined as they are.

    Args:
        trajectories: Each of any number of rows b and width w: `attention_mask` of shape [b, w],
            and the same fields in all of them, tensors of shape [b, w, ...] or [b, ...], or
            lists of one value per row.
        pad_values: What to fill fields with, by name; 0 or False unless named.

    Returns:
        The batch, its tensors of shape [B, W, ...] or [B, ...] in their own dtypes, and its layout.

    Raises:
        ValueError: There are no trajectories or no `attention_mask`, fields, shapes, dtypes or
            devices differ, or a padding value names no field with a column per token.

    Source: AReaL `concat_batch`.
    """
    if not trajectories:
        raise ValueError("there are no trajectories; give at least one")
    layout = _layout(trajectories)
    pad_values = pad_values or {}
    if unknown := set(pad_values) - layout.token_fields:
        raise ValueError(
            f"pad_values names {sorted(unknown)}; fields with a column per token are "
            f"{sorted(layout.token_fields)}"
        )
    batch = {
        name: _join(name, [each[name] for each in trajectories], layout, pad_values.get(name, 0))
        for name in trajectories[0]
    }
    return batch, layout


def split(
    batch: Mapping[str, Field], layout: TrajectoryLayout, *, token_fields: Collection[str] = ()
) -> list[dict[str, Field]]:
    """Take a batch apart into the trajectories that `concat` joined, exactly.

    Rows and widths come from the layout, never from masks, so zeros inside a mask lose nothing.
    The batch may have lost fields since, and gained others.

    Args:
        batch: Fields of B rows each.
        layout: What `concat` returned.
        token_fields: New fields with a column per token (say `advantages`), to be cut too. A new
            field that isn't named keeps its shape.

    Returns:
        One dict per trajectory; tensors are views on the batch's.

    Raises:
        ValueError: A field hasn't B rows, or one with a column per token hasn't W columns.

    Source: AReaL `split_batch`.
    """
    cut = layout.token_fields.union(token_fields)
    for name, value in batch.items():
        if len(value) != layout.num_rows:
            raise ValueError(f"{name} has {len(value)} rows; the layout has {layout.num_rows}")
        if name in cut and _columns(value) != layout.width:
            raise ValueError(
                f"{name} has {_columns(value)} columns; the layout has {layout.width} tokens"
            )
    return [
        {
            name: value[start:stop, :width]
            if isinstance(value, Tensor) and name in cut
            else value[start:stop]
            for name, value in batch.items()
        }
        for (start, stop), width in zip(_bounds(layout), layout.widths, strict=True)
    ]


def _layout(trajectories: Sequence[Mapping[str, Field]]) -> TrajectoryLayout:
    names = set(trajectories[0])
    rows, widths = [], []
    for index, trajectory in enumerate(trajectories):
        mask = trajectory.get(_MASK)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError(f"trajectories[{index}] has no {_MASK} of shape [b, w]; add one")
        if set(trajectory) != names:
            raise ValueError(
                f"trajectories[{index}] and trajectories[0] differ in the fields "
                f"{sorted(names ^ set(trajectory))}; give all of them the same"
            )
        for name, value in trajectory.items():
            if (isinstance(value, Tensor) and not value.ndim) or len(value) != len(mask):
                raise ValueError(
                    f"trajectories[{index}][{name!r}] hasn't one value for each of the "
                    f"{len(mask)} rows of its {_MASK}"
                )
        rows.append(mask.shape[0])
        widths.append(mask.shape[1])
    token_fields = frozenset(
        name
        for name in names
        if all(
            _columns(each[name]) == width for each, width in zip(trajectories, widths, strict=True)
        )
    )
    return TrajectoryLayout(rows=tuple(rows), widths=tuple(widths), token_fields=token_fields)


def _join(name: str, values: list[Field], layout: TrajectoryLayout, pad_value: float) -> Field:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [element for value in values for element in value]
    first = tensors[0]
    inner = 2 if name in layout.token_fields else 1
    kinds = {(each.shape[inner:], each.dtype, each.device) for each in tensors}
    if len(tensors) < len(values) or len(kinds) > 1:
        raise ValueError(
            f"{name!r} isn't alike in all trajectories: {_described(values)}; give tensors of one "
            "dtype and device, whose second dimension is the trajectory's width or always the same"
        )
    if inner == 1:
        return torch.cat(tensors)
    if not holds(first.dtype, pad_value):
        raise ValueError(
            f"pad_values has {pad_value!r} for {name!r}, which {first.dtype} can't hold; give another"
        )
    joined = first.new_full((layout.num_rows, layout.width, *first.shape[2:]), pad_value)
    for tensor, (start, stop) in zip(tensors, _bounds(layout), strict=True):
        joined[start:stop, : tensor.shape[1]] = tensor
    return joined


def _bounds(layout: TrajectoryLayout) -> list[tuple[int, int]]:
    """Return the first row of each trajectory in the batch and the one after its last."""
    return list(pairwise(accumulate(layout.rows, initial=0)))


def _columns(value: Field) -> int | None:
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else None


def _described(values: list[Field]) -> str:
    kinds = [
        f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "a list"
        for value in values
    ]
    return ", ".join(dict.fromkeys(kinds))[:300]
