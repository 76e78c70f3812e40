"""The soak's readers: a trainer that resumes, a logger, a learner that replays, and a critic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from experience_buffer import Batch, Client, LeaseNotFoundError
from tests.journal import Journal
from tests.soak.plan import LATE, LEASE_SECONDS, QUEUE, REPLAY, Plan, paced

SAVE_EVERY: Final = 10
"""Training steps from one checkpoint, and one policy version, to the next."""


def train(plan: Plan, role: str) -> None:
    """Learn from whole groups on a stream, going on from the last checkpoint."""
    checkpoint = plan.folder / "checkpoint.json"
    journal = plan.journal(role)
    with plan.client() as client:
        step = _resume(client, checkpoint)
        journal.write("resumed", step=step)
        with client.stream(4, buffer=QUEUE, min_batch_size=1, timeout=0.5) as batches:
            for batch in batches:
                step += 1
                journal.write("trained", step=step, uids=batch.uids, buffer=QUEUE)
                _settle(partial(batch.ack, step), journal)
                if step % SAVE_EVERY == 0:
                    _save(client, checkpoint, step)


def _resume(client: Client, checkpoint: Path) -> int:
    state = client.state_dict(-1, buffer=QUEUE)
    if checkpoint.exists():
        state = json.loads(checkpoint.read_bytes())
    client.load_state_dict(state)
    return int(state["step"])


def _save(client: Client, checkpoint: Path, step: int) -> None:
    draft = checkpoint.with_suffix(".tmp")
    draft.write_text(json.dumps(client.state_dict(step, buffer=QUEUE)), encoding="utf-8")
    draft.rename(checkpoint)
    client.declare_safe(step, buffer=QUEUE)
    client.publish_policy_version(step // SAVE_EVERY, buffer=QUEUE)


def log_items(plan: Plan, role: str) -> None:
    """Read single experiences by unary calls; now and then give some back, or take more time."""
    journal = plan.journal(role)
    with plan.client() as client:
        for number, due in enumerate(paced(8.0)):
            batch = _sample(client, journal, due, 64, buffer=QUEUE, consumer="logger")
            if not batch:
                continue
            if number % 11 == 0:
                _settle(batch.nack, journal)
                continue
            if number % 17 == 0:
                _settle(batch.extend, journal)
            journal.write("logged", uids=batch.uids)
            _settle(batch.ack, journal)


def replay(plan: Plan, role: str) -> None:
    """Read packed batches from the full buffer, and set their priorities."""
    journal = plan.journal(role)
    wanted = {"buffer": REPLAY, "consumer": "learner", "format": "packed"}
    with plan.client() as client:
        for number, due in enumerate(paced(5.0)):
            batch = _sample(client, journal, due, 32, **wanted)
            if not batch:
                continue
            lengths = batch.packed.offsets("logprobs").diff()
            if not bool((lengths > 0).all()):
                raise ValueError(f"a packed experience came without its logprobs: {batch!r}")
            uids = enumerate(batch.packed.uids)
            priorities = {uid: 1.0 + (place + number) % 7 for place, uid in uids}
            client.update_priorities(priorities, buffer=REPLAY)
            _settle(batch.ack, journal)


def criticise(plan: Plan, role: str) -> None:
    """Add the field that groups wait for, and learn from those that have it."""
    journal = plan.journal(role)
    with plan.client() as client:
        for due in paced(5.0):
            raw = _sample(client, journal, due, 64, buffer=LATE, consumer="critic")
            if raw:
                # One whose lease ran out may have been annotated, even consumed, before.
                annotations = {uid: {"baseline_reward": 0.5} for uid in raw.uids}
                client.annotate(annotations, buffer=LATE, raise_on_refused=False)
                _settle(raw.ack, journal)
            batch = _sample(client, journal, due, 16, buffer=LATE, consumer="trainer")
            if batch:
                journal.write("learned", uids=batch.uids)
                _settle(batch.ack, journal)


def _sample(client: Client, journal: Journal, due: float, size: int, **wanted: Any) -> Batch:
    """Take what is there, and write down how long that took."""
    batch = client.sample(
        size, min_batch_size=1, lease_seconds=LEASE_SECONDS, timeout=0.0, **wanted
    )
    journal.write("sampled", seconds=time.monotonic() - due, num_units=batch.num_units)
    return batch


def _settle(call: Callable[[], object], journal: Journal) -> None:
    """End a lease, or give it more time, and write down how long that took.

    It may have run out, on a machine that stood still: its units come again.
    """
    began = time.monotonic()
    try:
        call()
    except LeaseNotFoundError as error:
        journal.write("lost", details=str(error))
    else:
        journal.write("acked", seconds=time.monotonic() - began)
