"""Datasets against a real server in several processes: workers, ranks, a trainer that is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from experience_buffer import Client, InvalidRequestError
from experience_buffer.collation import trinity_collate
from experience_buffer.dataset import ExperienceDataset, LeasedBatch
from tests.integration import dataset_trainer
from tests.integration.dataset_groups import (
    PADDED,
    SIZE,
    fill,
    groups,
    left,
    loading,
    padded,
    retained,
)
from tests.integration.server import eventually

# --- workers


# Not "fork": this process has used gRPC, whose locks and threads a fork tears apart.
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_share_the_batches_and_the_trainer_acknowledges(
    client: Client, name: str, context: str
) -> None:
    keys = fill(client, name, 23)
    dataset = padded(client.address, name, ack="manual", prefetch=1)
    seen: list[str] = []
    leased: LeasedBatch
    # Also with a stream and a connection of this process.
    for begin in (0, 7) if context == "forkserver" else (0,):
        if begin:
            leased = next(iter(dataset))
            seen += groups(leased.data)
            dataset.ack(leased.ticket, step=6)
        loader = loading(dataset, num_workers=2, multiprocessing_context=context)
        batches = iter(loader)
        for step, leased in enumerate(itertools.islice(batches, 6), begin):
            seen += groups(leased.data)
            assert torch.is_tensor(leased.data["input_ids"])
            dataset.ack(leased.ticket, step=step)
        end(batches)
    assert len(seen) == len(set(seen)) == step + 1
    assert dataset.state_dict() == client.state_dict(step, buffer=name)
    dataset.close()
    rest = [key for key in keys if key not in seen]
    eventually(lambda: left(client, name) == rest, "what workers had read ahead to come back")


def test_experiences_travel_from_workers(client: Client, name: str) -> None:
    fill(client, name, 5)
    options: dict[str, Any]
    for options in ({"format": "trxp"}, {"format": "packed"}, {"collate": trinity_collate()}):
        dataset = ExperienceDataset(client, buffer=name, batch_size=1, ack="manual", **options)
        loader = loading(dataset, prefetch_factor=1, timeout=60)
        batches = iter(loader)
        experiences, ticket = next(batches)
        assert len({each.eid.tid for each in experiences}) == 1
        dataset.ack(ticket, step=0)
        end(batches)


ORPHANS = """
import sys
from torch.utils.data import DataLoader
from experience_buffer.collation import padded_collate
from experience_buffer.dataset import ExperienceDataset

if __name__ == "__main__":
    collate = padded_collate(pad_token_id=0)
    dataset = ExperienceDataset(
        sys.argv[1], buffer=sys.argv[2], batch_size=1, collate=collate, ack="manual"
    )
    batches = iter(
        DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    )
    print(batches._workers[0].pid, flush=True)
    for _ in batches:
        print("a batch", flush=True)
"""


def test_a_worker_whose_trainer_is_killed_gives_back_what_it_holds(
    client: Client, name: str, tmp_path: Path
) -> None:
    keys = fill(client, name, 3)
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS, encoding="utf-8")
    command = [sys.executable, str(script), client.address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        for _ in keys:
            assert trainer.stdout.readline() == "a batch\n"
        # Its worker waits for a fourth.
        trainer.kill()
    eventually(lambda: left(client, name) == keys, "what the killed trainer held to come back")
    eventually(lambda: not Path(f"/proc/{worker}").exists(), "its worker to end")


def end(batches: Any) -> None:
    """End the workers of a DataLoader's iterator.

    One that was spawned, and is sending what it has read ahead, may abort at its end, in torch's own
    thread; torch says so by an error wherever this process is. And an iterator that is collected as
    garbage in a cycle, as one is whose worker has failed, waits five seconds for each worker: its queues
    are gone first, and nobody tells them to end.
    """
    with contextlib.suppress(RuntimeError):
        batches._shutdown_workers()


def test_a_persistent_worker_gives_back_what_its_last_iteration_had_read_ahead(
    client: Client, name: str
) -> None:
    keys = fill(client, name, 16)
    dataset = padded(client.address, name, ack="manual", prefetch=1)
    loader = loading(dataset, persistent_workers=True)
    seen: list[str] = []
    leased: LeasedBatch
    for _ in range(5):
        for leased in itertools.islice(loader, 2):
            seen += groups(leased.data)
            dataset.ack(leased.ticket, step=len(seen))
    assert len(seen) == len(set(seen)) == 10
    end(loader._iterator)
    rest = [key for key in keys if key not in seen]
    eventually(lambda: left(client, name) == rest, "nothing to stay leased")


def lose_the_worker(address: str, name: str, end: Any) -> None:
    """Train for a step, then kill the worker, and stay."""
    dataset = padded(address, name, ack="manual")
    batches: Any = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    first, ticket = next(batches)
    dataset.ack(ticket, step=0)
    worker = batches._workers[0]
    # torch says so from its signal handler, anywhere. No more is asked of it: a worker that dies while it
    # writes leaves half a message, for which torch may wait for ever.
    with contextlib.suppress(RuntimeError):
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    end.send(groups(first))
    end.recv()
    os._exit(0)


def test_a_worker_that_dies_gives_its_leases_back(client: Client, name: str) -> None:
    keys = fill(client, name, 9)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    trainer = spawn.Process(target=lose_the_worker, args=(client.address, name, there))
    trainer.start()
    assert here.recv() == keys[:1]
    assert trainer.is_alive()
    eventually(lambda: left(client, name) == keys[1:], "the leases of the dead worker to come back")
    here.send(None)
    trainer.join(60)
    assert trainer.exitcode == 0


@pytest.mark.parametrize(
    ("settings", "num_workers", "words"),
    [
        ({"ack": "auto"}, 1, "ack='auto'"),
        ({"stop_after": 5}, 1, "stop_after"),
        ({"world_size": 2, "batch_size": 2}, 2, "world_size = 2 with 2 workers"),
        ({"token_budget": 50}, 2, "token_budget with 2 workers"),
    ],
)
def test_what_workers_cannot_do_is_refused(
    client: Client, name: str, settings: dict[str, Any], num_workers: int, words: str
) -> None:
    given: dict[str, Any] = {"batch_size": 1, "collate": PADDED, "ack": "manual", **settings}
    loader = DataLoader(padded(client, name, **given), batch_size=None, num_workers=num_workers)
    refused(loader, words)


def refused(loader: DataLoader[Any], words: str) -> None:
    """A worker refuses to iterate, with these words."""
    batches = iter(loader)
    try:
        with pytest.raises(InvalidRequestError, match=words):
            next(batches)
    finally:
        end(batches)


class Asking(ExperienceDataset):
    """Asks in a worker what only the trainer can answer."""

    def __iter__(self) -> Iterator[Any]:
        self.state_dict()
        return super().__iter__()


def test_the_state_is_not_the_workers(client: Client, name: str) -> None:
    dataset = Asking(client, buffer=name, batch_size=1, ack="manual", collate=PADDED)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1)
    refused(loader, "state_dict in a DataLoader worker")


# --- ranks


def train_as_rank(address: str, name: str, rank: int, results: Any) -> None:
    """One of two ranks, three steps; rank 1 with a worker."""
    dataset = padded(address, name, 4, rank=rank, world_size=2, ack="manual")
    loader = DataLoader(dataset, batch_size=None, num_workers=rank)
    for step, (batch, ticket) in enumerate(itertools.islice(loader, 3)):
        results.put((rank, step, groups(batch), ticket.lease_id))
        dataset.ack(ticket, step=step)
    dataset.close()


def test_ranks_get_disjoint_whole_groups(client: Client, name: str) -> None:
    keys = fill(client, name, 20)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=train_as_rank, args=(client.address, name, rank, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = [results.get() for _ in range(6)]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    steps: dict[int, list[str]] = {}
    for _, _, part, lease_id in sorted(found):
        assert len(part) == 2
        steps.setdefault(lease_id, []).extend(part)
    assert [sorted(part) for _, part in sorted(steps.items())] == [
        sorted(keys[begin : begin + 4]) for begin in (0, 4, 8)
    ]
    assert retained(client, name) == 12


def test_a_part_without_units_is_passed_over(client: Client, name: str) -> None:
    keys = fill(client, name, 3)
    shared = client.sample(1, buffer=name, rank=0, world_size=2)
    assert shared.num_units == 1
    dataset = padded(client, name, 2, rank=1, world_size=2, stop_after=1)
    [batch] = dataset
    assert groups(batch)[0] in keys[1:]
    assert shared.ack(0) == 0, "no rank is left that hasn't acknowledged it"
    dataset.close()


# --- crashes


def test_a_killed_trainer_learns_from_every_group_once(
    client: Client, name: str, tmp_path: Path
) -> None:
    keys = fill(client, name, 30)
    command = [sys.executable, dataset_trainer.__file__, client.address, name]
    command += [str(tmp_path / "checkpoint"), "15"]
    for num_steps in (1, 5, 3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            for _ in range(num_steps):
                assert trainer.stdout.readline()
            trainer.kill()
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    learned = json.loads((tmp_path / "checkpoint").read_text(encoding="utf-8"))["learned"]
    uids = [uid for batch in learned for uid in batch]
    assert len(uids) == len(set(uids)) == 30 * SIZE
    assert {"/".join(uid.split("/")[:2]) for uid in uids} == set(keys)
    assert {len({uid.split("/")[1] for uid in batch}) for batch in learned} == {2}
