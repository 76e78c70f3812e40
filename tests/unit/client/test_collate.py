from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from experience_buffer import collate
from experience_buffer.eid import EID
from experience_buffer.experience import CustomField, Experience


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
    assert collate.gather_token_ids(experiences, 5, 3, 99).tolist() == [
        [99, 99, 10, 11, 12, 13, 14, 99],
        [99, 99, 99, 99, 20, 21, 22, 23],
        [20, 21, 22, 23, 24, 25, 26, 99],
    ]
    assert collate.gather_attention_masks(experiences, 5, 3).int().tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0],
    ]
    assert collate.gather_action_masks(experiences, 3).tolist() == [
        [True, True, False],
        [True, True, True],
        [True, True, False],
    ]
    logprobs = collate.gather_response_attrs(experiences, "logprobs", 3, 7)
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
        ours = getattr(collate, name)(experiences, *arguments)
        expected = getattr(theirs, name)(experiences, *arguments)
        assert ours.equal(expected), name
        assert ours.dtype == expected.dtype, name


def test_extra_tensors_are_gathered_by_name(experiences: list[Experience]) -> None:
    values = collate.gather_response_attrs(experiences, "values", 5)
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
        getattr(collate, name)(experiences, *arguments)


def test_multi_modal_inputs_are_listed(experiences: list[Experience]) -> None:
    inputs = collate.gather_multi_modal_inputs(experiences)
    assert list(inputs) == ["a", "b"]
    assert [len(tensor) for tensor in inputs["a"]] == [1, 2, 2]
    with pytest.raises(ValueError, match="has no multi_modal_inputs"):
        collate.gather_multi_modal_inputs([Experience(tokens=[1, 2])])


def test_groups(experiences: list[Experience]) -> None:
    sizes = {
        key: {group: len(found) for group, found in collate.group_by(experiences, key).items()}
        for key in ("task", "run", "step")
    }
    assert sizes == {
        "task": {"2/3": 3},
        "run": {"2/3/1": 1, "2/3/2": 2},
        "step": {"2/3/0": 2, "2/3/1": 1},
    }
    with pytest.raises(ValueError, match="give 'task'"):
        collate.group_by(experiences, "uid")  # type: ignore[arg-type]


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
    chosen, rejected = collate.split_dpo_experience_to_single_turn([pair])
    assert chosen.tokens.tolist() == [1, 2, 3, 4, 5]
    assert rejected.tokens.tolist() == [1, 2, 3, 6]
    assert (chosen.messages, rejected.messages) == ([{"c": 1}], [{"r": 1}])
    assert chosen.experience_type == rejected.experience_type == "single_turn"
    assert (chosen.prompt_length, chosen.reward, chosen.prompt_text) == (3, 0.5, "p")
    assert chosen.eid.sid == rejected.eid.sid == pair.eid.sid
    assert len({chosen.eid.uid, rejected.eid.uid, pair.eid.uid}) == 3
    with pytest.raises(ValueError, match="isn't dpo"):
        collate.split_dpo_experience_to_single_turn([chosen])


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
    found = collate.from_hf_datasets(collate.to_hf_datasets(experiences))
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
