"""The process that computes advantages: `python -m experience_buffer_server.buffer.compute.worker`.

It reads payloads from the store, or gets them with the work, gives what an estimator needs to `advantages`, and answers with
float32 bytes. It keeps no state: a new worker continues where a dead one stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from experience_buffer import trxp
from experience_buffer.errors import TrxpError
from experience_buffer_server import advantages
from experience_buffer_server.advantages import (
    Column,
    EstimatorSpec,
    ExperienceInput,
    GroupFailure,
    GroupResult,
)
from experience_buffer_server.advantages.estimators.custom_functions import (
    CustomLoadError,
    load_estimators,
)
from experience_buffer_server.advantages.estimators.registry import Estimator
from experience_buffer_server.advantages.experience_inputs import (
    BOOTSTRAPPING,
    column_tensor,
    info_of,
    input_problem,
    read_inputs,
)
from experience_buffer_server.advantages.isolation import isolate
from experience_buffer_server.advantages.kernels.devices import (
    DeviceError,
    find_device,
    warm_up,
)
from experience_buffer_server.advantages.plan.specs import COLUMNS
from experience_buffer_server.advantages.stages.running_moments import RunningMoments
from experience_buffer_server.runtime.child_process import Parent
from experience_buffer_server.store.engines import open_reader
from experience_buffer_server.store.interface import Found, PayloadReader

_NICENESS = 10
"""Acknowledging pushes comes first where there are too few cores for everything."""
_GC_THRESHOLD = 100_000
_BATCH_ID_BYTES = 16
_FLAGS = ("singleton", "zero_mask", "bootstrapped")


class _DamagedError(Exception):
    """Payloads of a group can't be read back; by uid, why."""

    def __init__(self, reasons: dict[str, str]) -> None:
        first = next(iter(reasons))
        super().__init__(f"its member {first!r} can't be read: {reasons[first]}")
        self.reasons = reasons


class _Sent:
    """The payloads that came with a request, by buffer and uid."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._payloads: dict[tuple[int, str], bytes | None] = {
            (buffer_id, uid): payload
            for (buffer_id, members), payloads in zip(
                request["groups"], request["payloads"], strict=True
            )
            for (uid, _), payload in zip(members, payloads, strict=True)
        }

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """See `PayloadReader.payloads`."""
        return [self._payloads[buffer_id, uid] for uid in uids]


def compute_launch(
    reader: PayloadReader | None,
    request: Mapping[str, Any],
    *,
    device: str,
    threads: int,
    custom: Mapping[str, tuple[EstimatorSpec, Estimator]] | None = None,
) -> dict[str, Any]:
    """Compute one launch; one answer per group, an error where a group can't be computed.

    Payloads that don't come with the request are read by `reader`.
    """
    if "payloads" in request:
        reader = _Sent(request)
    assert reader is not None, "payloads are sent along where nobody else can read the store"
    known = {name: spec for name, (spec, _) in (custom or {}).items()}
    plan = advantages.plan(request["estimator"], request["parameters"], known)
    names = read_inputs(plan)
    groups: list[list[ExperienceInput]] = []
    sound: list[int] = []
    answers: list[Any] = []
    for place, (buffer_id, members) in enumerate(request["groups"]):
        try:
            groups.append(_inputs(reader, buffer_id, members, names=names))
            sound.append(place)
            answers.append(None)
        except _DamagedError as error:
            answers.append({"error": str(error), "damaged": error.reasons})
        except (TrxpError, LookupError) as error:
            answers.append({"error": str(error)})
    moments = request["moments"]
    running = None
    if moments is not None:
        running = RunningMoments.from_json(moments) if moments else RunningMoments()
    compute = functools.partial(
        advantages.compute,
        estimator=request["estimator"],
        parameters=request["parameters"],
        device=device,
        threads=threads,
        custom=custom,
    )
    results, running = isolate(
        compute,
        groups,
        batches=[request["batches"][place] for place in sound],
        counted=[request["counted"][place] for place in sound],
        moments=running,
    )
    for place, result in zip(sound, results, strict=True):
        answers[place] = _answer(result)
    if plan.parameters.uses_batch:
        _name_batches(request, answers)
    return {"groups": answers, "moments": None if running is None else running.to_json()}


def batch_id(uids: Iterable[str]) -> str:
    """A name for the statistics batch of these members, the same in whatever order they come.

    It says who they were, not when: computed again, an experience has the name of its earlier batch
    only where all members of that one were computed again with it.
    """
    members = json.dumps(sorted(uids)).encode()
    return hashlib.blake2b(members, digest_size=_BATCH_ID_BYTES).hexdigest()


def _name_batches(request: Mapping[str, Any], answers: list[Any]) -> None:
    """Record with each group who shared its statistics: the batch's groups that didn't fail."""
    uids: dict[int, list[str]] = {}
    named = [
        (number, members, answer["details"])
        for number, (_, members), answer in zip(
            request["batches"], request["groups"], answers, strict=True
        )
        if "details" in answer
    ]
    for number, members, _ in named:
        uids.setdefault(number, []).extend(uid for uid, _ in members)
    ids = {number: batch_id(of_batch) for number, of_batch in uids.items()}
    for number, _, details in named:
        details["batch_id"] = ids[number]


def experience_input(item: trxp.Item, run: str, *, names: Collection[str]) -> ExperienceInput:
    """What an estimator reads of an experience; extra inputs come as tensors or in info.

    Args:
        item: The experience.
        run: Its run, `""` where it votes alone.
        names: Inputs that are read; the others stay None, whatever they hold.

    Raises:
        LookupError: An input isn't what its name asks for.
    """
    if problem := input_problem(item, names):
        raise LookupError(problem)
    tensors, info = item.tensors, info_of(item)
    mask = tensors.get("action_mask")
    if mask is None:
        length = tensors["tokens"].shape[0] - int(item.meta.get("prompt_length", 1))
        mask_column = Column("U8", b"\x01" * max(length, 0))
    else:
        mask_column = Column(mask.dtype, mask.data)
    read = {name: info.get(name) for name in names}
    reward, baseline, turns = (
        item.meta.get("reward"),
        read.get("baseline_reward"),
        read.get("num_turns"),
    )
    return ExperienceInput(
        reward=None if reward is None else float(reward),
        mask=mask_column,
        baseline_reward=None if baseline is None else float(baseline),
        env_state_hash=read.get("env_state_hash"),
        num_turns=None if turns is None else int(turns),
        truncated=item.meta.get("truncate_status") == BOOTSTRAPPING,
        run=run,
        step=item.eid.step,
        **{name: _column(item, info, name) for name in COLUMNS if name in names},
    )


def _column(item: trxp.Item, info: Mapping[str, Any], name: str) -> Column | None:
    tensor = column_tensor(item, name)
    if tensor is not None:
        return Column(tensor.dtype, tensor.data)
    numbers = info.get(name)
    return None if numbers is None else Column("F64", array("d", numbers).tobytes())


def _inputs(
    reader: PayloadReader, buffer_id: int, members: list[Any], *, names: Collection[str]
) -> list[ExperienceInput]:
    payloads = reader.payloads(buffer_id, [uid for uid, _ in members])
    inputs = []
    damaged = {
        uid: str(payload or "its payload is gone")
        for (uid, _), payload in zip(members, payloads, strict=True)
        if not isinstance(payload, bytes)
    }
    if damaged:
        raise _DamagedError(damaged)
    for (_, run), payload in zip(members, payloads, strict=True):
        assert isinstance(payload, bytes)
        item = trxp.read(payload)[0]
        if isinstance(item, TrxpError):
            raise item
        inputs.append(experience_input(item, run, names=names))
        # A push may wait for this processor. The kernel lets even a process of low priority finish
        # its slice, some milliseconds, before it takes the processor away.
        os.sched_yield()
    return inputs


def _answer(result: GroupResult | GroupFailure) -> dict[str, Any]:
    if isinstance(result, GroupFailure):
        return {"error": result.error}
    return {
        "details": {**result.details, "compute_time": time.time()},
        "items": [
            (
                item.advantages,
                # Mostly the same: sent, stored and read once.
                None if item.returns is item.advantages else item.returns,
                {name: True for name in _FLAGS if getattr(item, name)}
                | {"mean_magnitude": item.magnitude, "mean_advantage": item.mean},
            )
            for item in result.items
        ],
    }


def main() -> None:
    """Serve until the server closes the socket."""
    descriptor, spec, wanted, threads, declared = sys.argv[1:]
    parent = Parent(int(descriptor))
    try:
        custom = load_estimators(json.loads(declared))
    except CustomLoadError as error:
        parent.refuse(str(error), for_good=True)
        return
    try:
        device = find_device(wanted, threads=int(threads))
    except DeviceError as error:
        parent.refuse(str(error), for_good=not error.is_known)
        return
    reader = open_reader(spec) if spec else None
    # A launch makes many small objects and no cycles: the collector would go through all modules'
    # objects again and again for nothing.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    # Not before: a group may wait for it to start, which takes a second of CPU time once.
    os.nice(_NICENESS)
    parent.ready(dataclasses.asdict(device))
    # A torch device has nothing left to compile.
    with _warming(int(threads)) if device.name == "cpu" else nullcontext():
        while (request := parent.receive()) is not None:
            answer = compute_launch(
                reader, request, device=device.name, threads=int(threads), custom=custom
            )
            parent.answer(answer)


@contextmanager
def _warming(threads: int) -> Iterator[None]:
    """Compile beside the first launches, so that none waits for a loop that it doesn't need."""
    ended = threading.Event()

    def compile_all() -> None:
        warm_up("cpu", threads=threads, stopped=ended.is_set)
        # What the compiler has made stays, too.
        gc.freeze()

    thread = threading.Thread(target=compile_all, name="warming")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
