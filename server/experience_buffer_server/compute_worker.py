"""The process that computes advantages: `python -m experience_buffer_server.compute_worker`.

It reads payloads from the store, gives what an estimator needs to `advantages`, and answers with
float32 bytes. It keeps no state: a new worker continues where a dead one stopped.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experience_buffer import trxp
from experience_buffer.errors import TrxpError
from experience_buffer_server import advantages
from experience_buffer_server.advantages import Column, ExperienceInput, GroupFailure, GroupResult
from experience_buffer_server.channel import Parent
from experience_buffer_server.store.lmdb_reader import LmdbReader


def compute_launch(reader: LmdbReader, request: Mapping[str, Any], device: str) -> list[Any]:
    """Compute one launch; one answer per group, an error where a group can't be computed."""
    groups: list[list[ExperienceInput]] = []
    answers: list[Any] = []
    for buffer_id, members in request["groups"]:
        try:
            groups.append(_inputs(reader, buffer_id, members))
            answers.append(None)
        except (TrxpError, LookupError) as error:
            answers.append({"error": str(error)})
    results = iter(
        advantages.compute(
            groups,
            estimator=request["estimator"],
            parameters=request["parameters"],
            device=device,
        )
    )
    return [_answer(next(results)) if answer is None else answer for answer in answers]


def experience_input(item: trxp.Item, run: str) -> ExperienceInput:
    """What estimators may read of an experience; extra inputs come as tensors or lists in info."""
    tensors, info = item.tensors, item.meta.get("info")
    mask = tensors.get("action_mask")
    if mask is None:
        length = tensors["tokens"].shape[0] - int(item.meta.get("prompt_length", 1))
        mask_column = Column("U8", b"\x01" * max(length, 0))
    else:
        mask_column = Column(mask.dtype, mask.data)
    reward = item.meta.get("reward")
    return ExperienceInput(
        reward=None if reward is None else float(reward),
        mask=mask_column,
        token_level_reward=_column(tensors, info, "token_level_reward"),
        values=_column(tensors, info, "values"),
        truncated=item.meta.get("truncate_status") is not None,
        run=run,
        step=item.eid.step,
    )


def _column(tensors: Mapping[str, trxp.TensorView], info: object, name: str) -> Column | None:
    tensor = tensors.get(name)
    if tensor is not None:
        return Column(tensor.dtype, tensor.data)
    values = info.get(name) if isinstance(info, Mapping) else None
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
                {
                    name: True
                    for name in ("singleton", "zero_mask", "bootstrapped")
                    if getattr(item, name)
                },
            )
            for item in result.items
        ],
    }


def main() -> None:
    """Serve until the server closes the socket."""
    descriptor, path, device, threads = sys.argv[1:]
    parent = Parent(int(descriptor))
    import torch

    torch.set_num_threads(int(threads))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.empty(0, device=device)  # A device that isn't there ends the worker before it is ready.
    reader = LmdbReader(Path(path))
    parent.ready()
    while (request := parent.receive()) is not None:
        parent.answer(compute_launch(reader, request, device))


if __name__ == "__main__":
    main()
