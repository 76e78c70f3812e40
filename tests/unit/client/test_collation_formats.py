"""Every collation function makes the same of both formats, leaves nothing behind, or says what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from experience_buffer import EID, CustomField, Experience, InvalidRequestError, collation, trxp
from experience_buffer._codec.item import TENSOR_FIELDS
from experience_buffer.packed import PackedBatch, PackedRow, pack
from tests.unit.builders import hold
from tests.unit.client.delivered import delivered
from tests.unit.client.packed import packed_rows

PAD = 151_643
MAKERS: dict[str, Callable[..., Any]] = {
    "padded": lambda **given: collation.padded_collate(pad_token_id=PAD, **given),
    "varlen": collation.varlen_collate,
    "verl": lambda **given: collation.verl_collate(pad_token_id=PAD, **given),
    "trl": lambda **given: collation.trl_collate(pad_token_id=PAD, **given),
    "areal": lambda **given: collation.areal_collate(pad_token_id=PAD, **given),
}
NAMES = {
    "verl": {
        "action_mask": "response_mask",
        "logprobs": "rollout_log_probs",
        "token_level_reward": "token_level_scores",
        "ref_logprobs": "ref_log_prob",
    },
    "trl": {
        "action_mask": "tool_mask",
        "logprobs": "old_per_token_logps",
        "ref_logprobs": "ref_per_token_logps",
    },
    "areal": {"action_mask": "loss_mask"},
}
PER_TOKEN = (
    *("logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"),
    *("values", "ref_logprobs", "versions"),
)
FIELDS = [
    CustomField("weight", "weight", torch.float32),
    CustomField("task_index", "index", torch.int64),
    CustomField("box", "box", torch.bfloat16),
]


def rich(run: int, **changes: Any) -> Experience:
    """A rollout with everything that an experience can have; prompts and responses differ."""
    prompt, response = 3 + run, 7 - 2 * run
    generator = torch.Generator().manual_seed(run)
    given: dict[str, Any] = {
        name: torch.rand(response, generator=generator, dtype=torch.float32)
        for name in PER_TOKEN[:-1]
    }
    images = {"pixel_values": torch.rand(4 + run, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    given |= {
        "eid": EID(batch="2/eval" if run else 2, task=run // 2, run=run, step=0, suffix="c0de"),
        "tokens": torch.randint(0, 50_021, (prompt + response,), generator=generator).int(),
        "prompt_length": prompt,
        "action_mask": torch.arange(response) % 3 != 1,
        "versions": torch.arange(response) + 11,
        "reward": (run + 1) / 7,
        "routed_experts": torch.randint(0, 60, (prompt + response - 1, 2, 3), dtype=torch.uint8),
        # One has no images, and they differ in their inputs.
        "multi_modal_inputs": [None, images, {"pixel_values": torch.rand(2, 3)}][run % 3],
        "info": {"weight": 0.1 * run, "task_index": 2**40 + run, "box": [run, 0.5], "note": "x"},
        "metrics": {"seconds": 1.5 * run},
        "messages": [{"role": "user", "content": f"what is {run}?"}],
        "response_text": f"it is {run}",
        "custom_fields": list(FIELDS),
        "extra": {
            "turn_rewards": torch.rand(2 + run, dtype=torch.float64),
            "entropy": torch.rand(response, generator=generator),
            "temperature": torch.tensor(0.25 * run),
        },
    }
    return Experience(**{**given, **changes})


ROLLOUTS = [rich(run) for run in range(3)]


def rows(experiences: Sequence[Experience]) -> list[PackedRow]:
    return [
        PackedRow(
            uid=each.eid.uid,
            group=f"group of {each.eid.tid}",
            payload=trxp.encode([each]),
            tensors={},
            staleness=each.eid.run,
            flags=("singleton",),
        )
        for each in experiences
    ]


FORMS: dict[str, Callable[[Sequence[Experience]], Any]] = {
    "list": list,
    "tuple": tuple,
    "packed": lambda given: PackedBatch.parse(bytearray().join(pack(rows(given)))),
    "packed batch": lambda given: delivered(rows(given), "packed"),
    "trxp batch": lambda given: delivered(rows(given), "trxp"),
    "decoded": lambda given: delivered(rows(given), "trxp").experiences,
    "unpacked": lambda given: list(delivered(rows(given), "packed").packed),
}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["list", "packed"])
def form(request: pytest.FixtureRequest) -> Callable[[Sequence[Experience]], Any]:
    return FORMS[request.param]


def assert_same(found: Any, expected: Any, where: str = "batch") -> None:
    """The same values of the same types, bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        ours, theirs = (each.contiguous().view(-1).view(torch.uint8) for each in (found, expected))
        assert torch.equal(ours, theirs), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple | np.ndarray):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", [name for name in FORMS if name != "list"])
def test_formats_make_the_same(maker: str, name: str) -> None:
    columns = ["reward", "task", "info", "metrics", "messages", "response_text", "prompt_text"]
    collate = MAKERS[maker](columns=columns)
    assert_same(collate(FORMS[name](ROLLOUTS)), collate(ROLLOUTS))


def responses(batch: dict[str, Any], maker: str, name: str) -> Iterator[Tensor]:
    """What a batch has of each response's field."""
    value = batch[NAMES.get(maker, {}).get(name, name)]
    for row, each in enumerate(ROLLOUTS):
        length = len(each.tokens) - each.prompt_length
        if maker == "varlen":
            begin = batch["cu_response_seqlens"][row]
            yield value[begin : begin + length]
        else:
            begin = each.prompt_length if maker == "areal" else 0
            yield value[row, begin : begin + length]


def test_nothing_is_left_behind(maker: str, form: Callable[..., Any]) -> None:
    batch = MAKERS[maker](columns=["info", "reward"])(form(ROLLOUTS))
    for name in ("action_mask", *PER_TOKEN):
        for found, each in zip(responses(batch, maker, name), ROLLOUTS, strict=True):
            assert found.tolist() == getattr(each, name).tolist(), name
    for row, each in enumerate(ROLLOUTS):
        assert batch["multi_modal_inputs"][row].keys() == (each.multi_modal_inputs or {}).keys()
        for key, value in (each.multi_modal_inputs or {}).items():
            assert batch["multi_modal_inputs"][row][key].equal(value)
        for name, value in each.extra.items():
            if name not in PER_TOKEN:
                assert_same(batch[name][row], value, name)
        assert batch["info"][row] == each.info
    assert batch["weight"].equal(torch.tensor([0.0, 0.1, 0.2]))
    assert batch["index"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert batch["box"].tolist() == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert batch["reward"].tolist() == [1 / 7, 2 / 7, 3 / 7]


def test_routes_lie_where_the_tokens_do(maker: str, form: Callable[..., Any]) -> None:
    batch = MAKERS[maker]()(form(ROLLOUTS))
    found, longest = batch["routed_experts"], max(each.prompt_length for each in ROLLOUTS)
    for row, each in enumerate(ROLLOUTS):
        assert each.routed_experts is not None
        length = len(each.routed_experts)
        if maker == "varlen":
            offsets = batch["routed_experts.cu_seqlens"]
            part, rest = found[offsets[row] : offsets[row + 1]], found[:0]
        else:
            begin = 0 if maker == "areal" else longest - each.prompt_length
            part = found[row, begin : begin + length]
            rest = torch.cat([found[row, :begin], found[row, begin + length :]])
        assert part.equal(each.routed_experts)
        assert not rest.any()
    if maker in ("padded", "verl"):
        width = longest + max(len(each.tokens) - each.prompt_length for each in ROLLOUTS)
        assert found.shape == (3, width, 2, 3)


def test_trinity_gets_the_very_experiences() -> None:
    collate = collation.trinity_collate()
    for form in FORMS.values():
        assert [each.serialize() for each in collate(form(ROLLOUTS))] == [
            each.serialize() for each in ROLLOUTS
        ]


def test_verl_groups_by_task_whatever_the_buffer_groups_by() -> None:
    tasks = [
        EID(0, 0, 0),
        EID(0, 0, 1),
        EID("a/b", "c", 0),
        EID("a", "b/c", 0, 3, "x/0/0/y"),
        EID(),
        EID("a", "b%2Fc", 0),
    ]
    members = [Experience(eid=eid, tokens=[1, 2, 3], prompt_length=1, reward=1.0) for eid in tasks]
    for form in FORMS.values():
        batch = collation.verl_collate(pad_token_id=0)(form(members))
        assert batch["uid"].tolist() == [eid.tid for eid in tasks]
        assert batch["unique_ids"].tolist() == [eid.uid for eid in tasks]


def test_verl_takes_what_it_knows() -> None:
    """DataProto takes tensors and NumPy arrays of B rows, and nothing else."""
    batch = collation.verl_collate(pad_token_id=0, columns=["info", "task"])(ROLLOUTS)
    for name, value in batch.items():
        assert isinstance(value, Tensor | np.ndarray), name
        assert len(value) == 3, name


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.int16])
def test_routes_of_many_experts_keep_their_dtype(
    maker: str, form: Callable[..., Any], dtype: torch.dtype
) -> None:
    members = [rich(run) for run in range(3)]
    for each in members:
        assert each.routed_experts is not None
        each.routed_experts = (each.routed_experts.int() + 300).to(dtype)
    found = MAKERS[maker]()(form(members))["routed_experts"]
    assert found.dtype == dtype
    assert (found.long() > 0).sum() == sum(
        each.routed_experts.numel() for each in members if each.routed_experts is not None
    )


# --- delivery


def test_what_a_delivery_knows_a_list_does_not(maker: str) -> None:
    collate = MAKERS[maker](columns=["group", "staleness", "flags", "num_deliveries"])
    batch = collate(FORMS["packed"](ROLLOUTS))
    assert list(batch["group"]) == [f"group of {each.eid.tid}" for each in ROLLOUTS]
    assert batch["staleness"].tolist() == [0, 1, 2]
    assert list(batch["flags"]) == [("singleton",)] * 3
    assert_same(collate(FORMS["trxp batch"](ROLLOUTS)), batch)
    for name in ("group", "staleness", "probability", "times_sampled", "generation"):
        with pytest.raises(
            InvalidRequestError, match=f"a list of experiences doesn't know .*{name}"
        ):
            MAKERS[maker](columns=[name])(ROLLOUTS)


def test_a_number_that_stands_for_none_comes_with_who_has_one(maker: str) -> None:
    members = [rich(run) for run in range(3)]
    members[2].reward = None
    given = rows(members)
    given[1].staleness = None
    batch = PackedBatch.parse(bytearray().join(pack(given)))
    options: dict[str, Any] = {"drop": ["reward"]}
    for name, place, number in (("reward", 2, "nan"), ("staleness", 1, "0")):
        reason = f"{members[place].eid.uid} has no {name}, .* would have {number}: add 'has_{name}'"
        with pytest.raises(ValueError, match=reason):
            MAKERS[maker](columns=[name], **options)(batch)
        found = MAKERS[maker](columns=[name, f"has_{name}"], **options)(batch)
        assert found[f"has_{name}"].tolist() == [row != place for row in range(3)]


# --- what some have


@pytest.mark.parametrize("name", [*PER_TOKEN, "routed_experts"])
def test_a_field_that_some_lack_is_named(maker: str, form: Callable[..., Any], name: str) -> None:
    members = [rich(run) for run in range(3)]
    if name in members[1].extra:
        del members[1].extra[name]
    else:
        setattr(members[1], name, None)
    uid = members[1].eid.uid
    with pytest.raises(ValueError, match=f"{uid} has no {name}, which 2 of the 3 experiences have"):
        MAKERS[maker]()(form(members))
    batch = MAKERS[maker](drop=[name])(form(members))
    if (maker, name) != ("verl", "token_level_reward"):
        assert NAMES.get(maker, {}).get(name, name) not in batch


def test_an_extra_tensor_that_some_lack_is_none(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    del members[1].extra["turn_rewards"]
    found = MAKERS[maker]()(form(members))["turn_rewards"]
    assert found[1] is None
    assert found[2].equal(members[2].extra["turn_rewards"])


def test_log_probabilities_without_values_are_none(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run, logprobs=torch.zeros(0)) for run in range(3)]
    batch = MAKERS[maker]()(form(members))
    assert NAMES.get(maker, {}).get("logprobs", "logprobs") not in batch
    members[2] = rich(2)
    with pytest.raises(ValueError, match="has no logprobs, which 1 of the 3"):
        MAKERS[maker]()(form(members))


@pytest.mark.parametrize("maker", ["verl", "areal"])
@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (None, "reward is None, but 2 of the 3 experiences"),
        (float("nan"), "reward is nan"),
        (float("-inf"), "reward is -inf"),
        (1e39, r"reward is 1e\+39, which float32 can't hold"),
        (1e-60, "reward is 1e-60, which float32"),
        (2**24 + 1, "reward is 16777217.0, which float32"),
        (10**400, "reward is inf"),
    ],
)
def test_a_reward_that_would_be_another_is_named(
    maker: str, form: Callable[..., Any], reward: float | None, reason: str
) -> None:
    members = [rich(run, token_level_reward=None) for run in range(3)]
    hold(members[1], reward=reward)
    with pytest.raises(ValueError, match=f"{members[1].eid.uid}: {reason}"):
        MAKERS[maker]()(form(members))
    batch = MAKERS[maker](drop=["reward"])(form(members))
    assert not {"rewards", "token_level_scores"} & batch.keys()


# --- what an entry can't hold


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_is_0_or_1(maker: str, form: Callable[..., Any], value: float) -> None:
    members = [rich(run) for run in range(3)]
    mask = torch.ones(5)
    mask[3] = value
    hold(members[1], action_mask=mask)
    with pytest.raises(
        ValueError, match=rf"{members[1].eid.uid}: action_mask\[3\] is {value}; a m"
    ):
        MAKERS[maker]()(form(members))
    members[1].action_mask = torch.tensor([1, 0, 1, 1, 2])
    with pytest.raises(ValueError, match=r"action_mask\[4\] is 2; a mask has 1 where"):
        MAKERS[maker]()(form(members))
    members[1].action_mask = torch.ones(5, dtype=torch.float64)
    batch = MAKERS[maker]()(form(members))
    name = NAMES.get(maker, {}).get("action_mask", "action_mask")
    assert batch[name].dtype == (torch.int64 if maker in NAMES else torch.float64)


@pytest.mark.parametrize("maker", list(NAMES))
def test_a_frameworks_batch_has_a_mask(maker: str) -> None:
    with pytest.raises(InvalidRequestError, match="drop names 'action_mask', of which the mask"):
        MAKERS[maker](drop=["action_mask"])


def test_routes_of_as_many_rows_as_the_response_are_routes(
    maker: str, form: Callable[..., Any]
) -> None:
    members = [
        Experience(
            eid=EID(0, 0, run),
            prompt=[1],
            response=[2, 3],
            reward=1.0,
            routed_experts=[[[4]], [[5]]],
        )
        for run in range(2)
    ]
    batch = MAKERS[maker]()(form(members))
    rows = batch["routed_experts"].reshape(2, -1).tolist()
    assert [row[:2] for row in rows] == [[4, 5], [4, 5]]
    if maker == "varlen":
        assert batch["routed_experts.cu_seqlens"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_tokens_are_integers(maker: str, form: Callable[..., Any], dtype: torch.dtype) -> None:
    members = [rich(run) for run in range(3)]
    for each in members[1:] if maker == "padded" else members:
        hold(each, tokens=each.tokens.to(dtype))
    with pytest.raises(ValueError, match=r"tokens\[0\] is .* token ids are integers"):
        MAKERS[maker]()(form(members))


def test_a_token_beyond_64_bits_is_named(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    for each in members:
        each.tokens = each.tokens.to(torch.uint64)
    MAKERS[maker]()(form(members))
    members[1].tokens = torch.tensor([1, 2, 3, 2**63 + 5, *range(5)], dtype=torch.uint64)
    with pytest.raises(
        ValueError, match=rf"{members[1].eid.uid}: tokens\[3\] is 9223372036854775813"
    ):
        MAKERS[maker]()(form(members))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32]
)
@pytest.mark.parametrize("pad", [151_643, -100, 300, 2**40, 0])
def test_a_padding_id_is_the_one_that_was_given(
    form: Callable[..., Any], dtype: torch.dtype, pad: int
) -> None:
    members = [
        Experience(tokens=torch.arange(3 + run).to(dtype), prompt_length=1) for run in range(2)
    ]
    for collate, name in (
        (collation.padded_collate(pad_token_id=pad), "input_ids"),
        (collation.verl_collate(pad_token_id=pad), "input_ids"),
        (collation.trl_collate(pad_token_id=pad), "completion_ids"),
        (collation.areal_collate(pad_token_id=pad), "input_ids"),
    ):
        assert collate(form(members))[name][0, -1].item() == pad
    gathered = collation.gather_token_ids(members, 1, 3, pad)
    assert gathered[0].tolist() == [0, 1, 2, pad]


@pytest.mark.parametrize("pad", [None, 0.5, True, "0", 2**63])
def test_a_padding_id_is_an_integer(pad: Any) -> None:
    for make in (
        collation.padded_collate,
        collation.verl_collate,
        collation.trl_collate,
        collation.areal_collate,
    ):
        with pytest.raises(
            InvalidRequestError, match=r"pad_token_id is .*; give a token id, such as"
        ):
            make(pad_token_id=pad)
    with pytest.raises(InvalidRequestError, match="pad_token_id is"):
        FORMS["packed"](ROLLOUTS).padded(pad_token_id=pad)
    assert collation.padded_collate(pad_token_id=np.int32(7))  # type: ignore[arg-type]


def test_dtypes_that_differ_lose_nothing(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    hold(members[1], versions=torch.tensor([3.0, 4.0, 5.0, 6.0, 2.0**24]))
    batch = MAKERS[maker]()(form(members))
    found = [each.tolist() for each in responses(batch, maker, "versions")]
    assert found == [each.extra["versions"].tolist() for each in members]
    members[0].extra["versions"][2] = 2**24 + 1
    uid = members[0].eid.uid
    with pytest.raises(ValueError, match=rf"{uid}: versions\[2\] is 16777217, which float32"):
        MAKERS[maker]()(form(members))


def test_versions_of_few_bits_have_none_on_prompts(form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    for each in members:
        each.extra["versions"] = each.extra["versions"].to(torch.uint8)
    found = collation.areal_collate()(form(members))["versions"]
    assert found.dtype == torch.int64
    assert found[:, 0].tolist() == [-1, -1, -1]
    hold(members[1], versions=torch.full((5,), 0.5))
    with pytest.raises(ValueError, match=r"versions\[0\] is 0.5, which int64 can't hold"):
        collation.areal_collate()(form([members[1]]))


def test_a_field_of_another_length_is_named(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    members[1].logprobs = torch.zeros(4)
    reason = r"2/eval/0/1/0/c0de: logprobs has 4 values, but the response has 5 tokens"
    if maker == "varlen":
        assert "logprobs.cu_seqlens" in MAKERS[maker]()(form(members))
        return
    with pytest.raises(ValueError, match="logprobs isn't" if maker == "areal" else reason):
        MAKERS[maker]()(form(members))


# --- custom fields and columns


@pytest.mark.parametrize(
    ("value", "dtype", "reason"),
    [
        (1.7, torch.int64, "is 1.7, which int64 can't hold"),
        (-1, torch.uint8, "is -1, which uint8"),
        (2**40, torch.int32, "is 1099511627776, which int32"),
        (1e39, torch.float32, r"is 1e\+39, which float32"),
        (2**24 + 1, torch.float32, "is 16777217, which float32"),
        (0.5, torch.bool, "is 0.5, which bool"),
        (70_000, torch.float16, "is 70000, which float16"),
        (2**70, torch.int64, "needs a number of at most 64 bits"),
        ("many", torch.int64, "is 'many'; the custom field 'weight' needs a number"),
        (None, torch.float32, "is None; the custom field"),
        ([1.0, 2.0], torch.float32, r"has the shape \[2\], that of .* \[\]"),
        ([[1.0], [2.0, 3.0]], torch.float32, "needs a number"),
        (2**63 + 1, torch.int64, "is 9223372036854775809, which int64"),
        ([2**53 + 1, 0.5], torch.float64, "holds 9007199254740993, which float64 can't hold"),
        ([2**63 + 1, -1], torch.int64, "holds 9223372036854775809, which float64 can't hold"),
    ],
)
def test_a_custom_field_holds_its_values(
    maker: str, form: Callable[..., Any], value: Any, dtype: torch.dtype, reason: str
) -> None:
    members = [
        rich(run, info={"weight": 1}, custom_fields=[CustomField("weight", "weight", dtype)])
        for run in range(3)
    ]
    members[1].info = {"weight": value}
    with pytest.raises(ValueError, match=rf"{members[1].eid.uid}: info\['weight'\].*{reason}"):
        MAKERS[maker]()(form(members))
    assert "weight" not in MAKERS[maker](drop=["weight"])(form(members))
    assert "weight" not in MAKERS[maker](drop=["custom_fields"])(form(members))


def test_a_custom_field_may_have_64_bits(maker: str, form: Callable[..., Any]) -> None:
    fields = [CustomField("seed", "seed", torch.uint64)]
    members = [rich(run, info={"seed": 2**63 + run}, custom_fields=fields) for run in range(2)]
    assert MAKERS[maker]()(form(members))["seed"].tolist() == [2**63, 2**63 + 1]


def test_custom_fields_are_those_of_all(maker: str, form: Callable[..., Any]) -> None:
    members = [rich(run) for run in range(3)]
    members[2].custom_fields = FIELDS[:1]
    with pytest.raises(ValueError, match=f"those of {members[2].eid.uid} .*'weight -> weight'"):
        MAKERS[maker]()(form(members))
    members[2] = rich(2, info={"wieght": 1.0})
    with pytest.raises(ValueError, match=r"info has no 'weight', .* it has \['wieght'\]"):
        MAKERS[maker]()(form(members))


def test_entries_have_names_of_their_own(maker: str, form: Callable[..., Any]) -> None:
    first = next(iter(MAKERS[maker]()(ROLLOUTS)))
    clashing = [
        rich(run, custom_fields=[CustomField("weight", first, torch.float32)]) for run in range(2)
    ]
    with pytest.raises(InvalidRequestError, match=f"{first!r} has the name of another entry"):
        MAKERS[maker]()(form(clashing))
    for each in clashing:
        each.custom_fields = []
        each.extra[first] = torch.zeros(3)
    with pytest.raises(InvalidRequestError, match=f"{first!r} has the name of another entry"):
        MAKERS[maker]()(form(clashing))
    assert first in MAKERS[maker](drop=[first])(form(clashing))


@pytest.mark.parametrize("name", ["columns", "drop"])
def test_one_text_is_no_list_of_names(maker: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{name}=\['reward'\]"):
        MAKERS[maker](**{name: "reward"})
    with pytest.raises(InvalidRequestError, match=r"fields=\['logprobs'\]"):
        FORMS["packed"](ROLLOUTS).padded(fields="logprobs")
    with pytest.raises(KeyError, match=r"no column 'rewarts'; there are .*reward"):
        MAKERS[maker](columns=["rewarts"])(ROLLOUTS)


# --- what is given


def test_a_batch_is_a_dataset_of_experiences(maker: str) -> None:
    for name in ("packed batch", "trxp batch", "packed"):
        given: Any = FORMS[name](ROLLOUTS)
        collate = MAKERS[maker]()
        loader = DataLoader(given, batch_size=2, collate_fn=collate)
        first, second = loader
        assert_same(first, collate(ROLLOUTS[:2]))
        assert_same(second, collate(ROLLOUTS[2:]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (ROLLOUTS[0], "this is one Experience: put it into a list"),
        ({"a": 1}, "this is a dict"),
        ("text", "this is a str"),
        (torch.zeros(3), "this is a Tensor"),
        ([ROLLOUTS], "element 0 of the list is a list, which is a whole batch"),
        ([ROLLOUTS[0], 3], "element 1 of the list is a int"),
    ],
)
def test_what_is_no_batch_is_refused(maker: str, given: Any, reason: str) -> None:
    for collate in (MAKERS[maker](), collation.trinity_collate()):
        with pytest.raises(TypeError, match=f"takes a batch, a PackedBatch, or a list.*{reason}"):
            collate(given)


def test_a_list_of_batches_is_refused(maker: str) -> None:
    for name in ("packed", "trxp batch"):
        with pytest.raises(
            TypeError, match=r"element 0 of the list is a .*Batch, .*batch_size=None"
        ):
            MAKERS[maker]()([FORMS[name](ROLLOUTS)])
    with pytest.raises(ValueError, match="empty"):
        MAKERS[maker]()([])


# --- defaults of torch


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def made_of_lists() -> Experience:
    """An experience whose tensors are lists and numbers yet."""
    return Experience(
        eid=EID(0, 0, 0, suffix="c0de"),
        tokens=[1, 2, 3],
        prompt_length=1,
        logprobs=[-0.5, -0.25],
        values=[0.5, 0.25],
        versions=[3, 4],
        multi_modal_inputs={"pixel_values": [[0.5, 1.5]]},
        extra={"entropy": [0.1, 0.2]},
        info={"weight": 0.1},
        custom_fields=FIELDS[:1],
    )


def everything(payload: bytes) -> dict[str, Any]:
    """What the client makes of experiences."""
    experiences = trxp.decode(payload)
    found: dict[str, Any] = {}
    one = made_of_lists()
    found["made"] = [collation.padded_collate(pad_token_id=PAD)([one]), one.tokens, one.logprobs]
    found["made"] += [
        one.action_mask,
        *one.extra.values(),
        *(one.multi_modal_inputs or {}).values(),
    ]
    pair = Experience(eid=EID(0, 1), tokens=[1, 2], chosen=[3, 4], rejected=[5])
    found["halves"] = [
        each.tokens for each in collation.split_dpo_experience_to_single_turn([pair])
    ]
    widths = [{"attention_mask": torch.ones(1, w, dtype=torch.int64, device="cpu")} for w in (2, 3)]
    found["joined"] = collation.concat([each | {"x": each["attention_mask"]} for each in widths])[0]
    for form in ("list", "packed", "trxp batch"):
        batch = FORMS[form](experiences)
        for maker, make in MAKERS.items():
            found[f"{maker} {form}"] = make(columns=["reward", "info"])(batch)
    packed = FORMS["packed"](experiences)
    found["views"] = [packed.tensor("tokens"), packed.offsets("tokens"), packed.column("reward")]
    found["padded"], found["varlen"] = packed.padded(), packed.varlen()
    found["gathered"] = [
        collation.gather_token_ids(experiences, 5, 7, PAD),
        collation.gather_attention_masks(experiences, 5, 7),
        collation.gather_action_masks(experiences, 7),
        collation.gather_response_attrs(experiences, "logprobs", 7),
    ]
    fields = [each for each in TENSOR_FIELDS if getattr(experiences[0], each) is not None]
    found["experiences"] = [[getattr(one, name) for name in fields] for one in experiences]
    return found


PAYLOAD = trxp.encode(ROLLOUTS)
EXPECTED = everything(PAYLOAD)


@pytest.mark.usefixtures("odd_defaults")
def test_torchs_defaults_change_nothing() -> None:
    assert_same(everything(PAYLOAD), EXPECTED)


@given(packed_rows.batches(max_size=4), st.booleans())
@settings(max_examples=15)
def test_whatever_was_pushed_is_laid_out_or_named(
    given_rows: list[PackedRow], has_all: bool
) -> None:
    """Tensors of any dtype and shape, under names that batches know, too."""
    if has_all:
        given_rows = given_rows[:1]
    as_pushed = [
        dataclasses.replace(row, payload=trxp.with_tensors(row.payload, row.tensors), tensors={})
        for row in given_rows
    ]
    for make in MAKERS.values():
        outcomes: list[Any] = []
        for format in ("packed", "trxp"):
            try:
                outcomes.append(make()(delivered(as_pushed, format)))
            except ValueError as error:
                outcomes.append(str(error))
        assert_same(*outcomes)
