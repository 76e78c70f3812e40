"""What other buffers lose, repeat, mix or hang on, each as a case of our own server.

Here and in `test_peers_groups.py` is a test per case that users of Reverb, TransferQueue, Trinity-RFT,
verl, slime, NeMo-RL, SkyRL, miles, TRL, AReaL, lerobot and agent-lightning reported or we measured. Cases
that other modules test already, and what users praise elsewhere, are in the table below.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from experience_buffer import Client, ConsumerConfig, WriterOptions
from tests.integration.buffers import create, trainer
from tests.integration.plain import experience, group
from tests.integration.server import MakeServer, Server, eventually

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
        "integration/test_chaos.py::test_nothing_is_lost_and_nothing_comes_back",
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
        "unit/settings/test_estimators.py::test_no_buffer_names_a_path"
    ],
    "TransferQueue, Trinity, lerobot: unpickles what arrives": [
        "integration/test_bad_input.py::test_a_damaged_payload_is_refused_as_a_whole",
        "unit/client/codec/test_pickle_reader.py::test_no_opcodes_do_harm",
        "unit/client/codec/test_pickle_reader.py::test_hostile_pickles_are_refused_in_bounded_memory",
    ],
    "Trinity: get_batch hangs and nothing says why (their 182)": [
        "integration/test_streaming.py::test_a_first_batch_that_does_not_come_raises_with_the_reason",
        "integration/test_end_to_end.py::test_a_shortfall_says_why",
        "integration/test_limiter.py::test_min_size_keeps_sampling_waiting_and_says_so",
        "integration/test_pacing.py::test_as_many_tasks_begin_as_can_be_used_in_time",
    ],
    "Trinity: a timeout with 3 of 5 gives nobody any, and the 3 are gone": [
        "integration/test_end_to_end.py::test_a_shortfall_says_why",
        "models/test_histories.py::test_histories",
    ],
    "Trinity: a full priority queue drops what comes, and nobody hears of it": [
        "integration/test_eviction.py::test_by_default_a_full_buffer_refuses_and_keeps_everything",
        "integration/test_limiter.py::test_a_push_that_waits_goes_on_when_something_is_sampled",
    ],
    "TransferQueue: ready members of two prompts become one group": [
        "integration/test_groups.py::test_groups_are_whole_and_never_mixed",
        "integration/test_end_to_end.py::test_a_shortfall_says_why",
    ],
    "TransferQueue: a length-balanced split delivers 2 of 8 twice and 2 never": [
        "integration/test_ranks.py::test_parts_are_disjoint_whole_and_balanced",
        "unit/sampling/test_ranks.py::test_each_unit_goes_to_one_rank_and_counts_are_even",
    ],
    "verl: no durable buffer; hours of trajectories are lost with a crash": [
        "integration/test_chaos.py::test_nothing_is_lost_and_nothing_comes_back",
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
        "unit/advantages/test_compute.py::test_a_run_votes_once_with_the_reward_of_its_highest_step"
    ],
    "nobody model-checks delivery": ["models/test_histories.py::test_histories"],
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
    "praised, torchrl: priorities with generations": ["models/test_histories.py::test_histories"],
    "praised, prime-rl: staleness checked when the batch ships": [
        "integration/test_staleness.py::test_freshness_is_judged_when_the_batch_ships"
    ],
    "praised, Marin: versions newer than the trainer's are refused": [
        "integration/test_staleness.py::test_versions_of_the_future_are_refused_where_that_is_set",
        "integration/test_staleness.py::test_a_rollback_holds_what_came_after",
    ],
}


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


def wait_for_leased(client: Client, name: str, count: int) -> None:
    """Wait until so many units are leased."""
    eventually(lambda: trainer(client, name).num_leased_units == count, f"{count} leased units")


def test_reverb_a_consumer_killed_after_one_item_loses_nothing(
    shared_server: Server, client: Client, name: str
) -> None:
    """Reverb 0.14 loses 2, 10 and 100 items of a queue with a window of 1, 10 and 100."""
    consumers = []
    for window in (1, 10, 100):
        buffer = f"{name}-{window}"
        create(client, buffer)
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
            wait_for_leased(client, buffer, window)
            process.send_signal(signal.SIGKILL)
        wait_for_leased(client, buffer, 0)
        rest = client.sample(149, buffer=buffer)
        assert rest.uids == tuple(experience(0, run).eid.uid for run in range(1, 150))


# --- TransferQueue


def test_transferqueue_an_early_read_stalls_nobody(client: Client, name: str) -> None:
    """There one read that comes before its data stalls another client for 4.5 s."""
    create(client, name, consumers=(ConsumerConfig("early"), ConsumerConfig("other")))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client.sample, 8, buffer=name, consumer="early", timeout=60)
        eventually(lambda: trainer(client, name).num_waiting, "the early read to wait")
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


# --- Trinity-RFT


def test_trinity_closing_keeps_the_last_partial_batch(make_server: MakeServer) -> None:
    """There closing drops it, on the side that writes and on the side that reads."""
    server = make_server()
    with Client(server.address) as client:
        create(client, "b")
        options = WriterOptions(linger_seconds=60, max_batch_items=100)
        with client.writer(buffer="b", options=options) as writer:
            for one in group(0, 3):
                writer.append(one)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(client.sample, 5, buffer="b", timeout=40)
            eventually(
                lambda: client.get_stats("b").buffers[0].consumers[0].num_waiting, "it to wait"
            )
            assert server.stop() == 0
            assert reading.result().shortfall == "the server is stopping"
        server.start()
        client.push([experience(0, 3), experience(0, 4)], buffer="b")
        batch = client.sample(5, buffer="b")
        assert batch.uids == tuple(one.eid.uid for one in group(0, 5))


def test_trinity_an_experience_over_32_mib_is_not_skipped(client: Client, name: str) -> None:
    """There SQL mode skips it with a line in the log."""
    create(client, name)
    size = 9 * 1024 * 1024
    one = experience(
        0,
        0,
        tokens=torch.arange(size, dtype=torch.int32),
        prompt_length=size - 2,
        logprobs=[-1, -2],
    )
    assert client.push([one], buffer=name).num_stored == 1
    batch = client.sample(1, buffer=name)
    assert len(batch.payloads[0]) > 32 * 1024 * 1024
    assert torch.equal(batch.experiences[0].tokens, one.tokens)
