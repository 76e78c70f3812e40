"""Every payload in tests/data/trxp, written by Trinity-RFT's class, is what its JSON says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer.eid import text_of_key
from experience_buffer.errors import TrxpError

DATA = Path(__file__).parents[2] / "data" / "trxp"
NAMES = sorted(path.stem for path in DATA.glob("*.bin"))
REFUSED_ITEMS = {
    "numpy_arrays": ("items[0].info.obs", "value.tolist()"),
    "python_types_in_info": ("items[0].info.complex", "value.real"),
    "neg_items_missing_tokens": ("items[0].tokens", "missing"),
}
REFUSED = {
    "legacy_single_pickle": "legacy pickles are never loaded",
    "neg_empty": "doesn't begin with `TRXP`",
    "neg_header_short": "15 bytes are too few",
    "neg_magic_lower": "doesn't begin with `TRXP`",
    "neg_magic_only": "4 bytes are too few",
    "neg_meta_cut": "the payload has 249",
    "neg_meta_len_huge": "exceeds the limit",
    "neg_pickle_calls_getcwd": "not a dict of version",
    "neg_tensor_len_zero": "add up to 477 bytes",
    "neg_version_2": "TRXP version 2",
}
CODES = {
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "int8": "I8",
    "bool": "BOOL",
    "uint8": "U8",
}
GOOD = [name for name in NAMES if name not in REFUSED and name not in REFUSED_ITEMS]


def payload(name: str) -> bytes:
    return (DATA / f"{name}.bin").read_bytes()


def described(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return document


def untagged(value: Any) -> Any:
    """Undo the JSON's type tags; a NaN becomes text, to compare equal."""
    if isinstance(value, list):
        return [untagged(member) for member in value]
    if not isinstance(value, dict):
        return value
    if "$np" in value:
        return untagged(value["v"])
    if "$float" in value:
        return f"float {value['$float']}"
    return {key: untagged(member) for key, member in value.items()}


def comparable(value: Any) -> Any:
    if isinstance(value, list):
        return [comparable(member) for member in value]
    if isinstance(value, dict):
        return {key: comparable(member) for key, member in value.items()}
    return "float nan" if value != value else value


def test_every_file_is_covered() -> None:
    assert len(GOOD) == 22
    assert {*REFUSED, *REFUSED_ITEMS} <= set(NAMES)


@pytest.mark.parametrize("name", GOOD)
def test_read_gives_what_the_json_says(name: str) -> None:
    document = described(name)
    items = trxp.read(payload(name))
    assert len(items) == document["num_items"]
    for item, expected in zip(items, document["items"], strict=True):
        assert isinstance(item, trxp.Item), item
        eid = item.eid
        assert (eid.uid, eid.to_dict()) == (expected["uid"], expected["eid"])
        for key in ("tid", "rid", "sid"):
            # A slash of a task is written so that no two tasks have one key; the text is the same.
            assert text_of_key(getattr(eid, key)) == expected[key]
        for key, value in expected["meta"].items():
            assert comparable(item.meta[key]) == untagged(value), key
        tensors = dict(expected["tensors"])
        for key, tensor in (expected["multi_modal_inputs"] or {}).items():
            tensors[f"multi_modal_inputs:{key}"] = tensor
        assert item.tensors.keys() == tensors.keys()
        for key, view in item.tensors.items():
            wanted = tensors[key]
            assert view.dtype == CODES[wanted["dtype"]]
            assert list(view.shape) == wanted["shape"]
            assert hashlib.sha256(view.data).hexdigest() == wanted["sha256"]


@pytest.mark.parametrize("name", GOOD)
def test_decode_gives_tensors_of_the_same_bytes(name: str) -> None:
    for experience, expected in zip(
        trxp.decode(payload(name)), described(name)["items"], strict=True
    ):
        assert experience.experience_type == expected["experience_type"]
        assert experience.eid.uid == expected["uid"]
        for key, wanted in expected["tensors"].items():
            tensor = getattr(experience, key)
            assert str(tensor.dtype) == f"torch.{wanted['dtype']}"
            assert list(tensor.shape) == wanted["shape"]
        inputs = experience.multi_modal_inputs
        assert (inputs and list(inputs)) == (
            expected["multi_modal_inputs"] and list(expected["multi_modal_inputs"])
        )
    assert [item.uid for item in trxp.read(trxp.encode(trxp.decode(payload(name))))] == [  # type: ignore[union-attr]
        item["uid"] for item in described(name)["items"]
    ]


@pytest.mark.parametrize("name", REFUSED_ITEMS)
def test_an_item_is_refused_with_its_path_and_cure(name: str) -> None:
    where, cure = REFUSED_ITEMS[name]
    (error,) = trxp.read(payload(name))
    assert isinstance(error, TrxpError)
    assert (error.item, error.subject) == (0, where)
    assert cure in str(error)
    with pytest.raises(TrxpError):
        trxp.decode(payload(name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_payload_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(TrxpError) as caught:
        trxp.read(payload(name))
    assert REFUSED[name] in str(caught.value)
    assert caught.value.item is None


@pytest.mark.parametrize("name", [name for name in GOOD if name != "numpy_scalars"])
def test_merging_one_payload_changes_nothing(name: str) -> None:
    # The types of custom fields are texts made anew for each; nothing in them is a shared key.
    assert trxp.merge([payload(name)]) == payload(name)


@pytest.mark.parametrize("name", GOOD)
def test_singles_survive_being_split_and_merged(name: str) -> None:
    singles = trxp.split(payload(name))
    assert trxp.split(trxp.merge(singles)) == singles
    for single in singles:
        assert trxp.split(single) == [single]
