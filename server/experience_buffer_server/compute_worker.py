"""The process that computes advantages: `python -m experience_buffer_server.compute_worker`.

It reads payloads from the store, gives what an estimator needs to `advantages`, and answers with
float32 bytes. It keeps no state: a new worker continues where a dead one stopped.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
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
from experience_buffer_server.advantages.custom_functions import CustomLoadError, load_estimators
from experience_buffer_server.advantages.devices import warm_up
from experience_buffer_server.advantages.isolation import isolate
from experience_buffer_server.advantages.moments import RunningMoments
from experience_buffer_server.advantages.registry import Estimator
from experience_buffer_server.channel import Parent
from experience_buffer_server.store.lmdb_reader import LmdbReader

_NICENESS = 10
"""Acknowledging pushes comes first where there are too few cores for everything."""
_FLAGS = ("singleton", "zero_mask", "bootstrapped")
_COLUMNS = ("token_level_reward", "values", "logprobs", "ref_logprobs", "teacher_logprobs")


def compute_launch(
    reader: LmdbReader,
    request: Mapping[str, Any],
    *,
    device: str,
    threads: int,
    custom: Mapping[str, tuple[EstimatorSpec, Estimator]] | None = None,
) -> dict[str, Any]:
    """Compute one launch; one answer per group, an error where a group can't be computed."""
    groups: list[list[ExperienceInput]] = []
    sound: list[int] = []
    answers: list[Any] = []
    for place, (buffer_id, members) in enumerate(request["groups"]):
        try:
            groups.append(_inputs(reader, buffer_id, members))
            sound.append(place)
            answers.append(None)
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
    return {"groups": answers, "moments": None if running is None else running.to_json()}


def experience_input(item: trxp.Item, run: str) -> ExperienceInput:
    """What estimators may read of an experience; extra inputs come as tensors or in info.

    Raises:
        LookupError: An entry of `info` isn't of the kind that its name asks for.
    """
    tensors, info = item.tensors, item.meta.get("info")
    extra: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
    mask = tensors.get("action_mask")
    if mask is None:
        length = tensors["tokens"].shape[0] - int(item.meta.get("prompt_length", 1))
        mask_column = Column("U8", b"\x01" * max(length, 0))
    else:
        mask_column = Column(mask.dtype, mask.data)
    reward, baseline = item.meta.get("reward"), _of(extra, "baseline_reward", int, float)
    return ExperienceInput(
        reward=None if reward is None else float(reward),
        mask=mask_column,
        baseline_reward=None if baseline is None else float(baseline),
        env_state_hash=_of(extra, "env_state_hash", str),
        num_turns=_of(extra, "num_turns", int),
        truncated=item.meta.get("truncate_status") is not None,
        run=run,
        step=item.eid.step,
        **{name: _column(tensors, extra, name) for name in _COLUMNS},
    )


def _of(info: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = info.get(name)
    if isinstance(value, float) and value.is_integer() and kinds == (int,):
        value = int(value)  # An annotation's numbers travel as floats.
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise LookupError(f"info[{name!r}] is {value!r}; {expected} is expected")
    return value


def _column(
    tensors: Mapping[str, trxp.TensorView], info: Mapping[str, Any], name: str
) -> Column | None:
    tensor = tensors.get(name)
    if tensor is not None:
        return Column(tensor.dtype, tensor.data)
    values = info.get(name)
    if not isinstance(values, list | tuple):
        return None
    try:
        return Column("F64", array("d", values).tobytes())
    except (TypeError, OverflowError) as error:
        raise LookupError(f"info[{name!r}] holds other things than numbers: {error}") from error


def _inputs(reader: LmdbReader, buffer_id: int, members: list[Any]) -> list[ExperienceInput]:
    payloads = reader.payloads(buffer_id, [uid for uid, _ in members])
    inputs = []
    for (uid, run), payload in zip(members, payloads, strict=True):
        if payload is None:
            raise LookupError(f"payload of {uid!r} is gone")
        item = trxp.read(payload)[0]
        if isinstance(item, TrxpError):
            raise item
        inputs.append(experience_input(item, run))
    return inputs


def _answer(result: GroupResult | GroupFailure) -> dict[str, Any]:
    if isinstance(result, GroupFailure):
        return {"error": result.error}
    return {
        "details": result.details,
        "items": [
            (
                item.advantages,
                item.returns,
                {name: True for name in _FLAGS if getattr(item, name)},
            )
            for item in result.items
        ],
    }


def main() -> None:
    """Serve until the server closes the socket."""
    descriptor, path, device, threads, declared = sys.argv[1:]
    parent = Parent(int(descriptor))
    os.nice(_NICENESS)
    try:
        custom = load_estimators(json.loads(declared))
    except CustomLoadError as error:
        parent.refuse(str(error))
        return
    # A device that isn't there ends the worker before it is ready.
    device = warm_up(device, threads=int(threads))
    reader = LmdbReader(Path(path))
    parent.ready()
    while (request := parent.receive()) is not None:
        answer = compute_launch(reader, request, device=device, threads=int(threads), custom=custom)
        parent.answer(answer)


if __name__ == "__main__":
    main()
