"""What annotations become on the wire, before any call."""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import ClientOptions, InvalidRequestError, MessageTooLargeError
from experience_buffer._codec import safetensors
from experience_buffer._messages import annotate, convert
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

OPTIONS = ClientOptions()


def requests(
    annotations: Mapping[str, Mapping[str, Any]], options: ClientOptions = OPTIONS
) -> list[pb.AnnotateRequest]:
    return annotate.requests(annotations, buffer="math", options=options)


def one(**fields: Any) -> pb.Annotation:
    [request] = requests({"3/5/7/0/a": fields})
    assert request.buffer == "math"
    [annotation] = request.annotations
    assert annotation.uid == "3/5/7/0/a"
    return annotation


def tensors(annotation: pb.Annotation) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    views = safetensors.read(memoryview(annotation.tensors), max_header_bytes=4096)
    return {name: (view.dtype, view.shape, bytes(view.data)) for name, view in views}


def test_each_kind_goes_where_the_server_looks_for_it() -> None:
    annotation = one(
        values=[0.5, 1, 2.25],
        versions=[11, -1, 13],
        reward=0.75,
        baseline_reward=0.25,
        env_state_hash="ab12",
        num_turns=3,
        judge="strict",
        score=5,
        info={"turn_rewards": [1, 0.5], "nested": {"ok": True, "none": None}},
    )
    assert annotation.reward == 0.75
    assert tensors(annotation) == {
        "values": ("F32", (3,), np.array([0.5, 1, 2.25], "<f4").tobytes()),
        "versions": ("I64", (3,), np.array([11, -1, 13], "<i8").tobytes()),
    }
    assert convert.struct_to_dict(annotation.info) == {
        "baseline_reward": 0.25,
        "env_state_hash": "ab12",
        "num_turns": 3,
        "judge": "strict",
        "score": 5,
        "turn_rewards": [1, 0.5],
        "nested": {"ok": True, "none": None},
    }


def test_what_is_not_given_stays_absent() -> None:
    only_values = one(values=(1.0,))
    assert not only_values.HasField("reward")
    assert not only_values.HasField("info")
    assert tensors(one(values=[])) == {"values": ("F32", (0,), b"")}
    only_reward = one(reward=0)
    assert only_reward.HasField("reward")
    assert only_reward.tensors == b""


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.arange(6.0), "F32"),
        (torch.arange(6).bfloat16(), "BF16"),
        (torch.arange(12.0)[::2], "F32"),
        (torch.arange(6.0).requires_grad_(), "F32"),
        (torch.arange(6), "I64"),
        (np.arange(6.0), "F64"),
        (np.arange(6, dtype="f2"), "F16"),
        (np.arange(12, dtype="i4")[::2], "I32"),
        (np.array([True, False]), "BOOL"),
        (array.array("f", [1, 2, 3]), "F32"),
        (torch.zeros(2, 3), "F32"),
        (np.zeros((2, 3), "f4"), "F32"),
        ([[0.5, 1], [2, 3]], "F32"),
        (np.arange(6, dtype=">i4").astype(">f4"), "F32"),
        ([np.float32(0.5), torch.tensor(2.0), True], "F32"),
    ],
)
def test_arrays_and_tensors_keep_their_dtype_and_elements(value: Any, dtype: str) -> None:
    if isinstance(value, torch.Tensor):
        expected = value.detach().contiguous()
    else:
        expected = torch.from_numpy(np.array(value, dtype="f4" if dtype == "F32" else None))
    [(code, shape, data)] = tensors(one(values=value)).values()
    assert (code, shape) == (dtype, tuple(expected.shape))
    assert data == bytes(expected.flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("rewrad", 0.5, "reward"),
        ("rewards", 0.5, "reward"),
        ("value", [0.5], "values"),
        ("logprob", [0.5], "logprobs"),
        ("ref_log_probs", torch.zeros(3), "ref_logprobs"),
        ("version", [1], "versions"),
        ("basline_reward", 0.5, "baseline_reward"),
        ("infos", {"a": 1}, "info"),
    ],
)
def test_a_slip_of_the_pen_becomes_no_field(name: str, value: Any, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"; did you mean '{meant}'\\?"):
        one(**{name: value})
    assert one(info={name: 0.5}).info[name] == 0.5


@pytest.mark.parametrize("name", ["old_logprobs", "new_logprobs", "score", "entropy", "kl", "step"])
def test_other_names_are_fields_of_their_own(name: str) -> None:
    assert list(tensors(one(**{name: [0.5]}))) == [name]


def test_scalars_of_numpy_and_torch_are_numbers() -> None:
    annotation = one(
        reward=np.float32(0.5),
        baseline_reward=torch.tensor(0.25),
        num_turns=np.int64(2),
        env_state_hash=np.str_("ab"),
        score=np.float64(1.5),
        info={"x": [np.int32(3), torch.tensor(True)]},
    )
    assert annotation.reward == 0.5
    assert convert.struct_to_dict(annotation.info) == {
        "baseline_reward": 0.25,
        "num_turns": 2,
        "env_state_hash": "ab",
        "score": 1.5,
        "x": [3, True],
    }


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"values": 0.5}, "'values'"),
        ({"values": None}, "'values'"),
        ({"values": torch.tensor(0.5)}, "'values'"),
        ({"values": [[0.5], [1.5, 2.5]]}, "'values'"),
        ({"values": ["a"]}, "'values'"),
        ({"values": [1e39]}, "'values'"),
        ({"values": b"abcd"}, "'values'"),
        ({"values": {1.0}}, "'values'"),
        ({"values": np.array(["a"])}, "'values'"),
        ({"values": np.zeros(2, "c16")}, "'values'"),
        ({"values": torch.zeros(3).to_sparse()}, "'values'"),
        ({"versions": [1.5]}, "'versions'"),
        ({"versions": [2**63]}, "'versions'"),
        ({"reward": "high"}, "'reward'"),
        ({"reward": None}, "'reward'"),
        ({"reward": 2**53 + 1}, "'reward'"),
        ({"baseline_reward": 10**400}, "'baseline_reward'"),
        ({"reward": [0.5, 0.5]}, "'reward'"),
        ({"baseline_reward": "0.5"}, "'baseline_reward'"),
        ({"env_state_hash": 7}, "'env_state_hash'"),
        ({"num_turns": 2.5}, "'num_turns'"),
        ({"anything": None}, "'anything'"),
        ({"anything": object()}, "'anything'"),
        ({"anything": {"a": 1}}, "'anything'"),
        ({"score": 2**53 + 1}, "'score'"),
        ({"prompt_length": 3}, "'prompt_length'"),
        ({"messages": []}, "'messages'"),
        ({"info": [1]}, "'info'"),
        ({"info": {"a": {"b": object()}}}, r"'info'\]\['a'\]\['b'\]"),
        ({"info": {"a": [1, np.zeros(2)]}}, r"'info'\]\['a'\]\[1\]"),
        ({"info": {3: 1}}, "'info'"),
        ({"info": {"a": {3: 1}}}, r"'info'\]\['a'\]"),
        ({"info": {"score": 1}, "score": 2}, "'score'.*twice"),
        ({"judge": "\ud800"}, "u1.*surrogate"),
        ({"\ud800": [1.0]}, "surrogate"),
        ({}, "at least one field"),
        ([("values", [1.0])], "mapping"),
        ({3: [1.0]}, "3"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(fields: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        requests({"good": {"reward": 1}, "u1": fields})


def test_lists_inside_one_another_have_a_limit() -> None:
    nested: Any = 1.0
    for _ in range(16):
        nested = {"a": nested}
    assert pb.Annotation.FromString(one(info={"a": nested}).SerializeToString())
    with pytest.raises(InvalidRequestError, match="16 deep"):
        one(info={"a": {"a": nested}})


@pytest.mark.parametrize("annotations", [[("u", {"reward": 1})], None, {7: {"reward": 1}}])
def test_annotations_are_a_mapping_by_uid(annotations: Any) -> None:
    with pytest.raises(InvalidRequestError, match="annotations"):
        requests(annotations)


def test_requests_hold_at_most_so_many() -> None:
    made = requests({f"u{i}": {"reward": i} for i in range(2 * 4096 + 3)})
    assert [len(request.annotations) for request in made] == [4096, 4096, 3]
    uids = [annotation.uid for request in made for annotation in request.annotations]
    assert uids == [f"u{i}" for i in range(2 * 4096 + 3)]


def test_requests_are_cut_by_size_and_what_is_larger_goes_alone() -> None:
    options = ClientOptions(max_push_bytes=20_000)
    sizes = [1000, 3000, 1000, 7000, 500, 500]
    made = requests({f"u{i}": {"values": [0.5] * n} for i, n in enumerate(sizes)}, options)
    assert [len(request.annotations) for request in made] == [2, 1, 1, 2]


def test_requests_fit_into_messages() -> None:
    options = ClientOptions(max_message_bytes=64 * 1024)
    made = requests({f"u{i}": {"values": [0.5] * 3_000} for i in range(10)}, options)
    assert [len(request.annotations) for request in made] == [4, 4, 2]
    assert all(request.ByteSize() <= options.max_message_bytes for request in made)


def test_one_over_the_message_limit_is_named() -> None:
    options = ClientOptions(max_message_bytes=64 * 1024)
    with pytest.raises(MessageTooLargeError, match=r"annotation of u1 takes .*max_message_bytes"):
        requests({"u0": {"reward": 1}, "u1": {"values": [0.5] * 13_000}}, options)


def test_a_refusal_that_only_a_newer_server_knows_is_still_one() -> None:
    outcome = convert.annotate_outcome(types_pb2.AnnotateOutcome(uid="u", refusal=77, message="m"))  # type: ignore[arg-type]
    assert (outcome.status, outcome.reason, outcome.message) == ("refused", "", "m")
