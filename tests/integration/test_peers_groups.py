"""What other buffers get wrong about groups, crashes and foreign bytes; see `test_peers.py`."""

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
    ConsumerConfig,
    Experience,
    Tombstone,
    trxp,
)
from experience_buffer.v1 import service_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.integration.plain import error_of, experience, group, push_request, stats
from tests.integration.server import Server, eventually


def grouped(name: str, **config: Any) -> BufferConfig:
    """A buffer whose trainer takes groups."""
    return BufferConfig(name, consumers=(ConsumerConfig("trainer", "group"),), **config)


def advantages(client: Client, name: str, size: int) -> dict[str, float]:
    """The advantage of the last token of each experience, by uid."""
    batch = client.sample(size, buffer=name, timeout=60)
    assert batch.num_units == size, batch.shortfall
    found = {}
    for uid, one in zip(batch.uids, batch.experiences, strict=True):
        assert one.advantages is not None
        found[uid] = float(one.advantages[-1])
    return found


# --- verl


def test_verl_what_was_acknowledged_is_there_after_a_crash(
    make_server: Callable[..., Server],
) -> None:
    """Their users lose 2,400 to 4,000 trajectory-seconds with every crash."""
    server = make_server()
    pushed = [one for task in range(5) for one in group(task, 2)]
    with Client(server.address) as client:
        client.create_buffer(grouped("b", group_size=2))
        assert client.push(pushed, buffer="b").num_stored == 10
        server.restart()
        batch = client.sample(5, buffer="b")
        assert batch.payloads == tuple(trxp.encode([one]) for one in pushed), "bit for bit"


# --- slime, NeMo-RL, SkyRL, miles, TRL


def test_slime_a_group_that_never_completes_keeps_nobody_waiting(
    client: Client, stub: ExperienceBufferStub, name: str
) -> None:
    """There one lost rollout stalls training: 29 h in one report, 7.5 h in another."""
    client.create_buffer(grouped(name, group_size=2))
    client.push([experience(0, 0), *group(1, 2), experience(2, 0), *group(3, 2)], buffer=name)
    batch = client.sample(2, buffer=name)
    assert list(dict.fromkeys(batch.groups)) == ["7/1", "7/3"]
    batch.ack()
    assert "oldest open group '7/0' has 1 of 2" in stats(stub, name).oldest_open_group
    client.drop_group("7/0", buffer=name, reason="its worker is gone")
    client.seal_group("7/2", buffer=name)
    rest = client.sample(1, buffer=name)
    assert rest.groups == ("7/2",)
    rest.ack()
    assert stats(stub, name).num_items == 0


def test_nemo_a_group_is_over_at_its_deadline(
    client: Client, stub: ExperienceBufferStub, name: str
) -> None:
    config = grouped(name, group_size=4, group_deadline_seconds=0.3, on_group_deadline="drop")
    client.create_buffer(config)
    client.push(group(0, 3), buffer=name)
    eventually(lambda: stats(stub, name).num_items == 0, "the group to be dropped")
    late = client.push([experience(0, 3)], buffer=name, raise_on_refused=False)
    assert late.outcomes[0].reason == "late"


def test_miles_short_answers_that_come_first_are_not_trained_on_alone(
    client: Client, name: str
) -> None:
    """A partial group holds the rollouts that ended early: its mean favours short answers."""
    client.create_buffer(grouped(name, group_size=4, advantage=AdvantageConfig("rloo")))
    client.push([experience(0, run, reward=1.0) for run in range(2)], buffer=name)
    assert not client.sample(1, buffer=name, min_batch_size=1, timeout=0.05)
    slow = [experience(0, run, reward=0.0) for run in (2, 3)]
    client.push(slow, buffer=name)
    found = advantages(client, name, 1)
    assert sorted(found.values()) == pytest.approx([-2 / 3, -2 / 3, 2 / 3, 2 / 3])


def test_trl_a_failed_rollout_completes_its_group_without_a_vote(client: Client, name: str) -> None:
    client.create_buffer(grouped(name, group_size=3, advantage=AdvantageConfig("rloo")))
    failed = Tombstone(experience(0, 2).eid, "out of memory")
    client.push(
        [experience(0, run, reward=float(run)) for run in range(2)],
        buffer=name,
        tombstones=[failed],
    )
    assert list(advantages(client, name, 1).values()) == [-1.0, 1.0]


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
    client.create_buffer(grouped(name, group_size=2, advantage=AdvantageConfig("rloo")))
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
    client: Client, stub: ExperienceBufferStub, name: str, tmp_path: Path
) -> None:
    """Unauthenticated gRPC and pickle were remote code execution there (CVE-2026-25874)."""
    client.create_buffer(grouped(name, group_size=2))
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
    assert stats(stub, name).num_items == 1


# --- agent-lightning


def test_agent_lightning_a_long_run_votes_once(client: Client, name: str) -> None:
    """A run of many turns must not outweigh the others in the baseline (their 445 and 462)."""
    turns = {0: 5, 1: 1, 2: 1}
    rewards = {0: 3.0, 1: 0.0, 2: 0.0}
    client.create_buffer(grouped(name, group_size=7, advantage=AdvantageConfig("rloo")))
    client.push(
        [
            experience(0, run, step=step, reward=rewards[run])
            for run, count in turns.items()
            for step in range(count)
        ],
        buffer=name,
    )
    found = advantages(client, name, 1)
    for uid, advantage in found.items():
        run = int(uid.split("/")[2])
        # Against the mean of the two other runs, each counted once.
        assert advantage == pytest.approx(3.0 if run == 0 else -1.5), uid
    assert len(found) == 7
