"""Limiters: pushing and sampling kept in step, with what is waited for in words."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from experience_buffer import (
    Client,
    ConsumerConfig,
    InvalidRequestError,
    Limiter,
    ResourceExhaustedError,
    trxp,
)
from experience_buffer.v1 import service_pb2
from tests.integration.buffers import create, stats, trainer
from tests.integration.plain import error_of, experience, group, push, push_request
from tests.integration.server import MakeServer, Stub, eventually


def queue_of(size: int) -> Limiter:
    """Reverb's Queue and Stack: at most `size` wait to be sampled, each once."""
    return Limiter(samples_per_insert=1.0, min_diff=0.0, max_diff=float(size))


def pushes_wait_for(client: Client, name: str) -> str:
    """What keeps the trainer's limiter from accepting pushes."""
    return trainer(client, name).pushes_wait_for


def test_min_size_keeps_sampling_waiting_and_says_so(client: Client, name: str) -> None:
    """Reverb's MinSize."""
    create(client, name, limiter=Limiter(min_size=3))
    client.push(group(0, 2), buffer=name)
    nothing = client.sample(1, buffer=name, timeout=0)
    assert not nothing
    assert "2 stored of min_size 3" in nothing.shortfall
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.sample, 2, buffer=name, timeout=40)
        told = eventually(lambda: trainer(client, name).waiting_for, "a call to wait")
        assert "2 stored of min_size 3" in told
        client.push([experience(0, 2)], buffer=name)
        assert len(waiting.result()) == 2
    assert pushes_wait_for(client, name) == "", "nothing keeps pushes"
    client.push([experience(0, run) for run in range(3, 40)], buffer=name)


def test_a_ratio_keeps_both_sides_within_its_window(client: Client, stub: Stub, name: str) -> None:
    """Reverb's SampleToInsertRatio: 2 samples per insert, min_size 2, error buffer 2."""
    limiter = Limiter(min_size=2, samples_per_insert=2.0, min_diff=2.0, max_diff=6.0)
    create(client, name, limiter=limiter, replay=True, max_times_sampled=0)
    inserted = sampled = 0
    while inserted < 3:
        assert pushes_wait_for(client, name) == ""
        client.push([experience(0, inserted)], buffer=name)
        inserted += 1
    text = pushes_wait_for(client, name)
    assert "samples_per_insert 2 allows 0 more inserts until more is sampled, 1 are wanted" in text
    code, text, details = error_of(lambda: push(stub, name, [experience(1, 0)]))
    assert code == "RESOURCE_EXHAUSTED"
    assert "'trainer' to sample" in text
    assert 0 < details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 1
    while inserted * 2 - sampled - 1 >= 2:
        client.sample(1, buffer=name).ack()
        sampled += 1
        assert 2 <= inserted * 2 - sampled <= 6
    assert sampled == 4
    nothing = client.sample(1, buffer=name, timeout=0)
    assert "samples_per_insert 2 allows 0 more samples, a batch needs 1" in nothing.shortfall
    client.push([experience(1, 0)], buffer=name)
    inserted += 1
    assert len(client.sample(2, buffer=name)) == 2
    assert not client.sample(1, buffer=name, timeout=0)


@pytest.mark.parametrize(("kind", "order"), [("fifo", [0, 1, 2]), ("lifo", [2, 1, 0])])
def test_a_queue_and_a_stack_hold_so_many(
    client: Client, name: str, kind: Any, order: list[int]
) -> None:
    """Reverb's Queue and Stack."""
    create(client, name, limiter=queue_of(3), selector=kind)
    client.push(group(0, 3), buffer=name)
    with pytest.raises(ResourceExhaustedError, match="0 more inserts until more is sampled"):
        client.push([experience(0, 3)], buffer=name, timeout=1.0)
    runs = []
    for _ in range(3):
        batch = client.sample(1, buffer=name)
        runs += [one.eid.run for one in batch.experiences]
        batch.ack()
    assert runs == order
    assert not client.sample(1, buffer=name, timeout=0)
    client.push(group(1, 3), buffer=name)
    assert stats(client, name).num_items == 3


def test_a_push_that_waits_goes_on_when_something_is_sampled(client: Client, name: str) -> None:
    """The client tries again by itself: nothing is dropped and no error is seen."""
    create(client, name, limiter=queue_of(2))
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(
            lambda: [client.push([experience(0, run)], buffer=name) for run in range(6)]
        )
        runs = []
        for _ in range(6):
            batch = client.sample(1, buffer=name)
            runs += [one.eid.run for one in batch.experiences]
            batch.ack()
        assert [result.num_stored for result in pushing.result()] == [1] * 6
    assert runs == list(range(6))


def test_bytes_that_run_ahead_are_bounded(client: Client, stub: Stub, name: str) -> None:
    size = len(trxp.encode([experience(0, 0)]))
    create(client, name, limiter=Limiter(max_ahead_bytes=2 * size + size // 2))
    client.push([experience(0, 0)], buffer=name)
    client.push([experience(0, 1)], buffer=name)
    code, text, _ = error_of(lambda: push(stub, name, [experience(0, 2)]))
    assert code == "RESOURCE_EXHAUSTED"
    assert f"{2 * size} bytes are not sampled yet" in text
    assert "max_ahead_bytes" in text
    batch = client.sample(1, buffer=name)
    client.push([experience(0, 2)], buffer=name)
    batch.ack()
    assert stats(client, name).num_items == 2


def test_live_tuning_lets_waiting_calls_go(client: Client, name: str) -> None:
    """UpdateBuffer takes effect on calls that wait already, of both sides."""
    create(client, name, limiter=Limiter(min_size=100, max_diff=100.0))
    client.push(group(0, 4), buffer=name)

    def tune(limiter: Limiter | None) -> None:
        client.update_buffer(name, consumers=(ConsumerConfig("trainer", limiter=limiter),))

    with ThreadPoolExecutor(2) as pool:
        sampling = pool.submit(client.sample, 2, buffer=name, timeout=40)
        eventually(lambda: trainer(client, name).num_waiting, "the sample to wait")
        tune(Limiter(min_size=2, min_diff=0.0, max_diff=2.0))
        assert len(sampling.result()) == 2
        refused = threading.Event()

        def pushing() -> int:
            with pytest.raises(ResourceExhaustedError):
                client.push(group(1, 1), buffer=name, timeout=1.0)
            refused.set()
            return client.push(group(1, 1), buffer=name, timeout=40).num_stored

        waiting = pool.submit(pushing)
        assert refused.wait(20)
        tune(queue_of(3))
        assert waiting.result() == 1
    tune(None)
    client.push(group(2, 50), buffer=name)


@pytest.mark.parametrize(
    ("limiter", "consumer", "complaint"),
    [
        (Limiter(min_diff=0.0, max_diff=0.5), {}, "both can wait for each other for good"),
        (Limiter(min_diff=5.0, max_diff=1.0), {}, "no difference is between"),
        (Limiter(samples_per_insert=0.0), {}, "samples_per_insert"),
        (Limiter(min_size=0), {}, "min_size"),
        (
            Limiter(samples_per_insert=3.0, min_diff=0.0, max_diff=9.0),
            {"replay": True, "max_times_sampled": 2},
            "can't be reached when each unit is sampled at most 2 times",
        ),
    ],
)
def test_settings_that_would_deadlock_are_refused_when_they_are_made(
    client: Client, name: str, limiter: Limiter, consumer: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        create(client, name, limiter=limiter, **consumer)
    create(client, name, limiter=queue_of(3))
    with pytest.raises(InvalidRequestError, match=complaint):
        client.update_buffer(
            name, consumers=(ConsumerConfig("trainer", limiter=limiter, **consumer),)
        )


def test_counts_survive_restarts_and_tuning_after_one_never_deadlocks(
    make_server: MakeServer,
) -> None:
    """Reverb's checkpoint brings back an old limiter, and its quickstart hangs (their 103)."""
    server = make_server()
    ratio = Limiter(min_size=1, samples_per_insert=2.0, min_diff=0.0, max_diff=6.0)
    with Client(server.address) as client, server.stub() as stub:
        create(client, "b", limiter=ratio, replay=True, max_times_sampled=2)
        client.push(group(0, 3), buffer="b")
        client.sample(2, buffer="b").ack()
        client.sample(2, buffer="b").ack()
        assert stats(client, "b").num_items == 1, "two were sampled twice and are gone"
    server.restart()
    with Client(server.address) as client, server.stub() as stub:
        # 3 inserts, 4 samples: the difference is 2, so that 2 more inserts fit and no third.
        push(stub, "b", [experience(1, 0)])
        push(stub, "b", [experience(1, 1)])
        assert error_of(lambda: push(stub, "b", [experience(1, 2)]))[0] == "RESOURCE_EXHAUSTED"
        held = client.sample(2, buffer="b")
        held.nack()
        tuned = ConsumerConfig("trainer", limiter=queue_of(4), replay=True, max_times_sampled=2)
        client.update_buffer("b", consumers=(tuned,))
    server.restart()
    with Client(server.address) as client, server.stub() as stub:
        config = client.get_buffer("b").config
        assert config.consumers is not None
        assert config.consumers[0].limiter == queue_of(4), "not the one of before"
        pushed, sampled, run = 0, 0, 10
        while sampled < 12:
            # Whatever the counts: one side can always go on.
            text = pushes_wait_for(client, "b")
            batch = client.sample(1, buffer="b", timeout=0)
            assert batch or not text, f"both wait: {text}; {batch.shortfall}"
            if batch:
                batch.ack()
                sampled += 1
            if not pushes_wait_for(client, "b"):
                push(stub, "b", [experience(2, run)])
                pushed, run = pushed + 1, run + 1
        assert pushed > 0


def test_a_stream_of_pushes_is_told_to_wait_without_losing_its_place(
    stub: Stub, client: Client, name: str
) -> None:
    create(client, name, limiter=queue_of(2))
    requests = [
        service_pb2.PushStreamRequest(sequence=run, push=push_request(name, [experience(0, run)]))
        for run in range(4)
    ]
    answers = list(stub.PushStream(iter(requests)))
    assert [answer.sequence for answer in answers] == [0, 1, 2, 3]
    assert [answer.WhichOneof("result") for answer in answers] == ["response"] * 2 + ["error"] * 2
    assert answers[2].error.retry_delay_seconds > 0
    assert "to sample" in answers[2].error.message
