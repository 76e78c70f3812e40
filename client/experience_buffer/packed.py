"""Packed batches: a whole batch as one safetensors file, instead of a payload per experience.

Every tensor field of all experiences is concatenated along its first dimension, with offsets; what
is known of each experience besides are columns, shape [B]. The reader gets tensors that are views
on the received bytes, padded batches, or the form with `cu_seqlens`, without touching an experience.

Nothing is lost. A field that some experiences lack has a presence column. A field whose dtype or
trailing sizes differ between experiences travels in several *forms*, one tensor each, and so do
scalars (shape `()`) among tensors. The metadata of each experience travels as the bytes it has in
its TRXP payload and is read, safely, when asked for: so `of` returns what `trxp.decode` returns, to
the bit, and `payload` the very bytes.

The layout is in docs/packed.md. Importing this module imports no torch; what returns tensors does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from experience_buffer import trxp
from experience_buffer._codec.frame import join_frame
from experience_buffer._codec.payload import read_single
from experience_buffer._dense import convert
from experience_buffer._packed import rewriter
from experience_buffer._packed.asked import check_position, uid_of
from experience_buffer._packed.row import Facts, PackedRow
from experience_buffer._packed.select import select
from experience_buffer._packed.table import Table, read_table
from experience_buffer._packed.writer import cut, frames, pack
from experience_buffer._show import counted, line
from experience_buffer.experience import Experience

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Facts", "PackedBatch", "PackedRow", "cut", "frames", "pack"]
__dir__ = __all__.copy


class PackedBatch:
    """B experiences that arrived as one file.

    It has a length and iterates over its experiences, which are made as `of` makes them;
    `batch[0]` is one of them, and `batch[2:5]` a packed batch of some, which shares no tensors with
    this one. It can be pickled, and shared between threads. Tensors that are views share memory with the batch: changing
    one in place changes what every method returns after it. B is the number of experiences, N of
    the rows of a field, P and R the padded lengths of prompt and response. `parse` makes one.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._uids = [str(uid, "utf-8") for uid in table.values["uid"]]

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> PackedBatch:
        """Read and check a file that `pack` wrote. No torch.

        Tensors will be views on `data` if it is writable, as a bytearray is, and then it must not
        be changed by others. Of read-only data, such as bytes, one copy is made, because tensors
        can be written to.

        Args:
            data: The file.

        Raises:
            TrxpError: The bytes are damaged, or no packed batch.
        """
        view = memoryview(data).cast("B")
        return cls(read_table(memoryview(bytearray(view)) if view.readonly else view))

    def __len__(self) -> int:
        return self._table.num_rows

    def __iter__(self) -> Iterator[Experience]:
        return map(self.of, range(len(self)))

    def __contains__(self, experience: object) -> bool:
        """Whether it holds an experience, given itself, or by its identity or uid."""
        return uid_of(experience) in self._uids

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> PackedBatch: ...
    def __getitem__(self, index: int | slice) -> Experience | PackedBatch:
        check_position(index)
        if isinstance(index, slice):
            return PackedBatch(select(self._table, range(len(self))[index]))
        return self.of(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBatch.parse, (rewriter.rewrite(self._table),)

    def __repr__(self) -> str:
        fields = ", ".join(self.fields)
        return line(f"<PackedBatch of {counted(len(self), 'experience')}: {fields}>")

    @property
    def uids(self) -> list[str]:
        """Name of each experience."""
        return list(self._uids)

    @property
    def groups(self) -> list[str]:
        """Key of each one's group; empty where it has none."""
        return [str(group, "utf-8") for group in self._table.values["group"]]

    @property
    def flags(self) -> list[tuple[str, ...]]:
        """Details of each one's advantages, such as `"zero_variance"`."""
        return [tuple(str(words, "utf-8").split()) for words in self._table.values["flags"]]

    @property
    def fields(self) -> list[str]:
        """Names of the tensor fields that any experience has, sorted."""
        return sorted(self._table.fields)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, sorted."""
        return sorted(self._table.columns)

    def tensor(self, name: str) -> Tensor:
        """One field of all experiences, one after the other: a view, shape [N, ...].

        An experience without the field has no rows; of scalars each experience has one.

        Args:
            name: One of `fields`.

        Raises:
            KeyError: No experience has the field.
            ValueError: The field's dtype or trailing sizes differ between experiences.
        """
        tensor: Tensor = convert.readable(self._table.only_form(name).view)
        return tensor

    def offsets(self, name: str) -> Tensor:
        """Where each experience's rows of a field begin, and where the last ones end: a view.

        Args:
            name: One of `fields`.

        Returns:
            int64, shape [B + 1], the first 0, the last N.

        Raises:
            KeyError: No experience has the field.
            ValueError: The field's dtype or trailing sizes differ between experiences.
        """
        offsets: Tensor = convert.readable(self._table.only_form(name).offsets_view)
        return offsets

    def column(self, name: str) -> Tensor:
        """One value per experience: a view, shape [B].

        `reward` is float64, NaN where there is none (`has_reward` says which); `staleness` is 0
        where it is unknown (`has_staleness`).

        Args:
            name: One of `columns`.

        Raises:
            KeyError: There is no such column.
        """
        column: Tensor = convert.readable(self._table.column(name))
        return column

    def payload(self, index: int) -> bytes:
        """One experience as a TRXP payload of its own, computed tensors in place.

        Args:
            index: Its place in the batch; from the end where negative.

        Raises:
            IndexError: There are no so many experiences.
        """
        index = range(len(self))[index]
        metadata = self._table.values["meta"][index]
        tensors = self._table.tensors_of(index)
        return join_frame(metadata, [(f"0:{name}", view) for name, view in tensors.items()])

    def meta(self, index: int) -> dict[str, Any]:
        """The metadata of one experience: identity, texts, `info`, `metrics`, messages. No torch.

        Args:
            index: Its place in the batch; from the end where negative.

        Raises:
            IndexError: There are no so many experiences.
            TrxpError: It is damaged.
        """
        return self._item(index).meta

    def _item(self, index: int) -> trxp.Item:
        index = range(len(self))[index]
        metadata = self._table.values["meta"][index]
        return read_single(metadata, self._table.tensors_of(index))

    def of(self, index: int) -> Experience:
        """One experience, as `trxp.decode` makes it of its own payload. It shares no memory.

        Args:
            index: Its place in the batch; from the end where negative.

        Raises:
            IndexError: There are no so many experiences.
            ValueError: Its metadata is damaged; mostly a TrxpError.
        """
        return Experience.deserialize(self.payload(index))

    def padded(
        self,
        *,
        pad_token_id: int = 0,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        fields: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Pad prompts on the left and responses on the right, as `collation.gather_*` does.

        Args:
            pad_token_id: What fills `input_ids` where no token is; they become int64 where the tokens'
                dtype can't hold it.
            max_prompt_length: P; None for the longest prompt.
            max_response_length: R; None for the longest response, or field if one is longer.
            fields: Fields of one row per response token, extra tensors included; None for those of
                `logprobs`, `token_level_reward`, `advantages`, `returns`, `teacher_logprobs`,
                `values`, `ref_logprobs` and `versions` that the experiences have, and for
                `routed_experts`. Other fields, and `multi_modal_inputs`, are `tensor`'s and
                `of`'s; `collation.padded_collate` adds them.

        Returns:
            `input_ids`, shape [B, P + R]; `attention_mask`, True where a token is, bool, the same
            shape; each field under its name, padded with 0, shape [B, R, ...]. `action_mask` is
            among them unless an experience is dpo's; dtypes are those of the experiences.
            `routed_experts` are laid out like `input_ids`, shape [B, P + R, layers, top_k], 0 where a
            token has none.

        Raises:
            ValueError: A prompt or response is longer than its maximum; an experience lacks one of
                `fields`, or without `fields` one that others have; a field has another number of
                values than the response has tokens (`values` may have one more; where a prompt was
                truncated, any may have any number); its trailing sizes differ between experiences, or
                its dtypes have none in common that holds all values; tokens aren't integers; a mask is
                neither 0 nor 1; the batch is empty.
        """
        convert.require_torch("padding a batch")
        from experience_buffer._packed import torch_views

        return torch_views.padded(
            self._table,
            pad_token_id=pad_token_id,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            fields=fields,
        )

    def varlen(self, fields: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Lay experiences behind one another without padding, as variable-length kernels want.

        Response fields keep their own, shorter, layout: they are views, none has to be made up for
        the prompts, and the model's head need run on response tokens alone.
        `logits[response_index - 1]` are what predicts them; `full[response_index] = field` spreads
        a field over all tokens.

        Args:
            fields: As for `padded`.

        Returns:
            `input_ids`, shape [N]; `cu_seqlens`, int32, shape [B + 1]; `max_seqlen`, a scalar;
            `position_ids`, int64, shape [N], from 0 in each experience; `response_index`, int64,
            shape [T]: where in `input_ids` each response token is; `cu_response_seqlens`, int32,
            shape [B + 1]. Each field under its name, shape [T, ...]; one that hasn't a row for
            each response token, such as `values` with a bootstrap value and `routed_experts`, has
            offsets of its own in `NAME.cu_seqlens`.

        Raises:
            ValueError: As for `padded`.
        """
        convert.require_torch("laying a batch out")
        from experience_buffer._packed import torch_views

        return torch_views.varlen(self._table, fields=fields)
