"""What this package writes is, byte for byte, what Trinity-RFT's own class writes."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from experience_buffer import trxp
from experience_buffer._dense.tensors import tensor_view
from experience_buffer.eid import EID
from experience_buffer.experience import CustomField, Experience

trinity = importlib.import_module("trinity.common.experience")
DATA = Path(__file__).parents[2] / "data" / "trxp"
_OURS: dict[str, Any] = {"experience": Experience, "eid": EID, "custom_field": CustomField}
_THEIRS: dict[str, Any] = {
    "experience": trinity.Experience,
    "eid": trinity.EID,
    "custom_field": trinity.CustomField,
}


def build(index: int, kind: str, classes: dict[str, Any]) -> Any:
    """Make the same experience of either package's classes."""
    generator = torch.Generator().manual_seed(index)
    num_tokens, prompt_length = 23 + index % 7, 5 + index % 3
    num_responses = num_tokens - prompt_length
    tokens = torch.randint(0, 151_643, (num_tokens,), generator=generator)
    logprobs = -torch.rand(num_responses, generator=generator)
    arguments: dict[str, Any] = {
        "eid": classes["eid"](batch=3, task=index // 8, run=index % 8, suffix=f"{index:06x}"),
        "tokens": tokens,
        "prompt_length": prompt_length,
        "logprobs": logprobs,
        "reward": index / 7,
        "info": {"model_version": 11, "step": index, "items": {"index": index}},
        "metrics": {"accuracy": index % 2, "reward": 0.5},
    }
    match kind:
        case "plain":
            pass
        case "lists":
            arguments |= {"tokens": tokens.tolist(), "logprobs": logprobs.tolist()}
        case "multi_turn":
            mask = torch.rand(num_responses, generator=generator) > 0.5
            arguments |= {
                "action_mask": mask.long(),
                "messages": [{"role": "user", "content": "naïve 東京\x00"}, {"role": "tool"}],
                "tools": [{"type": "function", "function": {"name": "f", "items": []}}],
            }
        case "shared_tensors":
            arguments |= {"advantages": logprobs, "returns": logprobs, "teacher_logprobs": logprobs}
        case "requires_grad":
            arguments |= {"logprobs": logprobs.clone().requires_grad_()}
        case "bf16_strided":
            wide = torch.randn(num_responses, 2, generator=generator)
            arguments |= {"logprobs": wide.bfloat16()[:, 1], "returns": wide[:, 0].flip(0)}
        case "routed":
            arguments |= {
                "routed_experts": torch.randint(0, 128, (num_tokens - 1, 3, 2)).to(torch.uint8)
            }
            torch.manual_seed(0)
        case "multi_modal":
            arguments |= {
                "multi_modal_inputs": {
                    "": torch.zeros(0, 3),
                    "a:b": torch.ones(2, 2, 2),
                    'q"\\\n\x7f\u2028é': torch.tensor(7),
                    "pixel_values": [[1, 2], [3, 4]],
                }
            }
        case "dpo":
            arguments |= {"chosen": tokens[:3], "rejected": [1, 2], "chosen_messages": [{"a": 1}]}
        case "custom_fields":
            arguments |= {
                "custom_fields": [
                    classes["custom_field"]("step", "step_ids", torch.int64),
                    classes["custom_field"]("model_version", "versions", torch.float32),
                ]
            }
        case "odd_plain_data":
            arguments["info"] |= {
                "tuple": (1, ("a", None)),
                "big": 2**200,
                "neg": -(2**63) - 1,
                "bytes": b"\x00\xff" * 200,
                "long": "x" * 70_000,
                "nan": float("nan"),
                "surrogate": "\ud83d",
                "keys": {1: 2, (1, 2): 3, None: 4, b"k": 5},
                "frozen": frozenset({7}),
                "set": {3},
                "empty": [(), {}, [], "", b"", set()],
            }
            shared = {"shared": [1]}
            arguments["info"]["twice"] = [shared, shared]
        case "truncated":
            arguments |= {"truncate_status": "prompt_truncated", "tokens": tokens[:1]}
    return classes["experience"](**arguments)


KINDS = [
    "plain",
    "lists",
    "multi_turn",
    "shared_tensors",
    "requires_grad",
    "bf16_strided",
    "multi_modal",
    "dpo",
    "custom_fields",
    "odd_plain_data",
    "truncated",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 5])
def test_a_single_is_byte_identical(kind: str, index: int) -> None:
    expected = build(index, kind, _THEIRS).serialize()
    assert build(index, kind, _OURS).serialize() == expected
    assert trxp.split(expected) == [expected]
    (item,) = trxp.read(expected)
    assert isinstance(item, trxp.Item)
    assert item.encode() == expected


def test_routed_experts_are_byte_identical() -> None:
    torch.manual_seed(1)
    theirs = build(2, "routed", _THEIRS)
    torch.manual_seed(1)
    ours = build(2, "routed", _OURS)
    assert ours.serialize() == theirs.serialize()
    assert Experience.deserialize(theirs.serialize()).routed_experts.equal(theirs.routed_experts)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_batch_and_its_parts_are_byte_identical(kind: str) -> None:
    kinds = KINDS if kind == "mixed" else [kind]
    theirs = [build(i, kinds[i % len(kinds)], _THEIRS) for i in range(23)]
    ours = [build(i, kinds[i % len(kinds)], _OURS) for i in range(23)]
    expected = trinity.Experience.serialize_many(theirs)
    assert Experience.serialize_many(ours) == expected
    assert trxp.split(expected) == [each.serialize() for each in theirs]
    assert trxp.merge([expected]) == expected


def test_merged_singles_are_the_batch_if_only_keys_are_shared() -> None:
    theirs = [build(i, "plain", _THEIRS) for i in range(11)]
    singles = [each.serialize() for each in theirs]
    assert trxp.merge(singles) == trinity.Experience.serialize_many(theirs)
    assert trxp.merge([]) == trinity.Experience.serialize_many([])
    batch = (DATA / "batch_64.bin").read_bytes()
    assert trxp.merge(trxp.split(batch)) == batch


@pytest.mark.parametrize("kind", KINDS)
def test_added_tensors_are_byte_identical(kind: str) -> None:
    before, after = build(3, kind, _THEIRS), build(3, kind, _THEIRS)
    after.advantages = torch.linspace(-1, 1, 13)
    after.returns = torch.arange(13).double()
    payload = trxp.with_tensors(
        before.serialize(),
        {"advantages": tensor_view(after.advantages), "returns": tensor_view(after.returns)},
    )
    assert payload == after.serialize()


def test_extra_tensors_lie_where_safetensors_puts_them() -> None:
    extra = {
        "values": torch.randn(7).half(),
        "versions": torch.arange(5),
        "a:b": torch.tensor(True),
        "z": torch.randn(2, 3, dtype=torch.complex64),
        "eights": torch.randn(5).to(torch.float8_e4m3fn),
    }
    experience = Experience(tokens=[1, 2, 3], prompt_length=1, extra=extra)
    payload = experience.serialize()
    tensors = {"0:tokens": experience.tokens, "0:action_mask": experience.action_mask}
    assert payload.endswith(save(tensors | {f"0:{name}": t for name, t in extra.items()}))  # type: ignore[arg-type]
    back = Experience.deserialize(payload)
    assert back.extra.keys() == extra.keys()
    for name, tensor in extra.items():
        assert back.extra[name].dtype == tensor.dtype
        assert back.extra[name].shape == tensor.shape
        assert tensor_view(back.extra[name]).data == tensor_view(tensor).data
    assert trinity.Experience.deserialize(payload).tokens.tolist() == [1, 2, 3]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return (
            bool(ours.dtype == theirs.dtype) and ours.shape == theirs.shape and ours.equal(theirs)
        )
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, trinity.EID):
        return bool(ours.to_dict() == theirs.to_dict())
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, trinity.CustomField):
        return bool(vars(theirs) == {name: getattr(ours, name) for name in vars(theirs)})
    return bool(ours == theirs or (ours != ours and theirs != theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_equal_attributes(kind: str) -> None:
    payload = build(4, kind, _THEIRS).serialize()
    theirs = trinity.Experience.deserialize(payload)
    ours = Experience.deserialize(payload)
    assert ours.to_dict().keys() == theirs.to_dict().keys()
    for name, value in vars(theirs).items():
        assert same(getattr(ours, name), value), name


def test_numpy_scalars_are_written_as_python_numbers() -> None:
    numpy = importlib.import_module("numpy")
    arguments = {"eid": {"suffix": "n"}, "tokens": [1, 2, 3], "prompt_length": 1}
    given = {"f": numpy.float64(0.5), "l": [numpy.int32(3), (numpy.bool_(True), numpy.str_("x"))]}
    plain = {"f": 0.5, "l": [3, (True, "x")]}
    payload = Experience(**arguments, reward=numpy.float32(0.25), info=given).serialize()  # type: ignore[arg-type]
    assert payload == Experience(**arguments, reward=0.25, info=plain).serialize()  # type: ignore[arg-type]
    assert b"numpy" not in payload
    theirs = trinity.Experience(**arguments, reward=numpy.float32(0.25), info=given).serialize()
    assert b"numpy" in theirs
    assert Experience.deserialize(theirs).info == plain
    assert type(Experience.deserialize(theirs).info["f"]) is float


def test_both_spellings_of_numpys_module_are_read() -> None:
    numpy = importlib.import_module("numpy")
    theirs = trinity.Experience(
        eid={"suffix": "n"}, tokens=[1, 2], prompt_length=1, reward=numpy.float64(0.125)
    ).serialize()
    old = pickle.dumps("numpy.core.multiarray", 4)[11:-2]
    new = pickle.dumps("numpy._core.multiarray", 4)[11:-2]
    assert theirs.count(new) == 1
    changed = bytearray(theirs.replace(new, old))
    changed[5] -= 1
    changed[24] -= 1
    assert Experience.deserialize(changed).reward == 0.125
