"""What has left stays readable: by uid, page by page, by training step; also after crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pyarrow.parquet as pq
import pytest

from experience_buffer import (
    Archive,
    BufferConfig,
    Client,
    ConsumerConfig,
    ExperienceNotFoundError,
    InvalidRequestError,
)
from tests.integration.plain import experience, groups
from tests.integration.server import MakeServer, Server, eventually

FAST = Archive(segment_seconds=0.1)


def create(client: Client, name: str, **fields: object) -> None:
    given = {"group_size": 2, "advantage": "grpo", "archive": FAST} | fields
    consumers = [ConsumerConfig("trainer", unit="group")]
    client.create_buffer(BufferConfig(name, consumers=consumers, **given))  # type: ignore[arg-type]


def rows_of(server: Server) -> list[str]:
    """Uids in the files of a server's archives."""
    return [
        uid
        for file in (server.data / "archive").rglob("*.parquet")
        for uid in pq.read_table(file, columns=["uid"]).column("uid").to_pylist()
    ]


def train(client: Client, name: str, step: int) -> tuple[str, ...]:
    """What one training step has consumed for good."""
    batch = client.sample(1, buffer=name)
    batch.ack(step=step)
    client.declare_safe(step, buffer=name)
    return tuple(one.eid.uid for one in batch.experiences)


def test_what_a_step_has_consumed_is_found_after_it_has_left(client: Client, name: str) -> None:
    create(client, name)
    pushed = groups(4, 2)
    client.push(pushed, buffer=name)
    taken = [train(client, name, step) for step in (5, 6, 7)]
    client.drop_group("7/3", buffer=name, reason="its tool broke")
    assert list(client.list(buffer=name)) == []

    found = client.get(taken[1][0], buffer=name)
    (as_pushed,) = [one for one in pushed if one.eid.uid == taken[1][0]]
    assert found.summary.state == "archived"
    assert found.departure is not None
    assert (found.departure.reason, found.departure.is_archived) == ("consumed", True)
    ((ack),) = found.departure.acked_by
    assert (ack.consumer, ack.step) == ("trainer", 6)
    assert found.experience is not None
    assert found.experience.tokens.tolist() == as_pushed.tokens.tolist()
    assert found.experience.advantages is not None
    assert found.computation is not None
    assert found.computation["estimator"] == "grpo"

    kinds = [event.kind for event in found.history]
    assert kinds == ["pushed", "computed", "acknowledged", "departed"]
    (latest,) = client.list_departures(buffer=name, limit=1).departures
    assert latest.is_archived

    everything = list(client.list(buffer=name, archived=True))
    assert len(everything) == 8
    assert everything[0].departure_reason == "group_dropped"
    assert everything[0].message == "its tool broke"
    times = [one.departure_time or 0.0 for one in everything]
    assert times == sorted(times, reverse=True)
    of_step = client.list(buffer=name, archived=True, consumer="trainer", step=6)
    assert {one.uid for one in of_step} == set(taken[1])
    dropped = client.list(buffer=name, archived=True, departure_reason="group_dropped")
    assert {one.tid for one in dropped} == {"7/3"}
    by_reward = client.list(buffer=name, archived=True, reward=(0.1, None), page_size=1)
    assert len(list(by_reward)) == 4


def test_the_archive_says_what_it_does_not_take(client: Client, name: str) -> None:
    create(client, name)
    with pytest.raises(InvalidRequestError, match="departure_reason is of what has left"):
        list(client.list(buffer=name, departure_reason="consumed"))
    with pytest.raises(InvalidRequestError, match="state is of what is stored"):
        list(client.list(buffer=name, archived=True, state="ready"))
    with pytest.raises(ExperienceNotFoundError):
        client.get("7/0/0/0/none", buffer=name)


def test_later_findings_are_appended_and_never_written_over(client: Client, name: str) -> None:
    create(client, name)
    client.push(groups(1, 2), buffer=name)
    uid, _ = train(client, name, 3)
    before = client.get(uid, buffer=name)
    client.annotate({uid: {"entropy": [0.5] * 11, "mismatch": 0.25}}, buffer=name)
    client.annotate({uid: {"logprobs": [0.0] * 11, "reward": 9.0}}, buffer=name)
    found = client.get(uid, buffer=name)
    assert [one.info for one in found.later] == [{"mismatch": 0.25}, {}]
    assert found.later[1].reward == 9.0
    assert found.experience is not None
    assert before.experience is not None
    assert found.experience.extra["entropy"].tolist() == [0.5] * 11
    assert found.experience.logprobs is not None
    assert before.experience.logprobs is not None
    assert found.experience.logprobs.tolist() == before.experience.logprobs.tolist()
    assert found.summary.reward == before.summary.reward
    refused = client.annotate(
        {"7/9/9/9/none": {"mismatch": 1.0}}, buffer=name, raise_on_refused=False
    )
    assert len(refused.refused) == 1


def test_delete_removes_what_is_archived_for_good(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math")
        client.push(groups(1, 2), buffer="math")
        first, second = train(client, "math", 3)
        eventually(lambda: bool(rows_of(server)), "archived")
        result = client.delete([first, "7/8/8/8/none"], buffer="math")
        assert (result.num_deleted, result.unknown_uids) == (1, ("7/8/8/8/none",))
        with pytest.raises(ExperienceNotFoundError):
            client.get(first, buffer="math")
        assert client.get(second, buffer="math").departure is not None
        assert rows_of(server) == [second]


def test_a_deleted_buffer_takes_its_archive_along(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math")
        client.push(groups(1, 2), buffer="math")
        uid, _ = train(client, "math", 3)
        eventually(lambda: bool(rows_of(server)), "archived")
        client.delete_buffer("math", force=True)
        assert not list((server.data / "archive").rglob("*.*"))
        create(client, "math")
        with pytest.raises(ExperienceNotFoundError):
            client.get(uid, buffer="math")


def test_the_files_of_another_store_are_nobodys(make_server: MakeServer) -> None:
    """A new store gives the numbers again that its predecessor gave, whose archive is still there."""
    server = make_server()
    for life in range(2):
        with Client(server.address) as client:
            create(client, "math")
            client.push([experience(life, run) for run in range(2)], buffer="math")
            train(client, "math", 3)
            eventually(lambda life=life: len(rows_of(server)) == 2 * life + 2, "archived")  # type: ignore[misc]
            assert {one.tid for one in client.list(buffer="math", archived=True)} == {f"7/{life}"}
        server.kill()
        for file in server.data.glob("*.*"):
            file.unlink()
        server.start()


def children(server: Server) -> dict[int, str]:
    """The server's processes by id, with what they run."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.pid)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = (line.split(None, 1) for line in found.stdout.splitlines())
    return {int(pid): command for pid, command in lines}


@pytest.mark.timeout(120)
def test_nothing_is_lost_or_doubled_whoever_is_killed_whenever(make_server: MakeServer) -> None:
    """The server and the process that writes, again and again, while experiences leave."""
    server = make_server()
    left: list[str] = []
    for life in range(6):
        with Client(server.address) as client:
            if life == 0:
                create(client, "math", archive=Archive(segment_seconds=0.1), group_size=0)
                client.update_buffer("math", group_by="none", consumers=["trainer"], advantage="")
            for number in range(15):
                pushed = [experience(life, 50 * number + run) for run in range(5)]
                client.push(pushed, buffer="math")
                batch = client.sample(5, buffer="math")
                batch.ack()
                left += [one.eid.uid for one in batch.experiences]
                if number == 7:
                    for pid, command in children(server).items():
                        if "archive.writer_process" in command:
                            os.kill(pid, signal.SIGKILL)
                time.sleep(0.02 * (life % 3))
        server.kill()
        server.start()
    with Client(server.address) as client:
        found = [one.uid for one in client.list(buffer="math", archived=True)]
        assert sorted(found) == sorted(left)

        eventually(lambda: len(rows_of(server)) >= len(left), "all archived")
        assert sorted(rows_of(server)) == sorted(left)
        assert client.get(left[0], buffer="math").departure is not None


def test_pushes_go_on_when_the_archive_cannot_write(make_server: MakeServer) -> None:
    """A file is where its folder should be, as little to be written to as a full disk."""
    server = make_server()
    with Client(server.address) as client:
        create(client, "math")
        (server.data / "archive").mkdir(exist_ok=True)
        created = client.get_buffer("math").create_time
        blocked = server.data / "archive" / f"2-{int(created * 1000)}"
        blocked.write_bytes(b"")
        client.push(groups(2, 2), buffer="math")
        uid, _ = train(client, "math", 3)
        eventually(lambda: any("can't archive" in line for line in server.log), "said")
        client.push([experience(9, 0), experience(9, 1)], buffer="math")
        assert client.get(uid, buffer="math").departure is not None
        (stats,) = [one for one in client.get_stats().buffers if one.name == "math"]
        assert stats.archive is not None
        assert stats.archive.num_pending == 2
        assert stats.archive.trouble
        blocked.unlink()
        eventually(lambda: bool(rows_of(server)), "archived")
