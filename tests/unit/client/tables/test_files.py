"""Files of experiences: real readers read them, hostile ones cost a row each, and nothing is half there."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experience_buffer import EID, Experience, tables, trxp
from experience_buffer._codec import content
from experience_buffer.errors import InvalidRequestError
from experience_buffer.scanned import ScannedExperience
from tests.unit.client.tables.test_tables import of_trinity, rollout, scanned, summary

ENDINGS = ("parquet", "arrow", "feather", "jsonl", "jsonl.zst", "jsonl.gz")


def written(path: Path, rows: Sequence[Any], **options: Any) -> Path:
    with tables.TableWriter(path, **options) as writer:
        writer.write(tables.scanned_of(rows))
    assert not writer.problems
    assert writer.num_rows == len(rows)
    return path


def read(path: Path) -> list[tables.TableRow]:
    with tables.TableReader(path) as reader:
        return list(reader)


def said(experience: Experience) -> tuple[EID, bytes]:
    """Identity and content, whatever bytes say it."""
    (item,) = trxp.read(experience.serialize())
    assert isinstance(item, trxp.Item)
    return item.eid, content.digest(item)


def tombstone() -> ScannedExperience:
    made = summary(rollout(9), state="tombstone", message="the sandbox died", reward=None)
    return ScannedExperience(summary=made)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_gives_back_the_payloads_byte_by_byte(tmp_path: Path, ending: str) -> None:
    experiences = of_trinity()
    path = written(tmp_path / f"all.{ending}", [*experiences, tombstone()])
    rows = read(path)
    assert [row.payload for row in rows[:-1]] == [each.serialize() for each in experiences]
    assert [row.uid for row in rows[:-1]] == [each.eid.uid for each in experiences]
    assert [row.number for row in rows] == list(range(len(rows)))
    last = rows[-1].tombstone
    assert last is not None
    assert (last.eid.uid, last.reason) == (rollout(9).eid.uid, "the sandbox died")
    assert not [row.problem for row in rows if row.problem]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_without_payloads_gives_experiences_of_the_same_content(
    tmp_path: Path, ending: str
) -> None:
    pushed = [rollout(run, eid=EID(3, "7b", run, 0, "aa"), reward=-0.1 * run) for run in range(3)]
    pushed[1].logprobs = np.array([np.nan, -np.inf, 0.1], np.float32)
    path = written(tmp_path / f"all.{ending}", pushed, with_payloads=False)
    back = [Experience.deserialize(row.payload) for row in read(path)]
    assert [said(each) for each in back] == [said(each) for each in pushed]


def test_pandas_polars_and_datasets_read_the_columns_and_join_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    # One file of nothing but nulls where the other has values.
    first = written(tmp_path / "a.parquet", [scanned(run) for run in range(3)], about={"x": 1})
    bare = Experience(eid=EID(1, 2), tokens=[1, 2, 3], prompt_length=1)
    second = written(tmp_path / "b.parquet", [bare, tombstone()], with_payloads=False)

    frame = pandas.concat([pandas.read_parquet(path) for path in (first, second)])
    assert frame["reward"].dtype == np.float64
    assert frame["completion_ids"].iloc[0].tolist() == [7, 8, 9]
    assert frame["advantages"].iloc[0].dtype == np.float32
    assert json.loads(frame["info"].iloc[0])["model_version"] == 5

    lazy = polars.scan_parquet([first, second]).filter(polars.col("reward") > 0)
    found = lazy.select("uid", polars.col("advantages").list.mean()).collect()
    assert found.shape == (3, 2)
    joined = polars.concat([polars.read_parquet(path) for path in (first, second)])
    assert joined.schema["completion_mask"] == polars.List(polars.Boolean)

    dataset = datasets.load_dataset(
        "parquet",
        data_files=[str(first), str(second)],
        split="train",
        cache_dir=str(tmp_path / "c"),
    )
    assert len(dataset) == 5
    assert dataset[0]["completion_mask"] == [True, False, True]
    assert dataset.features["prompt_ids"].feature.dtype == "int32"
    assert dataset[4]["tombstone"] is True
    made = datasets.Dataset(tables.to_table([scanned()]))
    assert tables.from_table(made.data.table)[0].eid == rollout().eid

    both = pa.concat_tables([pq.read_table(path) for path in (first, second)])
    assert both.num_rows == 5


def test_a_line_of_json_can_be_read_by_anything(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "x.jsonl", [scanned()]).read_text("utf-8").splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert [*row] == tables.schema().names
    assert row["info"] == {"model_version": 5, "task_index": {"index": 3}}
    assert row["computation"] == {"estimator": "grpo"}
    assert row["logprobs"] == [-0.5, -0.25, -0.125]
    assert row["completion_mask"] == [True, False, True]
    assert base64.b64decode(row["payload"]) == scanned().payload


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    writer = tables.TableWriter(path)
    writer.write([scanned()])
    assert not path.exists()
    with pytest.raises(RuntimeError), writer:
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    written(path, [scanned()])
    with pytest.raises(FileExistsError, match=r"x\.parquet is there already"):
        tables.TableWriter(path)
    written(path, [scanned(), scanned(1)], overwrite=True)
    assert len(read(path)) == 2
    assert os.listdir(tmp_path) == ["x.parquet"]


def test_a_writer_keeps_a_bounded_part_in_memory_and_goes_on_beside_damage(tmp_path: Path) -> None:
    large = rollout(extra={"image": np.zeros(9 << 20, np.uint8)})
    rows = list(tables.scanned_of([large] * 7))
    broken = scanned(payload=b"TRXP nonsense")
    with tables.TableWriter(tmp_path / "x.parquet") as writer:
        writer.write([rows[0], broken, *rows[1:]])
        writer.close(cursor="7.7")
    assert [uid for uid, _ in writer.problems] == [broken.summary.uid]
    found = pq.ParquetFile(tmp_path / "x.parquet")
    assert found.num_row_groups == 4
    with tables.TableReader(tmp_path / "x.parquet") as reader:
        assert reader.about == {"format": 1, "cursor": "7.7"}
        assert reader.num_rows == 7


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("x.txt", "doesn't say its format"), ("x", "doesn't say"), ("x.parquet.gz", "doesn't say")],
)
def test_a_name_that_says_no_format_is_refused(tmp_path: Path, name: str, wanted: str) -> None:
    with pytest.raises(InvalidRequestError, match=wanted):
        tables.TableWriter(tmp_path / name)
    with pytest.raises(InvalidRequestError, match="one of parquet, arrow, jsonl"):
        tables.TableWriter(tmp_path / name, format="csv")  # type: ignore[arg-type]


# --- files from elsewhere


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_bytes(
        b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows)
    )
    return path


def row(**values: Any) -> dict[str, Any]:
    return {"batch": "1", "task": "2", "prompt_ids": [1, 2], "completion_ids": [3]} | values


HOSTILE = [
    (b"{nonsense\n", "isn't JSON"),
    (b"[" * 100_000 + b"\n", "isn't JSON"),
    ([1, 2], "isn't a JSON object"),
    ({"uid": "a"}, "neither a payload nor prompt_ids"),
    (row(batch=None), "batch is null"),
    (row(prompt_ids=["x"]), "invalid literal"),
    (row(prompt_ids=[2**40]), ""),
    (row(reward="much"), "reward"),
    (row(info=[1]), "info"),
    (row(info=json.loads("[" * 80 + "]" * 80)), ""),
    (row(uid="3/3/0/0/x"), "the row says uid '3/3/0/0/x', and holds '1/2/0/0/"),
    (row(run="first"), "run"),
    (row(payload="!!"), "base64"),
    (row(payload=base64.b64encode(b"\x80\x04K\x01r\xff\xff\xff\x0f.").decode()), "TRXP"),
    (row(payload=[1]), "not bytes"),
    (row(tombstone=True, batch=None), "batch is null"),
    (row(tombstone=True, run=[1]), "run"),
    (row(completion_mask=[1, 2, 3, 4], logprobs=["x"]), ""),
]


@pytest.mark.parametrize(("hostile", "wanted"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_row_that_isnt_one_says_why_and_its_neighbours_are_read(
    tmp_path: Path, hostile: Any, wanted: str
) -> None:
    path = lines(tmp_path / "x.jsonl", [row(), hostile, b"\n", row(batch="9")])
    first, bad, last = read(path)
    assert not first.problem
    assert not last.problem
    assert last.uid.startswith("9/2/0/0/")
    assert (first.number, bad.number, last.number) == (0, 1, 2)
    assert bad.problem
    assert wanted in bad.problem
    assert not bad.payload
    assert len(bad.problem) <= 500


def test_rows_without_suffix_have_the_same_identity_each_time(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [row(), row(completion_ids=[4])])
    first, second = read(path)
    assert first.uid != second.uid
    assert [each.payload for each in read(path)] == [first.payload, second.payload]


def test_a_payload_of_someone_else_is_refused(tmp_path: Path) -> None:
    table = tables.to_table([scanned(0), scanned(1), scanned(2)])
    uids = table.column("uid").to_pylist()
    swapped = table.set_column(0, "uid", pa.array([uids[0], uids[2], uids[2]]))
    pq.write_table(swapped, tmp_path / "x.parquet")
    found = read(tmp_path / "x.parquet")
    assert [bool(each.problem) for each in found] == [False, True, False]
    assert f"says uid {uids[2]!r}, and holds {uids[1]!r}" in found[1].problem


def test_other_types_that_say_the_same_are_read_and_others_refused(tmp_path: Path) -> None:
    table = tables.to_table([scanned(0), tombstone()])
    changed = table.set_column(
        table.column_names.index("payload"), "payload", table.column("payload").cast("large_binary")
    ).set_column(0, "uid", table.column("uid").cast("large_string"))
    changed = changed.append_column("more", pa.array([1, 2]))
    pq.write_table(changed, tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet")[0].payload == scanned().payload
    pq.write_table(pa.table({"payload": pa.array([[1], [2]])}), tmp_path / "y.parquet")
    with pytest.raises(InvalidRequestError, match=r"column 'payload' is of type list"):
        read(tmp_path / "y.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "z.parquet")
    with pytest.raises(InvalidRequestError, match="holds no experiences"):
        read(tmp_path / "z.parquet")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_file_that_is_cut_short_or_damaged_is_told_of(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"x.{ending}", [scanned(run) for run in range(50)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidRequestError, match="isn't a whole"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidRequestError, match="isn't a whole"):
        read(path)
    for place in range(8, len(whole) - 8, 211):
        path.write_bytes(whole[:place] + bytes(8) + whole[place + 8 :])
        with suppress(InvalidRequestError):
            assert all(each.problem or each.payload for each in read(path))


def test_a_file_that_isnt_there_is_an_ordinary_error(tmp_path: Path) -> None:
    for ending in ENDINGS:
        with pytest.raises(FileNotFoundError):
            tables.TableReader(tmp_path / f"x.{ending}")


def test_rows_with_and_without_payload_may_stand_in_one_file(tmp_path: Path) -> None:
    whole = tables.to_table([scanned(run) for run in range(600)])
    payloads = whole.column("payload").to_pylist()
    payloads[300] = None
    place = whole.column_names.index("payload")
    mixed = whole.set_column(place, "payload", pa.array(payloads, pa.binary()))
    pq.write_table(mixed, tmp_path / "x.parquet", row_group_size=500)
    found = read(tmp_path / "x.parquet")
    assert [each.payload for each in found if each.number != 300] == [p for p in payloads if p]
    again = Experience.deserialize(found[300].payload)
    assert again.eid.uid == found[300].uid == scanned(300).summary.uid
    assert again.tokens.tolist() == [5, 6, 7, 8, 9]
