"""Padded and variable-length batches equal what `collation` makes of the same experiences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experience_buffer import collation, trxp
from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView
from experience_buffer._packed import torch_views
from experience_buffer.experience import Experience
from experience_buffer.packed import PackedBatch, PackedRow
from tests.unit.client.packed import packed_rows as rows_of
from tests.unit.client.packed.packed_rows import numbers, row, view

FIELDS = ("logprobs", "advantages", "entropy", "features")


@st.composite
def turns(draw: st.DrawFn) -> list[PackedRow]:
    """Experiences that can be laid out: some without a mask, some truncated, of mixed dtypes."""
    rows = []
    dtypes = draw(st.lists(st.sampled_from(["F32", "F64", "BF16"]), min_size=1, max_size=2))
    token_dtypes = draw(st.lists(st.sampled_from(["U8", "I32", "I64"]), min_size=1, max_size=2))
    for number in range(draw(st.integers(1, 7))):
        prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        status = draw(st.sampled_from([None, None, "prompt_truncated", "response_truncated"]))
        num_logprobs = draw(st.integers(0, 3)) if status == "prompt_truncated" else response
        dtype = draw(st.sampled_from(dtypes))
        ids = draw(st.lists(st.integers(0, 9), min_size=prompt + response, max_size=9 + prompt))
        tokens = numbers(draw(st.sampled_from(token_dtypes)), ids[: prompt + response])
        found = {
            "tokens": tokens,
            "logprobs": view(dtype, (num_logprobs,), number),
            "advantages": view(dtype, (num_logprobs,), number + 5),
            "entropy": view(draw(st.sampled_from(dtypes)), (draw(st.integers(0, 4)),), number),
            "features": view("U8", (response, 3), number),
        }
        mask = draw(st.sampled_from([None, "BOOL", "I64"]))
        if mask is not None:
            bits = draw(st.lists(st.booleans(), min_size=num_logprobs, max_size=num_logprobs))
            found["action_mask"] = numbers(mask, bits)
        changes = {"prompt_length": prompt, "truncate_status": status}
        rows.append(row(number, found, changes=changes))
    return rows


def decoded(rows: list[PackedRow]) -> list[Experience]:
    return [trxp.decode(trxp.with_tensors(each.payload, each.tensors))[0] for each in rows]


def gathered(experiences: list[Experience], p: int, r: int, pad: int) -> dict[str, Tensor]:
    return {
        "input_ids": collation.gather_token_ids(experiences, p, r, pad),
        "attention_mask": collation.gather_attention_masks(experiences, p, r),
        "action_mask": collation.gather_action_masks(experiences, r),
        **{name: collation.gather_response_attrs(experiences, name, r) for name in FIELDS},
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].nan_to_num(7), value.nan_to_num(7)), name


@given(turns(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 99), st.booleans())
@settings(max_examples=50)
def test_padded_equals_gathered(
    rows: list[PackedRow], more_prompt: int, more_response: int, pad: int, is_long: bool
) -> None:
    experiences = decoded(rows)
    longest = [
        max(len(value) for value in (each.logprobs, each.action_mask, each.extra["entropy"]))  # type: ignore[arg-type]
        for each in experiences
    ]
    p = max(each.prompt_length for each in experiences)
    r = max(*longest, *(len(each.tokens) - each.prompt_length for each in experiences))
    batch = rows_of.parsed(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_views, "_LONG", 1 if is_long else 4096)
        found = batch.padded(pad_token_id=pad, fields=FIELDS)
        assert_same(found, gathered(experiences, p, r, pad))
        p, r = p + more_prompt, r + more_response
        found = batch.padded(
            pad_token_id=pad, max_prompt_length=p, max_response_length=r, fields=FIELDS
        )
    assert_same(found, gathered(experiences, p, r, pad))


@given(turns())
@settings(max_examples=50)
def test_varlen_holds_every_experience(rows: list[PackedRow]) -> None:
    experiences = decoded(rows)
    found = rows_of.parsed(rows).varlen(FIELDS)
    cu, cu_response = found["cu_seqlens"], found["cu_response_seqlens"]
    assert cu.dtype == cu_response.dtype == torch.int32
    assert cu[0] == cu_response[0] == 0
    assert found["max_seqlen"] == max(len(each.tokens) for each in experiences)
    assert cu[-1] == len(found["input_ids"]) == len(found["position_ids"])
    for index, each in enumerate(experiences):
        begin, end = cu[index : index + 2].tolist()
        assert found["input_ids"][begin:end].tolist() == each.tokens.tolist()
        assert found["position_ids"][begin:end].tolist() == list(range(len(each.tokens)))
        first, last = cu_response[index : index + 2].tolist()
        assert found["response_index"][first:last].tolist() == list(
            range(begin + each.prompt_length, end)
        )
        for name in ("action_mask", *FIELDS):
            expected = getattr(each, name, None)
            expected = each.extra[name] if expected is None else expected
            offsets = found.get(f"{name}.cu_seqlens", cu_response)
            rows_found = found[name][int(offsets[index]) : int(offsets[index + 1])]
            assert torch.equal(
                rows_found.nan_to_num(7), expected.to(rows_found.dtype).nan_to_num(7)
            )


def test_by_hand() -> None:
    ids = numbers("I32", [10, 11, 12, 13, 14]), numbers("I32", [20, 21, 22])
    values = numbers("F32", [0.5, 1, 2]), numbers("F32", [3, 4])
    many = [
        row(1, {"tokens": ids[0], "logprobs": values[0]}, changes={"prompt_length": 2}),
        row(2, {"tokens": ids[1], "logprobs": values[1]}, changes={"prompt_length": 1}),
    ]
    batch = rows_of.parsed(many)
    padded = batch.padded(pad_token_id=99, max_prompt_length=3)
    assert {name: value.tolist() for name, value in padded.items()} == {
        "input_ids": [[99, 10, 11, 12, 13, 14], [99, 99, 20, 21, 22, 99]],
        "attention_mask": [[False] + [True] * 5, [False] * 2 + [True] * 3 + [False]],
        "action_mask": [[True] * 3, [True, True, False]],
        "logprobs": [[0.5, 1, 2], [3, 4, 0]],
    }
    varlen = batch.varlen()
    assert {name: value.tolist() for name, value in varlen.items()} == {
        "input_ids": [10, 11, 12, 13, 14, 20, 21, 22],
        "cu_seqlens": [0, 5, 8],
        "max_seqlen": 5,
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2],
        "response_index": [2, 3, 4, 6, 7],
        "cu_response_seqlens": [0, 3, 5],
        "action_mask": [True] * 5,
        "logprobs": [0.5, 1, 2, 3, 4],
    }


def test_varlen_copies_no_field() -> None:
    tensors = {"tokens": view("I32", (5,)), "logprobs": view("F32", (4,))}
    data = bytearray(rows_of.packed([row(n, tensors) for n in range(3)]))
    varlen = PackedBatch.parse(data).varlen()
    for name in ("input_ids", "logprobs"):
        varlen[name].zero_()
    again = PackedBatch.parse(data)
    assert not again.tensor("tokens").any()
    assert not again.tensor("logprobs").any()


def test_fields_that_some_lack_are_named() -> None:
    tokens = view("I32", (3,))
    values = view("F32", (3,))
    many = [
        row(1, {"tokens": tokens, "values": values, "returns": view("F32", (2,)), "mine": values}),
        row(2, {"tokens": tokens, "values": values, "mine": values}),
    ]
    batch = rows_of.parsed(many)
    padded = batch.padded(fields=["values"])
    # The bootstrap value makes room for itself.
    assert list(padded) == ["input_ids", "attention_mask", "action_mask", "values"]
    assert padded["values"].shape == padded["action_mask"].shape == (2, 3)
    assert batch.varlen(["values"])["values.cu_seqlens"].tolist() == [0, 3, 6]
    assert "mine" in batch.padded(fields=["mine"])
    for lay_out in (batch.padded, batch.varlen):
        with pytest.raises(ValueError, match="5/000002 has no returns, which 1 of the 2 exp"):
            lay_out()
        with pytest.raises(ValueError, match="2/3/2/5/000002 has no returns"):
            lay_out(fields=["returns"])
        with pytest.raises(ValueError, match="2/3/1/5/000001 has no nothing"):
            lay_out(fields=["nothing"])


def test_dpo() -> None:
    many = [
        row(n, {"tokens": view("I32", (n,)), "chosen": view("I32", (n + 1,)),
                "rejected": view("I32", (2,))}, changes={"prompt_length": 1})
        for n in (3, 5)
    ]  # fmt: skip
    batch = rows_of.parsed(many)
    padded = batch.padded(fields=["chosen", "rejected"])
    assert {name: tuple(value.shape) for name, value in padded.items()} == {
        "input_ids": (2, 5 + 6),
        "attention_mask": (2, 5 + 6),
        "chosen": (2, 6),
        "rejected": (2, 6),
    }
    assert batch.padded()["input_ids"].shape == (2, 5)
    with pytest.raises(ValueError, match="has no action_mask"):
        batch.padded(fields=["action_mask"])


TOKENS = {"tokens": view("I32", (7,)), "logprobs": view("F32", (5,))}


@pytest.mark.parametrize(
    ("pushed", "arguments", "reason"),
    [
        ({}, {"max_prompt_length": 1}, "2/3/1/5/000001: tokens has 2 prompt tokens; .* room for 1"),
        ({}, {"max_response_length": 4}, "tokens has 5 response tokens; the batch has room for 4"),
        (
            {"returns": view("F32", (6,))},
            {"max_response_length": 5},
            "2/3/2/5/000002: returns has 6 values, but the response has 5 tokens",
        ),
        ({"returns": view("F32", (4,))}, {}, "2/3/2/5/000002: returns has 4 values"),
        (
            {"values": view("F32", (6,))},
            {"max_response_length": 5, "fields": ["values"]},
            "2/3/1/5/000001 has no values",
        ),
        ({"mine": view("F32", (9,))}, {"fields": ["mine"]}, "2/3/1/5/000001 has no mine"),
        (
            {"routed_experts": view("U8", (6, 2, 2))},
            {},
            "2/3/1/5/000001 has no routed_experts, which 1 of the 2 experiences have",
        ),
        (
            {"returns": view("F32", (5, 2))},
            {},
            r"returns differs in shape .*\['\*'\] in 2/3/1/5/000001, \['\*', 2\] in 2/3/2/5/000002",
        ),
        ({"returns": view("F32", ())}, {}, "returns is a scalar"),
        ({"returns": view("F32", (5, 0))}, {}, "returns has rows of no elements"),
        ({"returns": view("F8_E5M2", (5,))}, {}, "no common dtype"),
        (
            {
                "logprobs": TensorView("F32", (2**40, 0), memoryview(b"")),
            },
            {"fields": ["action_mask"], "truncate_status": "prompt_truncated"},
            "logprobs has rows of no elements",
        ),
        ({"input_ids": view("F32", (5,))}, {"fields": ["input_ids"]}, "has no input_ids"),
        ({"tokens": view("I32", (7, 2))}, {}, "tokens differs in shape"),
        ({"tokens": view("I32", (0,)), "action_mask": view("BOOL", (2,))}, {}, "0 tokens, but a"),
    ],
)
def test_what_cannot_be_laid_out_is_named(
    pushed: dict[str, TensorView], arguments: dict[str, Any], reason: str
) -> None:
    arguments = dict(arguments)
    usual = TOKENS | {"returns": view("F32", (5,))}
    changes = {"prompt_length": 2, "truncate_status": arguments.pop("truncate_status", None)}
    first, second = row(1, usual, changes=changes), row(2, usual | pushed, changes=changes)
    with pytest.raises(ValueError, match=reason):
        rows_of.parsed([first, second]).padded(**arguments)


def test_a_field_named_like_an_entry_of_the_batch_is_refused() -> None:
    names = ("input_ids", "cu_seqlens")
    batch = rows_of.parsed([row(1, TOKENS | {name: view("F32", (5,)) for name in names})])
    for lay_out, name in ((batch.padded, names[0]), (batch.varlen, names[1])):
        with pytest.raises(ValueError, match="has the name of another entry"):
            lay_out(fields=[name])


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"F8_E8M0"}))
@pytest.mark.parametrize("is_long", [False, True])
def test_any_dtype_is_padded_bit_for_bit(
    dtype: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        monkeypatch.setattr(torch_views, "_LONG", 1)
    many = [row(n, {"tokens": view("I32", (n + 1,)), "x": view(dtype, (n,), n)}) for n in (2, 3)]
    padded = rows_of.parsed(many).padded(fields=["x"])["x"]
    expected = b"".join(
        [*(view(dtype, (2,), 2).data, bytes(ITEM_BYTES[dtype])), view(dtype, (3,), 3).data]
    )
    assert bytes(padded.view(torch.uint8).flatten().tolist()) == expected


@pytest.mark.parametrize(("short", "long"), [("U8", "I32"), ("U16", "I64"), ("I16", "U32")])
@pytest.mark.parametrize("is_first_short", [True, False])
def test_token_ids_are_the_same_whatever_the_dtype_of_a_neighbour(
    is_first_short: bool, short: str, long: str
) -> None:
    large = [151_644, 70_000, 300]
    ids = [(short, [1, 2, 3]), (long, large)]
    rows = [
        row(number, {"tokens": numbers(dtype, tokens)}, changes={"prompt_length": 1})
        for number, (dtype, tokens) in enumerate(ids if is_first_short else ids[::-1])
    ]
    batch = rows_of.parsed(rows)
    expected = [[1, 2, 3], large] if is_first_short else [large, [1, 2, 3]]
    assert batch.padded(pad_token_id=0)["input_ids"].tolist() == expected
    assert batch.varlen()["input_ids"].tolist() == [*expected[0], *expected[1]]
    assert collation.gather_token_ids(decoded(rows), 1, 2, 0).tolist() == expected
