"""Experiences as a table: what each column says, and that rows give back what they were made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from experience_buffer import tables, trxp
from experience_buffer._codec import content
from experience_buffer.eid import EID
from experience_buffer.errors import InvalidRequestError, TrxpError
from experience_buffer.experience import Experience
from experience_buffer.scanned import ScannedExperience
from experience_buffer.values import ExperienceSummary

DATA = Path(__file__).parents[3] / "data" / "trxp"


def of_trinity() -> list[Experience]:
    """Every experience in the test data that can be read."""
    found = []
    for path in sorted(DATA.glob("*.bin")):
        try:
            found += trxp.decode(path.read_bytes())
        except TrxpError:
            continue
    return found


def summary(experience: Experience, **facts: Any) -> ExperienceSummary:
    eid = experience.eid
    values: dict[str, Any] = {
        "uid": eid.uid,
        "tid": eid.tid,
        "rid": eid.rid,
        "sid": eid.sid,
        "state": "ready",
        "reward": experience.reward,
        "response_tokens": 3,
        "payload_bytes": 1000,
        "min_policy_version": 5,
        "max_policy_version": 7,
        "push_time": 1700000000.25,
        "message": "",
        "priority": 2.5,
        "generation": 11,
        "group": "eval%2F1/a%2Fb",
        "staleness": 3,
    }
    return ExperienceSummary(**(values | facts))


def rollout(run: int = 0, **fields: Any) -> Experience:
    given: dict[str, Any] = {
        "eid": EID("eval/1", "a/b", run, 2, "x"),
        "prompt": [5, 6],
        "response": [7, 8, 9],
        "logprobs": [-0.5, -0.25, -0.125],
        "action_mask": [True, False, True],
        "reward": 0.5,
        "prompt_text": "two plus two",
        "response_text": "four \N{BILLIARDS}",
        "messages": [{"role": "user", "content": "two plus two"}],
        "info": {"model_version": 5, "task_index": {"index": 3}},
        "metrics": {"accuracy": 1.0},
    }
    return Experience(**(given | fields))


def scanned(run: int = 0, **facts: Any) -> ScannedExperience:
    experience = rollout(run)
    values: dict[str, Any] = {
        "summary": summary(experience),
        "times_sampled": 2,
        "flags": ("zero_variance",),
        "payload": experience.serialize(),
        "advantages": np.array([1.0, 100.0, 2.0], np.float32).tobytes(),
        "returns": np.array([3.0, 4.0, 5.0], np.float32).tobytes(),
        "details": '{"estimator":"grpo"}',
    }
    return ScannedExperience(**(values | facts))


def test_what_comes_back_of_a_table_is_what_went_in_bit_by_bit() -> None:
    experiences = of_trinity()
    assert len(experiences) > 80
    table = tables.to_table(experiences)
    assert table.schema.equals(tables.schema(), check_metadata=True)
    back = tables.from_table(table)
    assert [each.serialize() for each in back] == [each.serialize() for each in experiences]


def test_a_row_says_what_the_server_knows() -> None:
    (row,) = tables.to_table([scanned()]).to_pylist()
    payload = row.pop("payload")
    assert payload == scanned().payload
    assert {name: json.loads(row.pop(name)) for name in ("info", "metrics", "messages")} == {
        "info": {"model_version": 5, "task_index": {"index": 3}},
        "metrics": {"accuracy": 1.0},
        "messages": [{"role": "user", "content": "two plus two"}],
    }
    assert {name: value for name, value in row.items() if value is not None} == {
        "uid": "eval/1/a/b/0/2/x",
        "group": "eval%2F1/a%2Fb",
        "batch": "eval/1",
        "task": "a/b",
        "run": 0,
        "step": 2,
        "suffix": "x",
        "tid": rollout().eid.tid,
        "rid": rollout().eid.rid,
        "prompt": "two plus two",
        "completion": "four \N{BILLIARDS}",
        "reward": 0.5,
        "advantage": 1.5,
        "prompt_length": 2,
        "response_length": 3,
        "model_version": 5,
        "max_model_version": 7,
        "staleness": 3,
        "times_sampled": 2,
        "flags": ["zero_variance"],
        "state": "ready",
        "tombstone": False,
        "priority": 2.5,
        "push_time": 1700000000.25,
        "computation": '{"estimator":"grpo"}',
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8, 9],
        "completion_mask": [True, False, True],
        "logprobs": [-0.5, -0.25, -0.125],
        "advantages": [1.0, 100.0, 2.0],
        "returns": [3.0, 4.0, 5.0],
    }


def test_a_masked_one_is_shown_and_comes_back_as_it_is_delivered() -> None:
    table = tables.to_table([scanned(flags=("masked",)), scanned(1)])
    assert table.column("completion_mask").to_pylist() == [[False] * 3, [True, False, True]]
    assert table.column("advantage").to_pylist() == [None, 1.5]
    masked, other = tables.from_table(table)
    assert masked.action_mask.tolist() == [False] * 3  # type: ignore[union-attr]
    assert other.action_mask.tolist() == [True, False, True]  # type: ignore[union-attr]
    assert other.advantages.tolist() == [1.0, 100.0, 2.0]  # type: ignore[union-attr]
    assert other.returns.tolist() == [3.0, 4.0, 5.0]  # type: ignore[union-attr]


def test_the_mean_advantage_is_that_of_the_tokens_that_count() -> None:
    nothing = [math.nan, 1.0, math.inf]
    made = [
        rollout(0, advantages=[1.0, 5.0, 2.0]),
        rollout(1, advantages=nothing, action_mask=[False, True, False]),
        rollout(2, advantages=None),
        rollout(3, advantages=[4.0, 4.0, 4.0], action_mask=[False] * 3),
        rollout(4, advantages=[1.0, 2.0]),
        rollout(5, advantages=[-1.0, 0.0, -2.0]),
    ]
    found = tables.to_table(made).column("advantage").to_pylist()
    assert found == [1.5, 1.0, None, None, 1.5, -1.5]
    assert tables.to_table([]).num_rows == 0


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float64, [0.1, -2.0]),
        (torch.float16, [0.1, -2.0]),
        (torch.bfloat16, [0.1, -2.0]),
    ],
)
def test_other_dtypes_become_those_of_the_columns(dtype: torch.dtype, wanted: list[float]) -> None:
    made = Experience(
        eid=EID(0, 0),
        tokens=torch.tensor([1, 2, 2**31 - 1], dtype=torch.int64),
        prompt_length=1,
        logprobs=torch.tensor(wanted, dtype=dtype),
        action_mask=torch.tensor([0, 1], dtype=torch.int64),
    )
    (row,) = tables.to_table([made]).to_pylist()
    assert row["completion_ids"] == [2, 2**31 - 1]
    assert row["completion_mask"] == [False, True]
    assert row["logprobs"] == torch.tensor(wanted, dtype=dtype).float().tolist()


def test_what_a_column_cant_hold_is_null_and_stays_in_the_payload() -> None:
    info: Any = {"set": {3, 1}, "bytes": b"\0", "nan": math.nan, 7: (1, 2)}
    made = Experience(
        eid=EID(2**70, 0, run=2**70),
        tokens=torch.tensor([1, 2**31], dtype=torch.int64),
        prompt_length=1,
        logprobs=torch.zeros(1, 2),
        response_text="half \ud83d",
        info=info,
    )
    table = tables.to_table([made])
    (row,) = table.to_pylist()
    assert row["completion_ids"] is None
    assert row["logprobs"] is None
    assert row["run"] is None
    assert row["batch"] == str(2**70)
    assert row["completion"] == "half ?"
    assert json.loads(row["info"]) == {
        "set": [1, 3], "bytes": {"base64": "AA=="}, "nan": "NaN", "7": [1, 2],
    }  # fmt: skip
    assert tables.from_table(table)[0].serialize() == made.serialize()


def test_a_text_that_is_shared_a_thousand_times_doesnt_multiply() -> None:
    text = "x" * 2**20
    made = rollout(info={"all": [text] * 1000, "model_version": 1})
    assert len(made.serialize()) < 2**21
    (row,) = tables.to_table([made]).to_pylist()
    assert row["info"] is None
    assert row["completion"] == "four \N{BILLIARDS}"


def test_a_failed_rollout_is_a_row_with_its_reason() -> None:
    experience = rollout()
    tombstone = ScannedExperience(
        summary=summary(experience, state="tombstone", message="out of memory", reward=None)
    )
    (row,) = tables.to_table([tombstone]).to_pylist()
    assert row["tombstone"] is True
    assert row["reason"] == "out of memory"
    names = ("batch", "task", "run", "step", "suffix")
    assert tuple(row[name] for name in names) == ("eval/1", "a/b", 0, 2, "x")
    assert row["payload"] is None
    assert row["completion_ids"] is None
    assert tables.from_table(tables.to_table([tombstone])) == []


@pytest.mark.parametrize(
    "eid",
    [
        EID(0, 1, 2, 3, "s"),
        EID("0/eval", "a/1/2", 1, 2, "1/2/3"),
        EID("", "", 0, 0, ""),
        EID("a%2Fb", "c%2Fd", -1, -2, "/"),
        EID(7, "1/1/1", 1, 1, "1/1/1"),
    ],
)
def test_the_parts_of_a_failed_rollouts_identity_are_told_apart(eid: EID) -> None:
    made = summary(rollout(eid=eid), state="tombstone")
    (row,) = tables.to_table([ScannedExperience(summary=made)]).to_pylist()
    parts = eid.to_dict()
    assert [row[name] for name in parts] == [
        str(parts["batch"]), str(parts["task"]), eid.run, eid.step, eid.suffix,
    ]  # fmt: skip


def test_without_payloads_and_tokens_the_columns_are_there_and_empty() -> None:
    table = tables.to_table([scanned()], with_payloads=False, with_tokens=False)
    assert table.schema.equals(tables.schema())
    (row,) = table.to_pylist()
    assert row["advantage"] == 1.5
    for name in ("payload", "prompt_ids", "completion_mask", "advantages"):
        assert row[name] is None


def test_rows_without_payload_give_what_their_columns_say() -> None:
    pushed = rollout(
        eid=EID(3, "7b", 1, 0, "aa"),
        advantages=[1.0, 2.0, 3.0],
        truncate_status="response_truncated",
    )
    (back,) = tables.from_table(tables.to_table([pushed], with_payloads=False))
    assert back.eid == pushed.eid
    said = [trxp.read(each.serialize())[0] for each in (back, pushed)]
    assert content.digest(said[0]) == content.digest(said[1])  # type: ignore[arg-type]


def test_what_cant_be_a_row_is_refused_by_its_uid() -> None:
    broken = scanned(payload=scanned().payload[:-4])
    with pytest.raises(InvalidRequestError, match="eval/1/a/b/0/2/x") as refused:
        tables.to_table([scanned(1), broken])
    assert refused.value.subject == "eval/1/a/b/0/2/x"
    two = trxp.merge([scanned().payload, scanned(1).payload])
    with pytest.raises(InvalidRequestError, match="holds 2 experiences"):
        tables.to_table([scanned(payload=two)])
    with pytest.raises(InvalidRequestError, match="a page is damaged"):
        tables.to_table([scanned(payload=b"", problem="a page is damaged")])


def test_a_table_of_other_types_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="other columns"):
        tables.from_table(pa.table({"payload": pa.array([1, 2])}))
    table = tables.to_table([scanned()])
    place = table.column_names.index("reward")
    changed = table.set_column(place, "reward", pa.array([9.0]))
    with pytest.raises(InvalidRequestError, match=r"row 0: .*reward 9\.0, its payload 0\.5"):
        tables.from_table(changed)


def test_a_scanned_experience_is_decoded_as_it_would_be_delivered() -> None:
    one = scanned()
    assert one.experience is not None
    assert one.experience.advantages.tolist() == [1.0, 100.0, 2.0]  # type: ignore[union-attr]
    assert one.computation == {"estimator": "grpo"}
    plain = replace(one, advantages=b"", returns=b"", details="")
    assert plain.experience is not None
    assert plain.experience.advantages is None
    assert plain.computation is None
    assert "payload" not in one.to_dict()
