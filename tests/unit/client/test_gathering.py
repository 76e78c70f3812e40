from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experience_buffer import collation
from experience_buffer.eid import EID
from experience_buffer.experience import CustomField, Experience
from tests.unit.builders import hold

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"


@pytest.fixture
def experiences() -> list[Experience]:
    return [
        Experience(
            eid=EID(2, 3, run, step, f"{run}{step}"),
            tokens=torch.arange(10 * run, 10 * run + num_tokens),
            prompt_length=prompt_length,
            logprobs=torch.full((num_tokens - prompt_length,), -float(run), dtype=torch.float64),
            extra={"values": torch.ones(num_tokens - prompt_length, 2)},
            multi_modal_inputs={"a": torch.full((run,), 1), "b": torch.tensor(run)},
        )
        for run, step, num_tokens, prompt_length in ((1, 0, 5, 3), (2, 0, 4, 1), (2, 1, 7, 5))
    ]


def test_padding_matches_by_hand(experiences: list[Experience]) -> None:
    assert collation.gather_token_ids(experiences, 5, 3, 99).tolist() == [
        [99, 99, 10, 11, 12, 13, 14, 99],
        [99, 99, 99, 99, 20, 21, 22, 23],
        [20, 21, 22, 23, 24, 25, 26, 99],
    ]
    assert collation.gather_attention_masks(experiences, 5, 3).int().tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0],
    ]
    assert collation.gather_action_masks(experiences, 3).tolist() == [
        [True, True, False],
        [True, True, True],
        [True, True, False],
    ]
    logprobs = collation.gather_response_attrs(experiences, "logprobs", 3, 7)
    assert logprobs.dtype == torch.float64
    assert logprobs.tolist() == [[-1, -1, 7], [-2, -2, -2], [-2, -2, 7]]


def test_padding_matches_trinitys_functions(experiences: list[Experience]) -> None:
    theirs = importlib.import_module("trinity.common.experience")
    for name, arguments in (
        ("gather_token_ids", (7, 11, 5)),
        ("gather_attention_masks", (7, 11)),
        ("gather_action_masks", (11,)),
        ("gather_response_attrs", ("logprobs", 11)),
    ):
        ours = getattr(collation, name)(experiences, *arguments)
        expected = getattr(theirs, name)(experiences, *arguments)
        assert ours.equal(expected), name
        assert ours.dtype == expected.dtype, name


def test_extra_tensors_are_gathered_by_name(experiences: list[Experience]) -> None:
    values = collation.gather_response_attrs(experiences, "values", 5)
    assert values.shape == (3, 5, 2)
    assert values.sum(dim=(1, 2)).tolist() == [4, 6, 4]


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("gather_token_ids", (4, 3, 0), "2/3/2/1/21 has 5 \\+ 2 tokens"),
        ("gather_token_ids", (5, 2, 0), "has 1 \\+ 3 tokens"),
        ("gather_attention_masks", (4, 3), "room for 4 \\+ 3"),
        ("gather_action_masks", (2,), "3 response tokens; the batch has room for 2"),
        ("gather_response_attrs", ("advantages", 3), "2/3/1/0/10 has no advantages"),
    ],
)
def test_what_does_not_fit_is_refused(
    experiences: list[Experience], name: str, arguments: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        getattr(collation, name)(experiences, *arguments)


def test_multi_modal_inputs_are_listed(experiences: list[Experience]) -> None:
    inputs = collation.gather_multi_modal_inputs(experiences)
    assert list(inputs) == ["a", "b"]
    assert [len(tensor) for tensor in inputs["a"]] == [1, 2, 2]
    with pytest.raises(ValueError, match="has no multi_modal_inputs"):
        collation.gather_multi_modal_inputs([Experience(tokens=[1, 2], prompt_length=1)])


@pytest.mark.parametrize("order", [1, -1])
def test_a_multi_modal_input_that_one_lacks_is_named(order: int) -> None:
    members = [
        Experience(
            eid=EID(0, 0, run, suffix="a"),
            tokens=[1, 2],
            prompt_length=1,
            multi_modal_inputs={key: torch.ones(2) for key in ("pixels", "grid")[: 2 - run]},
        )
        for run in range(2)
    ]
    reason = r"0/0/1/0/a has no multi_modal_inputs\['grid'\], which 0/0/0/0/a has"
    with pytest.raises(ValueError, match=reason):
        collation.gather_multi_modal_inputs(members[::order])


def short(run: int, **fields: Any) -> Experience:
    return Experience(
        eid=EID(0, 0, run, suffix="a"), tokens=torch.arange(3 + run), prompt_length=1, **fields
    )


def test_gathering_loses_nothing() -> None:
    mixed = [
        short(0, extra={"versions": torch.tensor([1, 2])}),
        short(1),
    ]
    hold(mixed[1], versions=torch.tensor([0.5, 1, 2]))
    found = collation.gather_response_attrs(mixed, "versions", 3)
    assert found.tolist() == [[1, 2, 0], [0.5, 1, 2]]
    assert found.dtype == torch.float32
    mixed[0].extra["versions"] = torch.tensor([1, 2**24 + 1])
    with pytest.raises(ValueError, match=r"0/0/0/0/a: versions\[1\] is 16777217, which float32"):
        collation.gather_response_attrs(mixed, "versions", 3)
    mixed[0].extra["versions"] = torch.ones(2, 2).long()
    with pytest.raises(
        ValueError, match=r"differs in shape: \[2, 2\] in 0/0/0/0/a, \[3\] in 0/0/1"
    ):
        collation.gather_response_attrs(mixed, "versions", 3)
    small = [short(run, extra={"x": torch.ones(2 + run, dtype=torch.uint8)}) for run in range(2)]
    for pad in (-1, 0.5, 256):
        with pytest.raises(ValueError, match=f"pad_value is {pad}, which x of torch.uint8"):
            collation.gather_response_attrs(small, "x", 3, pad)
    floats = [short(0)]
    hold(floats[0], tokens=torch.tensor([1.0, 1.5, 2.0]))
    with pytest.raises(ValueError, match=r"0/0/0/0/a: tokens\[0\] is 1.0, of torch.float32"):
        collation.gather_token_ids(floats, 1, 2, 0)
    with pytest.raises(ValueError, match="pad_token_id is None"):
        collation.gather_token_ids([short(0)], 1, 2, None)  # type: ignore[arg-type]
    gathers: list[Any] = [
        lambda: collation.gather_token_ids([], 1, 2, 0),
        lambda: collation.gather_response_attrs([], "logprobs", 2),
        lambda: collation.gather_multi_modal_inputs([]),
    ]
    for gather in gathers:
        with pytest.raises(ValueError, match="there are no experiences to gather from"):
            gather()


def test_groups(experiences: list[Experience]) -> None:
    sizes = {
        key: {group: len(found) for group, found in collation.group_by(experiences, key).items()}
        for key in ("task", "run", "step")
    }
    assert sizes == {
        "task": {"2/3": 3},
        "run": {"2/3/1": 1, "2/3/2": 2},
        "step": {"2/3/0": 2, "2/3/1": 1},
    }
    with pytest.raises(ValueError, match="give 'task'"):
        collation.group_by(experiences, "uid")  # type: ignore[arg-type]


def test_dpo_is_split_into_two_single_turns() -> None:
    pair = Experience(
        eid=EID(1, 2, 3, 5, "a"),
        tokens=[1, 2, 3],
        chosen=[4, 5],
        rejected=[6],
        chosen_messages=[{"c": 1}],
        rejected_messages=[{"r": 1}],
        reward=0.5,
        prompt_text="p",
    )
    chosen, rejected = collation.split_dpo_experience_to_single_turn([pair])
    assert chosen.tokens.tolist() == [1, 2, 3, 4, 5]
    assert rejected.tokens.tolist() == [1, 2, 3, 6]
    assert (chosen.messages, rejected.messages) == ([{"c": 1}], [{"r": 1}])
    assert chosen.experience_type == rejected.experience_type == "single_turn"
    assert (chosen.prompt_length, chosen.reward, chosen.prompt_text) == (3, 0.5, "p")
    assert chosen.eid.sid == rejected.eid.sid == pair.eid.sid
    assert len({chosen.eid.uid, rejected.eid.uid, pair.eid.uid}) == 3
    with pytest.raises(ValueError, match="isn't dpo"):
        collation.split_dpo_experience_to_single_turn([chosen])
    pair.custom_fields = [CustomField("weight", "weight", torch.float32)]
    pair.multi_modal_inputs = {"pixels": torch.ones(2)}
    pair.tools = [{"name": "search"}]
    for half in collation.split_dpo_experience_to_single_turn([pair]):
        assert half.custom_fields == pair.custom_fields
        assert half.multi_modal_inputs is not None
        assert half.multi_modal_inputs["pixels"].equal(torch.ones(2))
        assert half.tools == pair.tools
    pair.extra["values"] = torch.ones(2)
    with pytest.raises(
        ValueError, match="1/2/3/5/a has values, and nothing says of which response"
    ):
        collation.split_dpo_experience_to_single_turn([pair])


def test_hugging_face_datasets_round_trip() -> None:
    pytest.importorskip("datasets", reason="pip install datasets")
    importlib.import_module("datasets").disable_progress_bars()
    experiences = [
        Experience(
            eid=EID(batch, 3, 5, 7, "a"),
            tokens=[1, 2, 3],
            logprobs=[-0.5, -0.25],
            reward=0.5,
            info={"model_version": 11},
            messages=[{"role": "user", "content": "hi"}],
            custom_fields=[CustomField("model_version", "versions", torch.int64)],
            extra={"values": torch.tensor([0.5, 0.25])},
        )
        for batch in (2, "0/eval_x")
    ]
    with pytest.warns(DeprecationWarning, match=r"tables\.to_table"):
        dataset = collation.to_hf_datasets(experiences)
    found = collation.from_hf_datasets(dataset)
    assert [each.eid.uid for each in found] == [each.eid.uid for each in experiences]
    for each in found:
        assert each.tokens.dtype == torch.int32
        assert each.tokens.tolist() == [1, 2, 3]
        assert each.logprobs is not None
        assert each.logprobs.tolist() == [-0.5, -0.25]
        assert each.info == {"model_version": 11}
        assert each.messages == [{"role": "user", "content": "hi"}]
        assert each.custom_fields == experiences[0].custom_fields
        assert each.extra["values"].tolist() == [0.5, 0.25]


def golden_cases(file: str) -> list[Any]:
    cases = json.loads((GOLDENS / f"{file}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def tensors(described: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.tensor(each["data"], dtype=getattr(torch, each["dtype"])).reshape(each["shape"])
        for name, each in described.items()
        if name != "info"
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].equal(value), name
            assert found[name].dtype == value.dtype, name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("case", golden_cases("areal_batching"))
def test_concat_and_split_match_areal(case: dict[str, Any]) -> None:
    trajectories = [tensors(each) for each in case["inputs"]["trajectories"]]
    batch, layout = collation.concat(trajectories)
    expected = case["expected"]
    assert_same(batch, tensors(expected["batch"]))
    assert list(layout.rows) == expected["meta"]["traj_group_sizes"]
    assert list(layout.widths) == expected["meta"]["traj_seqlens"]
    assert layout.token_fields == {"input_ids", "attention_mask", "logprobs"}
    parts = collation.split(batch, layout)
    for part, again in zip(parts, expected["roundtrip"], strict=True):
        assert_same(part, tensors(again))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_split_undoes_concat(sizes: list[tuple[int, int]], features: int) -> None:
    trajectories: list[dict[str, Any]] = [
        {
            "attention_mask": torch.rand(rows, width) < 0.5,
            "input_ids": torch.randint(1, 97, (rows, width), dtype=torch.int32),
            "routes": torch.randint(0, 5, (rows, width, 2), dtype=torch.uint8),
            "rewards": torch.rand(rows, dtype=torch.float64),
            "scores": torch.rand(rows, features).bfloat16(),
            "texts": [f"{rows}{width}{row}" for row in range(rows)],
        }
        for rows, width in sizes
    ]
    batch, layout = collation.concat(trajectories, pad_values={"input_ids": 99})
    assert batch["input_ids"].shape == (layout.num_rows, layout.width)  # type: ignore[union-attr]
    parts = collation.split(batch, layout)
    for part, trajectory in zip(parts, trajectories, strict=True):
        assert_same(part, trajectory)


def test_concat_pads_with_the_given_values() -> None:
    trajectories = [
        {"attention_mask": torch.ones(1, w), "input_ids": torch.full((1, w), w)} for w in (1, 3)
    ]
    batch, _ = collation.concat(trajectories, pad_values={"input_ids": 99})
    assert_same(
        batch,
        {
            "attention_mask": torch.tensor([[1.0, 0, 0], [1, 1, 1]]),
            "input_ids": torch.tensor([[1, 99, 99], [3, 3, 3]]),
        },
    )


def test_fields_computed_on_the_batch_are_split_if_named() -> None:
    trajectories = [{"attention_mask": torch.ones(1, width)} for width in (2, 3)]
    batch, layout = collation.concat(trajectories)
    batch["advantages"] = torch.tensor([[1, 2, 0], [3, 4, 5]])
    batch["scores"] = torch.tensor([[6, 7, 8], [9, 9, 9]])
    del batch["attention_mask"]
    parts = collation.split(batch, layout, token_fields=["advantages"])
    assert [part["advantages"].tolist() for part in parts] == [[[1, 2]], [[3, 4, 5]]]  # type: ignore[union-attr]
    assert [part["scores"].shape for part in parts] == [(1, 3), (1, 3)]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="advantages has 2 columns; the layout has 3 tokens"):
        collation.split({"advantages": torch.ones(2, 2)}, layout, token_fields=["advantages"])
    with pytest.raises(ValueError, match="rewards has 3 rows; the layout has 2"):
        collation.split({"rewards": torch.ones(3)}, layout)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({}, r"trajectories\[1\] has no attention_mask of shape \[b, w\]"),
        ({"attention_mask": torch.ones(3)}, "has no attention_mask"),
        ({"attention_mask": torch.ones(1, 2)}, "differ in the fields \\['x'\\]"),
        (
            {"attention_mask": torch.ones(1, 2), "x": torch.ones(2)},
            "\\['x'\\] hasn't one value for each of the 1 rows",
        ),
        ({"attention_mask": torch.ones(1, 2), "x": torch.tensor(1)}, "hasn't one value"),
        (
            {"attention_mask": torch.ones(1, 2), "x": torch.ones(1, 2).double()},
            r"'x' isn't alike in all trajectories: torch.float32 \[1, 3\], torch.float64 \[1, 2\]",
        ),
        ({"attention_mask": torch.ones(1, 2), "x": torch.ones(1, 5)}, "isn't alike"),
        ({"attention_mask": torch.ones(1, 2), "x": [1]}, "torch.float32 \\[1, 3\\], a list"),
    ],
)
def test_trajectories_that_do_not_fit(second: dict[str, Any], reason: str) -> None:
    first = {"attention_mask": torch.ones(1, 3), "x": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=reason):
        collation.concat([first, second])


def test_bad_arguments_of_concat() -> None:
    with pytest.raises(ValueError, match="no trajectories"):
        collation.concat([])
    trajectory = {"attention_mask": torch.ones(1, 3), "rewards": torch.ones(1)}
    with pytest.raises(ValueError, match="pad_values names \\['rewards'\\]"):
        collation.concat([trajectory], pad_values={"rewards": 1})
    ids = [
        {"attention_mask": torch.ones(1, w), "ids": torch.ones(1, w, dtype=torch.uint8)}
        for w in (2, 3)
    ]
    for pad in (-1, 0.5, 151_643):
        with pytest.raises(ValueError, match=f"pad_values has {pad} for 'ids', which torch.uint8"):
            collation.concat(ids, pad_values={"ids": pad})


@pytest.mark.parametrize("case", golden_cases("light_replay_buffer"))
def test_zeros_inside_a_mask_lose_nothing(case: dict[str, Any]) -> None:
    """LightRFT pads everything on the left, and takes a mask's zeros, counted, for padding.

    Its items are right only where masks have no interior zeros; with them it drops real tokens,
    their log-probabilities and advantages. Here responses are padded on the right and lengths
    come from the experiences, so all tokens arrive.
    """
    padded = tensors(case["inputs"])
    num_actions = padded["action_mask"].shape[1]
    experiences = []
    for row in range(len(padded["sequences"])):
        attended = padded["attention_mask"][row] == 1
        length = int(attended[-num_actions:].sum())
        experiences.append(
            Experience(
                tokens=padded["sequences"][row][attended],
                prompt_length=int(attended.sum()) - length,
                action_mask=padded["action_mask"][row, :length],
                logprobs=padded["action_log_probs"][row, :length],
                advantages=padded["advantages"][row, :length],
                returns=padded["returns"][row, :length],
            )
        )
    masks = collation.gather_action_masks(experiences, num_actions)
    token_ids = collation.gather_token_ids(experiences, 5, num_actions, 0)
    attention = collation.gather_attention_masks(experiences, 5, num_actions)
    assert masks.equal(padded["action_mask"])
    for name, attribute in (
        ("action_log_probs", "logprobs"),
        ("advantages", "advantages"),
        ("returns", "returns"),
    ):
        gathered = collation.gather_response_attrs(experiences, attribute, num_actions)
        assert gathered[masks].equal(padded[name][masks]), name
    items = [tensors(item) for item in case["expected"]["items"]]
    has_lost = []
    # A limit keeps the last so many.
    for row, item in enumerate(items, start=len(experiences) - len(items)):
        tokens, mask = token_ids[row][attention[row]], experiences[row].action_mask
        assert tokens.equal(experiences[row].tokens)
        assert mask is not None
        has_lost.append(len(item["sequences"]) < len(tokens))
        if not has_lost[-1]:
            assert tokens.equal(item["sequences"])
            assert mask.equal(item["action_mask"])
    assert any(has_lost) == case["name"].startswith("interior")


def test_the_former_name_has_what_it_had_and_says_where_that_is() -> None:
    former = importlib.import_module("experience_buffer.collate")
    for name in ("gather_token_ids", "split", "TrajectoryLayout", "to_hf_datasets"):
        assert name in dir(former)
        with pytest.warns(
            DeprecationWarning, match=f"now experience_buffer.collation: take {name}"
        ):
            assert getattr(former, name) is getattr(collation, name)
    with pytest.raises(AttributeError, match="no attribute 'padded_collate'"):
        former.padded_collate  # noqa: B018
