"""Payloads as a whole: what is wrong with one experience, with the frame, with every byte of it."""

from __future__ import annotations

import json
import pickle
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer import trxp
from experience_buffer._codec import safetensors
from experience_buffer._codec.frame import join_frame
from experience_buffer._dense.tensors import tensor_view
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError
from experience_buffer.experience import CustomField, Experience
from experience_buffer.trxp import Item, Limits, TensorView

DATA = Path(__file__).parents[2] / "data" / "trxp"
PAYLOADS = {
    path.stem: path.read_bytes()
    for path in sorted(DATA.glob("*.bin"))
    if not path.stem.startswith(("neg_", "legacy_"))
}
TOKENS = TensorView("I32", (3,), memoryview(bytes(12)))


def meta(**changes: Any) -> dict[str, Any]:
    (item,) = trxp.read(
        Experience(eid=EID(2, 3, 5, 7, "a"), tokens=[1, 2, 3], prompt_length=1).serialize()
    )
    assert isinstance(item, Item)
    return {**item.meta, **changes}


def raw(top: object, tensors: dict[str, TensorView]) -> bytes:
    return join_frame(memoryview(pickle.dumps(top, 5)), tensors.items())


def one(item: object, **tensors: TensorView) -> bytes:
    named = {f"0:{name}": view for name, view in ({"tokens": TOKENS} | tensors).items()}
    return raw({"version": 1, "num_items": 1, "items": [item]}, named)


CUSTOM = {"source_field": "a", "destination_field": "b", "data_type": "torch.float32"}
BAD_ITEMS: dict[str, tuple[bytes, str, str]] = {
    "not_a_dict": (one([1]), "", "a list, not a dict"),
    "key_no_text": (one(meta() | {1: 2}), "", "a key isn't text"),
    "no_eid": (one(meta(eid=None)), ".eid", "send EID"),
    "eid_part_missing": (one(meta(eid={"batch": 1})), ".eid", "not a dict of batch"),
    "eid_extra": (one(meta(eid=EID().to_dict() | {"x": 1})), ".eid", "not a dict of batch"),
    "batch_none": (one(meta(eid=EID().to_dict() | {"batch": None})), ".eid", "int or str"),
    "task_bool": (one(meta(eid=EID().to_dict() | {"task": True})), ".eid", "int or str"),
    "run_text": (one(meta(eid=EID().to_dict() | {"run": "1"})), ".eid", "run and step"),
    "suffix_none": (one(meta(eid=EID().to_dict() | {"suffix": None})), ".eid", "suffix"),
    "uid_surrogate": (one(meta(eid=EID("\udc80").to_dict())), ".eid", "surrogate"),
    "reward_text": (one(meta(reward="1")), ".reward", "a str; send float or int or bool"),
    "info_list": (one(meta(info=[])), ".info", "a list; send dict"),
    "metrics_list": (one(meta(metrics=[])), ".metrics", "a list; send dict"),
    "prompt_length_none": (one(meta(prompt_length=None)), ".prompt_length", "send int"),
    "prompt_length_0": (one(meta(prompt_length=0)), ".prompt_length", "positive"),
    "all_prompt": (one(meta(prompt_length=3)), ".tokens", "3 tokens, but a prompt of 3"),
    "truncate_status": (one(meta(truncate_status=1)), ".truncate_status", "send str"),
    "truncated": (one(meta(truncate_status="prompt_truncated")), ".logprobs", "missing"),
    "tokens_scalar": (
        one(meta(), tokens=TensorView("I32", (), memoryview(bytes(4)))),
        ".tokens",
        "scalar",
    ),
    "custom_none": (one(meta(custom_fields=[None])), ".custom_fields[0]", "not a dict"),
    "custom_number": (
        one(meta(custom_fields=[CUSTOM, CUSTOM | {"source_field": 1}])),
        ".custom_fields[1]",
        "isn't text",
    ),
    "custom_dtype": (
        one(meta(custom_fields=[CUSTOM | {"data_type": "torch.load"}])),
        ".custom_fields[0].data_type",
        "'torch.load' is no dtype",
    ),
    "image_missing": (
        one(meta(multi_modal_input_keys=["a"])),
        ".multi_modal_input_keys",
        "such as 'multi_modal_inputs:a'",
    ),
    "image_unlisted": (
        one(meta(), **{"multi_modal_inputs:a": TOKENS}),
        ".multi_modal_input_keys",
        "such as 'multi_modal_inputs:a'",
    ),
    "image_key": (one(meta(multi_modal_input_keys=[None])), ".multi_modal_input_keys", "text"),
    "image_key_long": (
        one(meta(multi_modal_input_keys=[2**64])),
        ".multi_modal_input_keys",
        "more than 64 bits",
    ),
    "reward_tensor": (one(meta(reward=torch.tensor(1.0))), ".reward", "float(reward)"),
    "class": (one(meta(info={"eid": EID()})), ".info.eid", "experience_buffer.eid.EID isn't"),
    "deep": (one(meta(info={"a": json.loads("[" * 99 + "]" * 99)})), ".info.a", "nested"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_what_is_wrong_with_one_experience_spares_its_neighbours(name: str) -> None:
    payload, path, reason = BAD_ITEMS[name]
    (error,) = trxp.read(payload)
    assert isinstance(error, TrxpError)
    assert error.item == 0
    assert (error.subject or "").startswith(f"items[0]{path}")
    assert reason in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert pickle.loads(pickle.dumps(error)).item == 0

    metadata = pickle.loads(payload[21 : 21 + int.from_bytes(payload[5:13], "little")])
    table = safetensors.read(
        memoryview(payload)[21 + int.from_bytes(payload[5:13], "little") :], max_header_bytes=9999
    )
    tensors = {f"1{tensor[1:]}": view for tensor, view in table}
    tensors |= {"0:tokens": TOKENS, "2:tokens": TOKENS}
    items = [meta(), metadata["items"][0], meta()]
    found = trxp.read(raw({"version": 1, "num_items": 3, "items": items}, tensors))
    assert [type(each) for each in found] == [Item, TrxpError, Item]
    assert isinstance(found[1], TrxpError)
    assert found[1].item == 1
    for function in (trxp.split, trxp.decode):
        with pytest.raises(TrxpError):
            function(payload)


GOOD = {"version": 1, "num_items": 1, "items": [meta()]}
BAD_PAYLOADS: dict[str, tuple[bytes, str]] = {
    "trailing": (PAYLOADS["batch_64"] + b"x", "but the payload has 28574"),
    "two_payloads": (PAYLOADS["dpo"] * 2, "one payload at a time"),
    "top_list": (raw([], {}), "not a dict of version"),
    "top_key": (raw(GOOD | {"more": 1}, {}), "not a dict of version"),
    "version_2": (raw(GOOD | {"version": 2}, {}), "version 2"),
    "version_true": (raw(GOOD | {"version": True}, {}), "version True"),
    "items_dict": (raw(GOOD | {"items": {}}, {}), "items is a dict"),
    "items_fewer": (raw(GOOD | {"num_items": 2}, {}), "num_items is 2, but there are 1"),
    "items_more": (raw(GOOD | {"num_items": 0}, {}), "num_items is 0, but there are 1"),
    "items_float": (raw(GOOD | {"num_items": 1.0}, {}), "num_items is 1.0"),
    "index_beyond": (raw(GOOD, {"1:tokens": TOKENS}), "index below 1"),
    "index_negative": (raw(GOOD, {"-1:tokens": TOKENS}), "index below 1"),
    "index_padded": (raw(GOOD, {"00:tokens": TOKENS}), "index below 1"),
    "index_plus": (raw(GOOD, {"+0:tokens": TOKENS}), "index below 1"),
    "no_colon": (raw(GOOD, {"0": TOKENS}), "`index:field`"),
}


@pytest.mark.parametrize("name", BAD_PAYLOADS)
def test_what_is_wrong_with_all_of_it(name: str) -> None:
    payload, reason = BAD_PAYLOADS[name]
    with pytest.raises(TrxpError) as caught:
        trxp.read(payload)
    assert caught.value.item is None
    assert reason in str(caught.value)


def test_a_tensor_named_twice_is_refused() -> None:
    metadata = pickle.dumps(GOOD, 5)
    entry = '"0:tokens":{"dtype":"I32","shape":[0],"data_offsets":[0,0]}'
    header = f"{{{entry},{entry}}}".encode()
    section = len(header).to_bytes(8, "little") + header
    frame = b"TRXP\1" + len(metadata).to_bytes(8, "little") + len(section).to_bytes(8, "little")
    with pytest.raises(TrxpError, match=r"'0:tokens'.*twice"):
        trxp.read(frame + metadata + section)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_items=63), "64 items exceed the limit of 63"),
        (Limits(max_metadata_bytes=9_543), "metadata of 9544 bytes exceeds the limit of 9543"),
        (Limits(max_header_bytes=13_000), "exceeds the limit of 13000"),
        (Limits(max_nodes=1_000), "more than 1,000 values"),
    ],
)
def test_each_limit_is_named(limits: Limits, reason: str) -> None:
    with pytest.raises(TrxpError, match=reason):
        trxp.read(PAYLOADS["batch_64"], limits=limits)


def test_one_container_shared_by_all_items_counts_for_each() -> None:
    shared = list(range(1_000))
    experiences = [
        Experience(tokens=[1, 2], prompt_length=1, info={"a": shared}) for _ in range(20)
    ]
    payload = trxp.encode(experiences)
    assert len(trxp.split(payload)) == 20
    with pytest.raises(TrxpError, match="counted as often"):
        trxp.read(payload, limits=Limits(max_nodes=10_000))


def test_what_experiences_share_may_be_as_large_as_a_message() -> None:
    """A group of one prompt, whose messages hold an image: it travels once."""
    shared = {"messages": [{"role": "user", "content": "A" * 1_400_000}]}
    group = [
        Experience(eid=EID(1, 1, run), tokens=[1, 2], prompt_length=1, info=shared)
        for run in range(32)
    ]
    payload = trxp.encode(group)
    assert len(payload) < 2_000_000
    assert sum(map(len, trxp.split(payload))) > 32 * 1_400_000
    with pytest.raises(TrxpError, match=r"take over \d+ bytes; send smaller batches"):
        trxp.split(payload, limits=Limits(max_message_bytes=32 * 1_400_000))
    limits = Limits(max_message_bytes=1_000_000)
    assert limits.max_alone_bytes(10) == 24 * 2**20 + 20, "a small push of a small server"
    assert Limits().max_alone_bytes(10) == 64 * 2**20


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_cut_anywhere_is_refused(name: str) -> None:
    payload = PAYLOADS[name]
    step = max(1, len(payload) // 997)
    for end in [*range(0, len(payload), step), len(payload) - 1]:
        with pytest.raises(TrxpError):
            trxp.read(payload[:end])
        # With lengths that agree with the cut, it is the next layer that has to notice.
        if end > 21:
            metadata_bytes = min(int.from_bytes(payload[5:13], "little"), end - 21)
            lengths = metadata_bytes.to_bytes(8, "little")
            lengths += (end - 21 - metadata_bytes).to_bytes(8, "little")
            with pytest.raises(TrxpError):
                trxp.read(payload[:5] + lengths + payload[21:end])


@settings(max_examples=600)
@given(st.sampled_from(sorted(PAYLOADS)), st.data())
def test_changed_bytes_give_an_error_or_something_sound(name: str, data: st.DataObject) -> None:
    payload = bytearray(PAYLOADS[name])
    end = min(len(payload), 1500)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        items = trxp.read(payload)
    except TrxpError:
        return
    for item in items:
        if isinstance(item, Item):
            single = item.encode()
            assert trxp.split(single) == [single]
            assert len(Experience.deserialize(single).tokens) == item.tensors["tokens"].shape[0]


def test_a_declared_size_allocates_nothing() -> None:
    payload = bytearray(PAYLOADS["dpo"])
    payload[5:13] = (2**40).to_bytes(8, "little")
    tracemalloc.start()
    with pytest.raises(TrxpError):
        trxp.read(payload)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 50_000


def test_views_refer_to_the_payload() -> None:
    payload = bytearray(PAYLOADS["multimodal_inputs"])
    (item,) = trxp.read(payload)
    assert isinstance(item, Item)
    view = item.tensors["multi_modal_inputs:pixel_values"]
    assert (view.dtype, view.shape, len(view.data)) == ("F32", (16, 24), 1536)
    start = payload.find(bytes(view.data))
    payload[start] ^= 1
    assert view.data[0] == payload[start]


def test_decoded_tensors_share_one_aligned_writable_copy() -> None:
    payload = PAYLOADS["batch_64"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiences = trxp.decode(payload)
    addresses = [
        tensor.data_ptr()
        for experience in experiences
        for tensor in (experience.tokens, experience.logprobs)
        if tensor is not None and len(tensor)
    ]
    assert max(addresses) - min(addresses) < len(payload)
    assert all(address % 4 == 0 for address in addresses)
    experiences[0].tokens += 1
    assert trxp.decode(payload)[0].tokens[0] + 1 == experiences[0].tokens[0]


def test_misaligned_data_is_copied() -> None:
    header = {
        "0:odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "0:tokens": {"dtype": "I64", "shape": [2], "data_offsets": [3, 19]},
    }
    text = json.dumps(header).encode()
    data = b"abc" + (7).to_bytes(8, "little") + (-5).to_bytes(8, "little", signed=True)
    section = len(text).to_bytes(8, "little") + text + data
    metadata = pickle.dumps(GOOD, 5)
    frame = b"TRXP\1" + len(metadata).to_bytes(8, "little") + len(section).to_bytes(8, "little")
    (experience,) = trxp.decode(frame + metadata + section)
    assert experience.tokens.tolist() == [7, -5]
    assert experience.tokens.data_ptr() % 8 == 0
    assert experience.extra["odd"].tolist() == [97, 98, 99]


def test_with_tensors_replaces_and_adds() -> None:
    payload = Experience(tokens=[1, 2, 3], prompt_length=1, advantages=[5.0, 7.0]).serialize()
    values = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    changed = trxp.with_tensors(
        payload,
        {"advantages": tensor_view(torch.tensor([11.0])), "values": tensor_view(values)},
    )
    experience = Experience.deserialize(changed)
    assert experience.advantages is not None
    assert experience.advantages.tolist() == [11.0]
    assert experience.extra["values"].equal(values)
    assert experience.tokens.tolist() == [1, 2, 3]
    with pytest.raises(TrxpError, match="split it first"):
        trxp.with_tensors(PAYLOADS["batch_64"], {})
    with pytest.raises(ValueError, match="part of the metadata"):
        trxp.with_tensors(payload, {"multi_modal_inputs:a": tensor_view(values)})


NOT_SENT: dict[str, tuple[Callable[[], Experience], str, str]] = {
    "object": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, info={"o": object()}),
        ".info.o",
        "object",
    ),
    "array": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, metrics={"a": torch.ones(2).numpy()}),  # type: ignore[dict-item]
        ".metrics.a",
        "tolist()",
    ),
    "huge_int": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, info={"i": 1 << 9000}),
        ".info.i",
        "1024 bytes",
    ),
    "key": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, info={"k": {frozenset("a"): 1}}),
        ".info",
        "key",
    ),
    "taken_extra": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, extra={"tokens": torch.ones(1)}),
        ".extra['tokens']",
        "taken",
    ),
    "sparse": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, extra={"v": torch.eye(3).to_sparse()}),
        ".v",
        "dense",
    ),
    "complex128": (
        lambda: Experience(
            tokens=[1, 2], prompt_length=1, extra={"v": torch.ones(1, dtype=torch.complex128)}
        ),
        ".v",
        "torch.complex128",
    ),
    "no_custom_fields": (
        lambda: Experience(tokens=[1, 2], prompt_length=1, custom_fields=[1]),  # type: ignore[list-item]
        ".custom_fields",
        "else than CustomField(",
    ),
}


@pytest.mark.parametrize("name", NOT_SENT)
def test_what_cannot_be_sent_is_named(name: str) -> None:
    make, path, reason = NOT_SENT[name]
    with pytest.raises(TrxpError) as caught:
        trxp.encode([Experience(tokens=[1, 2], prompt_length=1), make()])
    assert caught.value.item == 1
    assert (caught.value.subject or "").startswith(f"items[1]{path}")
    assert reason in str(caught.value)


def test_a_list_in_itself_is_refused() -> None:
    info: dict[str, Any] = {}
    info["self"] = info
    with pytest.raises(TrxpError, match="holds itself"):
        Experience(tokens=[1, 2], prompt_length=1, info=info).serialize()


def test_custom_fields_come_back_with_their_dtype() -> None:
    fields = [CustomField("a", "b", torch.float8_e5m2), CustomField("c", "d", torch.complex128)]
    assert (
        Experience.deserialize(
            Experience(tokens=[1, 2], prompt_length=1, custom_fields=fields).serialize()
        ).custom_fields
        == fields
    )
