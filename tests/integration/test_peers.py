"""What other buffers lose, repeat, mix or hang on, each as a case of our own server.

Here, in `test_peers_trinity.py` and in `test_peers_groups.py` is a test per case that users of Reverb, TransferQueue, Trinity-RFT,
verl, slime, NeMo-RL, SkyRL, miles, TRL, AReaL, lerobot and agent-lightning reported or we measured. Cases
that other modules test already, and what users praise elsewhere, are in the table below.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from experience_buffer import BufferConfig, Client, ConsumerConfig
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.integration.plain import experience, group, stats
from tests.integration.server import Server, eventually

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "Reverb: a checkpoint brings back an old limiter and deadlocks (their 103)": [
        "integration/test_limiter.py::test_counts_survive_restarts_and_tuning_after_one_never_deadlocks"
    ],
    "Reverb: a limiter that can deadlock is accepted": [
        "integration/test_limiter.py::test_settings_that_would_deadlock_are_refused_when_they_are_made",
        "unit/sampling/test_limiter.py::test_exactly_the_plans_that_can_get_stuck_are_refused",
    ],
    "Reverb: at most once, in RAM only": [
        "integration/test_kill.py::test_no_acknowledged_push_is_lost",
        "integration/test_kill.py::test_delivery_survives_the_death_of_everyone",
    ],
    "Reverb: no TLS, and whoever connects may do everything": [
        "integration/test_tls.py::test_a_listener_on_the_network_reads_nothing",
        "integration/test_tls.py::test_only_a_certificate_of_the_right_authority_gets_in",
        "integration/test_access.py::test_without_a_token_nothing_is_served",
        "integration/test_access.py::test_each_role_may_make_the_calls_of_the_table",
    ],
    "Reverb: no health service": [
        "integration/test_lifecycle.py::test_health_reflection_and_metrics_answer"
    ],
    "Reverb: no wheel for newer Pythons": ["unit/test_project.py::test_this_python_is_supported"],
    "TransferQueue: runs callables sent to it": [
        "integration/test_custom_estimator.py::test_no_call_names_code"
    ],
    "TransferQueue, Trinity, lerobot: unpickles what arrives": [
        "integration/test_bad_input.py::test_a_damaged_payload_is_refused_as_a_whole",
        "unit/client/codec/test_pickle_reader.py::test_no_opcodes_do_harm",
        "unit/client/codec/test_pickle_reader.py::test_hostile_pickles_are_refused_in_bounded_memory",
    ],
    "Trinity: get_batch hangs and nothing says why (their 182)": [
        "integration/test_streaming.py::test_a_first_batch_that_does_not_come_raises_with_the_reason",
        "integration/test_end_to_end.py::test_a_shortfall_says_why",
    ],
    "verl: no durable buffer; hours of trajectories are lost with a crash": [
        "unit/store/lmdb/test_crash.py::test_a_kill_loses_nothing_acknowledged_and_leaves_no_part",
        "integration/test_training_timeline.py::test_a_trainer_killed_at_50_points_learns_from_every_group_once",
    ],
    "slime, NeMo-RL, SkyRL: groups that never complete": [
        "integration/test_groups.py::test_what_happens_at_the_deadline_of_a_group",
        "integration/test_groups.py::test_a_sealed_group_is_whole",
    ],
    "miles, TRL: partial groups bias the statistics": [
        "integration/test_groups.py::test_a_tombstone_completes_its_group_and_has_no_vote"
    ],
    "agent-lightning: long runs bias the baseline (445, 462)": [
        "unit/advantages/estimators/test_group_relative.py::test_a_run_of_several_steps_votes_once_with_its_last"
    ],
    "nobody model-checks delivery": [
        "models/test_buffer_histories.py::test_histories_without_an_estimator"
    ],
    "praised, Reverb: credits": [
        "integration/test_streaming.py::test_byte_credits_bound_what_is_sent_ahead",
        "integration/test_delivery.py::test_a_stream_delivers_one_batch_per_credit",
    ],
    "praised, Reverb: the limiter": [
        "integration/test_limiter.py::test_a_ratio_keeps_both_sides_within_its_window",
        "integration/test_limiter.py::test_a_queue_and_a_stack_hold_so_many",
    ],
    "praised, Reverb: selectors for sampling, and for removal": [
        "integration/test_selectors.py::test_groups_come_in_the_order_that_was_asked_for",
        "integration/test_eviction.py::test_the_remover_chooses_whole_groups",
    ],
    "praised, Reverb: times_sampled": [
        "integration/test_replay.py::test_a_group_comes_as_often_as_asked_and_is_gone"
    ],
    "praised, TransferQueue: each task sees what it has not consumed": [
        "integration/test_delivery.py::test_every_consumer_sees_everything_once",
        "integration/test_delivery.py::test_a_consumer_added_later_sees_what_is_there",
    ],
    "praised, TransferQueue: columns added later": [
        "integration/test_estimators.py::test_late_fields_are_waited_for_and_computed_with"
    ],
    "praised, NeMo-RL: reserve then commit group slots": [
        "integration/test_pacing.py::test_as_many_tasks_begin_as_can_be_used_in_time"
    ],
    "praised, NeMo-RL: a staleness window": [
        "integration/test_staleness.py::test_the_window_is_by_lag_and_by_span"
    ],
    "praised, torchrl: priorities with generations": [
        "integration/test_priorities.py::test_an_update_of_an_older_generation_is_ignored"
    ],
    "praised, prime-rl: staleness checked when the batch ships": [
        "integration/test_staleness.py::test_freshness_is_judged_when_the_batch_ships"
    ],
    "praised, Marin: versions newer than the trainer's are refused": [
        "integration/test_staleness.py::test_versions_of_the_future_are_refused_where_that_is_set",
        "integration/test_staleness.py::test_a_rollback_holds_what_came_after",
    ],
}


def alone(name: str, **config: Any) -> BufferConfig:
    """A buffer of single experiences."""
    return BufferConfig(name, **({"group_by": "none"} | config))


def grouped(name: str, **config: Any) -> BufferConfig:
    """A buffer whose trainer takes groups."""
    return BufferConfig(name, consumers=(ConsumerConfig("trainer", "group"),), **config)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_cases_that_are_tested_elsewhere_are(case: str) -> None:
    for place in ELSEWHERE[case]:
        path, _, test = place.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        assert test in names, f"{case}: {place} is gone"


# --- Reverb

CONSUMER = """
import sys, time
from experience_buffer import Client
address, buffer, window = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Client(address) as client, client.stream(1, buffer=buffer, prefetch=window) as stream:
    batch = next(stream)
    batch.ack()
    print(batch.uids[0], flush=True)
    sys.stdin.read()
"""


def wait_for_leased(stub: ExperienceBufferStub, name: str, count: int) -> None:
    """Wait until so many units are leased."""
    eventually(
        lambda: stats(stub, name).consumers[0].num_leased_units == count, f"{count} leased units"
    )


def test_reverb_a_consumer_killed_after_one_item_loses_nothing(
    shared_server: Server, client: Client, stub: ExperienceBufferStub, name: str
) -> None:
    """Reverb 0.14 loses 2, 10 and 100 items of a queue with a window of 1, 10 and 100."""
    consumers = []
    for window in (1, 10, 100):
        buffer = f"{name}-{window}"
        client.create_buffer(alone(buffer))
        client.push([experience(0, run) for run in range(150)], buffer=buffer)
        command = [sys.executable, "-c", CONSUMER, shared_server.address, buffer, str(window)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        consumers.append((window, buffer, process))
    for window, buffer, process in consumers:
        with process:
            assert process.stdout is not None
            first = process.stdout.readline().strip()
            assert first == experience(0, 0).eid.uid
            # One is acknowledged, and the stream reads as far ahead as it may.
            wait_for_leased(stub, buffer, window)
            process.send_signal(signal.SIGKILL)
        wait_for_leased(stub, buffer, 0)
        rest = client.sample(149, buffer=buffer)
        assert rest.uids == tuple(experience(0, run).eid.uid for run in range(1, 150))


# --- TransferQueue


def test_transferqueue_ready_members_of_two_prompts_are_never_one_group(
    client: Client, name: str
) -> None:
    """Its sampler takes n consecutive indices: ready [1, 2, 3, 4, 5], n = 3 mixes two prompts."""
    client.create_buffer(grouped(name, group_size=3))
    client.push([experience(0, 1), experience(0, 2)], buffer=name)
    client.push(group(1, 3), buffer=name)
    batch = client.sample(2, buffer=name, min_batch_size=1, timeout=0)
    assert set(batch.groups) == {"7/1"}
    assert len(batch) == 3
    assert "oldest open group '7/0' has 2 of 3" in batch.shortfall
    client.push([experience(0, 0)], buffer=name)
    assert set(client.sample(1, buffer=name).groups) == {"7/0"}


@pytest.mark.parametrize("world", [2, 4])
def test_transferqueue_a_length_balanced_split_delivers_each_once(
    client: Client, name: str, world: int
) -> None:
    """Its length-balanced sampler delivers 2 of 8 samples twice and 2 never."""
    client.create_buffer(alone(name))
    lengths = [30, 1, 17, 4, 9, 9, 2, 24]
    pushed = [
        experience(0, run, tokens=torch.zeros(2 + n, dtype=torch.int32), logprobs=torch.zeros(n))
        for run, n in enumerate(lengths)
    ]
    client.push(pushed, buffer=name)
    parts = [client.sample(8, buffer=name, rank=rank, world_size=world) for rank in range(world)]
    counts = Counter(uid for part in parts for uid in part.uids)
    assert counts == {one.eid.uid: 1 for one in pushed}
    assert [len(part) for part in parts] == [8 // world] * world


def test_transferqueue_an_early_read_stalls_nobody(
    client: Client, stub: ExperienceBufferStub, name: str
) -> None:
    """There one read that comes before its data stalls another client for 4.5 s."""
    client.create_buffer(alone(name, consumers=(ConsumerConfig("early"), ConsumerConfig("other"))))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client.sample, 8, buffer=name, consumer="early", timeout=60)
        eventually(lambda: stats(stub, name).consumers[0].num_waiting, "the early read to wait")
        started = time.monotonic()
        for run in range(7):
            client.push([experience(0, run)], buffer=name)
            batch = client.sample(1, buffer=name, consumer="other")
            assert batch.uids == (experience(0, run).eid.uid,)
            batch.ack()
        assert time.monotonic() - started < 4.0
        assert not early.done()
        client.push([experience(0, 7)], buffer=name)
        assert len(early.result()) == 8
