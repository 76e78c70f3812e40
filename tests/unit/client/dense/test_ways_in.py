"""What is given to an experience is kept as it is, or refused by field and value."""

from __future__ import annotations

import array
import copy
import pickle
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import EID, Experience, InvalidRequestError, TrxpError, trxp
from experience_buffer._dense.rules import RULES


def made(**fields: Any) -> Experience:
    given: dict[str, Any] = {"tokens": [11, 13, 17], "prompt_length": 1} | fields
    return Experience(**given)


def assigned(**fields: Any) -> Experience:
    experience = made()
    for name, value in fields.items():
        setattr(experience, name, value)
    return experience


def put(**fields: Any) -> Experience:
    """In `extra`, under a name that an attribute has too."""
    experience = made()
    for name, value in fields.items():
        experience.extra[name] = value
    return experience


LOST: list[tuple[str, Any, str]] = [
    ("tokens", [11, 1.7, 3], r"tokens\[1\] is 1.7; token ids are whole numbers"),
    ("tokens", [1.0, 2.0], r"tokens\[0\] is 1.0"),
    ("tokens", [1, True], r"tokens\[1\] is True"),
    ("tokens", [1, None], r"tokens\[1\] is None"),
    ("tokens", [1, float("nan")], r"tokens\[1\] is nan"),
    ("tokens", ["1", "2"], r"tokens\[0\] is '1'"),
    ("tokens", [1, 2**31], r"tokens\[1\] is 2147483648, beyond int32 \(-2147483648 to 21"),
    ("tokens", [1, -(2**31) - 1], r"tokens\[1\] is -2147483649, beyond int32"),
    ("tokens", [np.int64(1), np.int64(2**40)], r"tokens\[1\] is .*1099511627776.*, beyond int32"),
    ("tokens", (1, 2.5), r"tokens\[1\] is 2.5"),
    ("tokens", [torch.tensor(1), torch.tensor(2.5)], r"tokens\[1\] is 2.5"),
    ("tokens", torch.tensor([1.0, 2.5]), r"tokens\[1\] is 2.5, of torch.float32; .* integer dtype"),
    ("tokens", torch.tensor([True]), r"tokens\[0\] is True, of torch.bool"),
    ("tokens", np.array([1.0, 2.0]), r"tokens\[0\] is 1.0, of float64"),
    ("tokens", np.array([1, 2.5], dtype=object), r"tokens\[1\] is 2.5"),
    ("tokens", np.ma.masked_less(np.array([1, 2]), 2), "tokens is a masked array"),
    ("tokens", array.array("f", [1.0]), r"tokens\[0\] is 1.0, of float32"),
    (
        "tokens",
        torch.tensor([[1, 2]]),
        r"tokens has shape \[1, 2\]; .* have \[n\]; take tokens\[0\]",
    ),
    ("tokens", np.array([[1, 2]]), r"tokens has shape \[1, 2\]"),
    ("tokens", [[1, 2]], r"tokens has shape \[1, 2\]"),
    ("tokens", torch.tensor(5), r"tokens has shape \[\]"),
    ("tokens", 5, r"tokens is 5; token ids"),
    ("tokens", "abc", r"tokens is 'abc'; token ids"),
    ("tokens", b"abc", r"tokens is b'abc' \(bytes\)"),
    ("tokens", {1, 2}, r"tokens is {1, 2}; token ids"),
    ("tokens", iter([1, 2]), r"tokens is <list_iterator"),
    ("chosen", [1, 1.5], r"chosen\[1\] is 1.5"),
    ("rejected", torch.tensor([1.5]), r"rejected\[0\] is 1.5, of torch.float32"),
    ("action_mask", [1, 0.5], r"action_mask\[1\] is 0.5; a mask holds True and False, or 1 and 0"),
    ("action_mask", [1, 2], r"action_mask\[1\] is 2"),
    ("action_mask", [None, 1], r"action_mask\[0\] is None"),
    ("action_mask", ["a", 1], r"action_mask\[0\] is 'a'"),
    ("logprobs", [-0.5, -1e300], r"logprobs\[1\] is -1e\+300, beyond float32"),
    ("logprobs", [None, -0.5], r"logprobs\[0\] is None; give numbers"),
    ("logprobs", [-0.5, 10**400], r"logprobs\[1\] is 1000.*float32"),
    ("logprobs", np.zeros(2, "c16"), "logprobs is an array of complex128"),
    ("token_level_reward", [0.5, 2**24 + 1], r"\[1\] is 16777217, which float32 would round"),
    ("advantages", ["x"], r"advantages\[0\] is 'x'"),
    (
        "returns",
        [[1.0], [2.0, 3.0]],
        r"returns\[1\] is \[2.0, 3.0\], 2 long, where the first has 1",
    ),
    ("teacher_logprobs", [[1.0], 2.0], r"teacher_logprobs\[1\] is 2.0"),
    (
        "routed_experts",
        [[[3], [-1]]],
        r"routed_experts\[0\]\[1\]\[0\] is -1, beyond uint8 \(0 to 255",
    ),
    ("routed_experts", [[[256]]], r"routed_experts\[0\]\[0\]\[0\] is 256, beyond uint8"),
    ("routed_experts", [[[1.7]]], r"routed_experts\[0\]\[0\]\[0\] is 1.7"),
    ("values", [1e39], r"values'?\]?\[0\] is 1e\+39, beyond float32"),
    ("ref_logprobs", [None], r"ref_logprobs'?\]?\[0\] is None"),
    ("versions", [3, 2.5], r"versions'?\]?\[1\] is 2.5; versions are whole numbers"),
    ("versions", [3, 2**63], r"versions'?\]?\[1\] is .*, beyond int64"),
]


@pytest.mark.parametrize(("name", "value", "text"), LOST)
def test_what_would_lose_something_is_refused_by_field_and_value(
    name: str, value: Any, text: str
) -> None:
    ways: list[Callable[..., Experience]] = [made, assigned]
    if name in ("values", "ref_logprobs", "versions"):
        ways += [put, lambda **fields: made(extra=fields)]
    for way in ways:
        if name == "tokens" or not isinstance(value, type(iter([]))):
            with pytest.raises(InvalidRequestError, match=text) as refused:
                way(**{name: value})
            assert name in refused.value.subject


class Speechless:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("value", [Speechless(), [Speechless()], {"a": Speechless()}])
@pytest.mark.parametrize("name", [*RULES, "eid", "reward", "prompt_length", "num_turns", "extra"])
def test_what_has_no_text_is_refused_by_its_type(name: str, value: Any) -> None:
    for way in (made, assigned):
        with pytest.raises(InvalidRequestError, match=rf"{name}.* is a .*that can't be shown"):
            way(**{name: value if name != "extra" else {"a": value}})


@pytest.mark.parametrize(
    ("name", "cure"),
    [("rewrad", "did you mean 'reward'"), ("local_id", "put it into info, or begin its name")],
)
def test_an_attribute_that_nobody_reads_is_not_sent_in_silence(name: str, cure: str) -> None:
    experience = assigned(**{name: 0.5})
    with pytest.raises(TrxpError, match=f"'{name}' is no field of an Experience and.*; {cure}"):
        experience.serialize()
    delattr(experience, name)
    setattr(experience, f"_{name}", 0.5)
    assert trxp.decode(experience.serialize())[0].reward is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("action_mask", torch.tensor([1, 0.5])),
        ("action_mask", np.array([3, 1], "u1")),
        ("logprobs", torch.zeros(2, dtype=torch.complex64)),
        ("versions", torch.tensor([3.0, 4.5])),
        ("routed_experts", np.array([[[1.0]], [[2.5]]], "f4")),
    ],
)
def test_an_array_or_tensor_is_kept_to_the_bit_for_who_computes_with_it(
    name: str, value: Any
) -> None:
    for way in (made, assigned):
        back = Experience.deserialize(way(**{name: value}).serialize())
        assert getattr(back, name).equal(torch.as_tensor(value))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokens", (1, 2), torch.tensor([1, 2], dtype=torch.int32)),
        ("tokens", range(1, 3), torch.tensor([1, 2], dtype=torch.int32)),
        ("tokens", deque([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        ("tokens", [np.int64(1), torch.tensor(2)], torch.tensor([1, 2], dtype=torch.int32)),
        ("tokens", np.array([1, 2], ">i8"), torch.tensor([1, 2])),
        ("tokens", np.array([1, 9, 2])[::2], torch.tensor([1, 2])),
        ("tokens", np.array([1, 2], object), torch.tensor([1, 2], dtype=torch.int32)),
        ("tokens", array.array("h", [1, 2]), torch.tensor([1, 2], dtype=torch.int16)),
        ("tokens", np.array([1, 2**33]), torch.tensor([1, 2**33])),
        ("action_mask", [0.0, True], torch.tensor([False, True])),
        ("action_mask", [np.bool_(True), 0], torch.tensor([True, False])),
        ("action_mask", torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])),
        ("action_mask", np.array([1, 0], "u1"), torch.tensor([1, 0], dtype=torch.uint8)),
        ("logprobs", [0, Fraction(-1, 2)], torch.tensor([0, -0.5])),
        ("logprobs", [np.float32(0.1), np.float64(0.5)], torch.tensor([0.1, 0.5])),
        ("logprobs", [2**24, 2**30], torch.tensor([2.0**24, 2.0**30])),
        ("logprobs", [float("-inf"), 0.0], torch.tensor([float("-inf"), 0.0])),
        ("logprobs", [], torch.tensor([])),
        ("returns", [[1, 2], [3, 4]], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ("returns", [np.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ("returns", np.ones((2, 0), "f2"), torch.ones((2, 0), dtype=torch.float16)),
        ("routed_experts", [[[255]], [[0]]], torch.tensor([[[255]], [[0]]], dtype=torch.uint8)),
        ("routed_experts", np.array([[[300]]], "i2"), torch.tensor([[[300]]], dtype=torch.int16)),
        ("versions", [3, -1], torch.tensor([3, -1])),
    ],
)
def test_what_loses_nothing_is_taken(name: str, value: Any, expected: torch.Tensor) -> None:
    for way in (made, assigned):
        fields = {"prompt_length": 1, "action_mask": [1]} if name == "tokens" else {}
        experience = way(**fields, **{name: value})
        for each in (experience, Experience.deserialize(experience.serialize())):
            found = getattr(each, name)
            assert found.dtype == expected.dtype
            assert found.equal(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([1, 2.5], torch.tensor([1.0, 2.5])),
        ([True, False], torch.tensor([True, False])),
        ([[True], [3]], torch.tensor([[1], [3]])),
        ([], torch.tensor([])),
        (np.array(7, "u2"), torch.tensor(7, dtype=torch.uint16)),
        (np.ones(2, "c8"), torch.ones(2, dtype=torch.complex64)),
    ],
)
def test_a_list_of_another_name_becomes_what_torch_makes_of_it(
    value: Any, expected: torch.Tensor
) -> None:
    made_of = made(extra={"x": value}, multi_modal_inputs={"x": value})
    for each in (made_of, Experience.deserialize(made_of.serialize())):
        assert each.multi_modal_inputs is not None
        for found in (each.extra["x"], each.multi_modal_inputs["x"]):
            assert found.dtype == expected.dtype
            assert found.equal(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([2**63], r"\[0\] is 9223372036854775808, beyond int64"),
        ([1e300], r"\[0\] is 1e\+300, beyond float32"),
        ([0.5, 2**24 + 1], r"\[1\] is 16777217, which float32 would round"),
        (["x"], r"\[0\] is 'x'"),
        (None, "is None"),
        (object(), "is <object object"),
        (np.array(["x"]), "is an array of <U1"),
        (np.zeros(1, "c16"), "is an array of complex128"),
    ],
)
def test_so_is_refused_what_it_would_lose(value: Any, text: str) -> None:
    for name in ("extra", "multi_modal_inputs"):
        where = rf"{name}\['x'\]{text if text[0] == chr(92) else ' ' + text}"
        with pytest.raises(InvalidRequestError, match=where):
            made(**{name: {"x": value}})
        experience = made(**{name: {}})
        with pytest.raises(InvalidRequestError, match=where):
            getattr(experience, name)["x"] = value
        with pytest.raises(InvalidRequestError, match=where):
            setattr(experience, name, {"x": value})
        with pytest.raises(InvalidRequestError, match=f"{name} is a list; give a dict"):
            setattr(experience, name, [value])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(3), 3.0),
        (np.array(0.5), 0.5),
        (np.array([[0.5]]), 0.5),
        (np.float32(0.1), 0.10000000149011612),
        (np.int64(2), 2.0),
        (2, 2),
        (True, True),
        (None, None),
    ],
)
def test_a_reward_is_a_number_or_what_holds_one(value: Any, expected: object) -> None:
    for way in (made, assigned):
        reward = way(reward=value).reward
        assert reward == expected
        assert type(reward) is type(expected)


@pytest.mark.parametrize(
    "value",
    [
        *("0.5", b"1", [0.5], 1j, 10**400, 2**53 + 1, object()),
        *(torch.ones(2), np.ones(2), np.array("x")),
    ],
)
def test_what_is_no_number_is_no_reward(value: Any) -> None:
    for way in (made, assigned):
        with pytest.raises(InvalidRequestError, match=r"reward is .*; give a"):
            way(reward=value)


def test_a_prompt_length_is_a_whole_number_also_when_it_is_set() -> None:
    assert assigned(prompt_length=np.int64(2)).prompt_length == 2
    for value in (1.0, 1.5, True, "1", None, torch.tensor(1.0), torch.tensor(True)):
        with pytest.raises(InvalidRequestError, match=r"prompt_length is .*; give a whole number"):
            assigned(prompt_length=value)


def test_the_prompt_and_the_response_are_named_where_one_is_wrong() -> None:
    for name, other in (("prompt", "response"), ("response", "prompt")):
        fields: dict[str, Any] = {name: [1, 2.5], other: [3]}
        with pytest.raises(InvalidRequestError, match=rf"{name}\[1\] is 2.5; token ids"):
            Experience(**fields)
    wide = Experience(prompt=np.array([1, 2], "u2"), response=torch.tensor([3, 4]))
    assert wide.tokens.tolist() == [1, 2, 3, 4]


def test_an_identity_may_be_given_by_its_parts() -> None:
    parts = {"batch": 3, "task": "t", "run": np.int64(5), "step": 7, "suffix": "a"}
    assert made(eid=parts).eid == EID(3, "t", 5, 7, "a")
    other = type("Other", (), parts)()
    assert assigned(eid=other).eid == EID(3, "t", 5, 7, "a")
    for wrong in ("3/t/5/7/a", {"batch": 1, "x": 2}, 7):
        with pytest.raises(InvalidRequestError, match=r"eid is .*; give EID"):
            assigned(eid=wrong)


def test_what_is_changed_in_a_tensor_that_was_read_is_sent() -> None:
    experience = made(logprobs=[-0.5, -0.25], extra={"x": np.zeros(2)})
    before = experience.serialize()
    assert experience.logprobs is experience.logprobs
    assert experience.extra["x"] is experience.extra["x"]
    assert experience.serialize() == before
    assert experience.logprobs is not None
    experience.logprobs[1] = -2.0
    experience.extra["x"][0] = 3.0
    back = Experience.deserialize(experience.serialize())
    assert back.logprobs is not None
    assert (back.logprobs.tolist(), back.extra["x"].tolist()) == ([-0.5, -2.0], [3.0, 0.0])
    back.logprobs[0] = -3.0
    assert Experience.deserialize(back.serialize()).logprobs.tolist() == [-3.0, -2.0]  # type: ignore[union-attr]


def test_an_array_that_was_given_is_its_owners() -> None:
    given = np.array([-0.5, -0.25])
    experience = made(logprobs=given)
    given[:] = 7
    assert experience.logprobs is not None
    experience.logprobs[0] = 9
    assert (given.tolist(), experience.logprobs.tolist()) == ([7, 7], [9, -0.25])


def test_copies_and_pickles_hold_the_same_before_and_after_tensors_were_read() -> None:
    experience = made(logprobs=[-0.5, -0.25], extra={"x": [1, 2]}, reward=0.5)
    expected = experience.serialize()
    for _ in range(2):
        others: list[Any] = [copy.deepcopy(experience), pickle.loads(pickle.dumps(experience))]
        for other in others:
            assert other.serialize() == expected
            other.logprobs[0] = 3.0
            assert experience.serialize() == expected
        shallow = copy.copy(experience)
        shallow.logprobs = [1.0, 2.0]
        assert experience.serialize() == expected
        assert experience.logprobs is not None
        assert experience.extra["x"].tolist() == [1, 2]


def test_extra_is_a_mapping_of_tensors() -> None:
    extra = made(extra={"x": [1], "y": torch.ones(2)}).extra
    assert (list(extra), len(extra), "x" in extra, "z" in extra) == (["x", "y"], 2, True, False)
    assert extra.get("z") is None
    del extra["x"]
    assert (repr(extra), set(extra.keys())) == (repr({"y": torch.ones(2)}), {"y"})
    assert made(extra=extra).extra["y"] is extra["y"]


@pytest.mark.parametrize("attribute", ["extra", "multi_modal_inputs"])
def test_names_of_tensors_are_texts(attribute: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{attribute} has the key 1; names are texts"):
        made(**{attribute: {1: [1.0]}})


def test_a_view_of_a_payload_is_kept_as_it_is() -> None:
    payload = made(tokens=[1, 2, 3]).serialize()
    (item,) = trxp.read(payload)
    assert isinstance(item, trxp.Item)
    assert made(tokens=item.tensors["tokens"]).tokens.tolist() == [1, 2, 3]
