"""What other buffers get wrong about rewards, masks and foreign bytes; see `test_peers.py`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from experience_buffer import (
    AdvantageConfig,
    BufferConfig,
    Client,
    Experience,
    Tombstone,
    trxp,
)
from experience_buffer.v1 import service_pb2
from tests.integration.buffers import create, stats
from tests.integration.plain import error_of, experience, push_request
from tests.integration.server import Stub


def advantages(client: Client, name: str, size: int) -> dict[str, float]:
    """The advantage of the last token of each experience, by uid."""
    batch = client.sample(size, buffer=name, timeout=60)
    assert batch.num_units == size, batch.shortfall
    found = {}
    for uid, one in zip(batch.uids, batch.experiences, strict=True):
        assert one.advantages is not None
        found[uid] = float(one.advantages[-1])
    return found


# --- AReaL


def truncated(run: int, length: int, **fields: Any) -> Experience:
    """A response with a critic's values."""
    return experience(
        0,
        run,
        tokens=torch.arange(2 + length, dtype=torch.int32),
        logprobs=torch.zeros(length),
        values=torch.full((length + 1,), 0.5),
        reward=1.0,
        **fields,
    )


def test_areal_truncation_is_a_fact_of_the_experience_not_of_its_batch(
    client: Client, name: str
) -> None:
    """There it depends on the padding: the longest of the batch counts as cut off."""
    gae = AdvantageConfig("gae")
    rows: list[bytes] = []
    for number, others in enumerate(([], [2, 3], [40, 60])):
        buffer = f"{name}-{number}"
        client.create_buffer(BufferConfig(buffer, group_by="none", advantage=gae))
        members = [truncated(0, 9, truncate_status="response_truncated"), truncated(1, 9)]
        members += [truncated(2 + i, length) for i, length in enumerate(others)]
        client.push(members, buffer=buffer)
        batch = client.sample(len(members), buffer=buffer, timeout=60)
        by_run = dict(zip((one.eid.run for one in batch.experiences), batch.payloads, strict=True))
        flags = dict(zip((one.eid.run for one in batch.experiences), batch.flags, strict=True))
        assert ["bootstrapped" in flags[run] for run in sorted(flags)] == [True] + [False] * (
            len(members) - 1
        )
        rows.append(by_run[0] + by_run[1])
        padded = client.sample(1, buffer=buffer, format="packed", timeout=0)
        assert not padded, "everything was in the one batch"
    assert len(set(rows)) == 1, "the same bits, whatever it is computed and delivered with"


def test_areal_padding_changes_no_mask(client: Client, name: str) -> None:
    client.create_buffer(BufferConfig(name, group_by="none"))
    members = [truncated(run, length) for run, length in enumerate((3, 11, 7))]
    client.push(members, buffer=name)
    padded = client.sample(3, buffer=name, format="packed").packed.padded(pad_token_id=0)
    assert padded["action_mask"].sum(1).tolist() == [3, 11, 7]
    assert padded["attention_mask"].sum(1).tolist() == [5, 13, 9], "token 0 is a token, too"


def test_areal_groups_after_a_failed_one_keep_their_own_rewards(client: Client, name: str) -> None:
    """There later groups misalign after a failed one."""
    create(client, name, 2, advantage=AdvantageConfig("rloo"))
    members, failed, expected = [], [], {}
    for task in range(6):
        for run in range(2):
            one = experience(task, run, reward=10.0 * task + run * (task + 1))
            if task == 1 or (task, run) == (3, 0):
                failed.append(Tombstone(one.eid, "sandbox died"))
            else:
                members.append(one)
                expected[one.eid.uid] = (task + 1.0) * (2 * run - 1)
    # Alone in its group: nothing to be compared with.
    expected[experience(3, 1).eid.uid] = 30.0 + 4.0
    client.push(members, buffer=name, tombstones=failed)
    assert advantages(client, name, 5) == pytest.approx(expected)
    nothing = client.sample(1, buffer=name, timeout=0)
    assert not nothing, "a group of failures alone is no batch"


# --- lerobot


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_lerobot_bytes_from_strangers_are_never_run(
    client: Client, stub: Stub, name: str, tmp_path: Path
) -> None:
    """Unauthenticated gRPC and pickle were remote code execution there (CVE-2026-25874)."""
    create(client, name, 2)
    client.push([experience(0, 0)], buffer=name)
    bomb = pickle.dumps(Bomb(tmp_path / "gone off"))
    good = trxp.encode([experience(0, 1)])
    framed = good[:13] + len(bomb).to_bytes(8, "little") + bomb
    for payload in (bomb, framed):
        code, text, _ = error_of(partial(stub.Push, push_request(name, payload)))
        assert code == "INVALID_ARGUMENT", text
    annotate = service_pb2.AnnotateRequest(buffer=name)
    annotate.annotations.add(uid=experience(0, 0).eid.uid, tensors=bomb)
    assert stub.Annotate(annotate).outcomes[0].refusal
    assert not (tmp_path / "gone off").exists()
    pickle.loads(bomb)
    assert (tmp_path / "gone off").exists(), "it would have gone off"
    assert stats(client, name).num_items == 1
