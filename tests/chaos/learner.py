"""A learner of a run: two ranks that share batches, training steps, checkpoints and rewinds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from experience_buffer.v1 import service_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.chaos import work
from tests.chaos.calls import LostError, ask, describe
from tests.journal import Journal

WORLD_SIZE: Final = 2
STEPS_PER_CHECKPOINT: Final = 5


class Learner:
    """Two ranks in one process that share batches, with checkpoints and training steps.

    What it has learned is the list of groups that it was trained on. A new life loads the newest
    checkpoint and rewinds to it.
    """

    def __init__(self, stub: ExperienceBufferStub, folder: Path) -> None:
        self._stub = stub
        self._checkpoint = folder / "checkpoint"
        self._journal = Journal(folder / "learner")

    def run(self) -> None:
        while True:
            try:
                self._live()
            except LostError as error:
                self._write("restart", details=str(error))

    def _live(self) -> None:
        state = load_checkpoint(self._checkpoint)
        step, saved, groups = state["step"], state["step"], state["groups"]
        self._write("rewinding", step=step)
        ask(
            self._stub.Rewind,
            service_pb2.RewindRequest(buffer="steps", consumer="learner", step=step),
        )
        self._write("rewound", step=step)
        last = 0
        while True:
            asked = time.monotonic()
            parts = self._sample(last)
            if parts is None:
                if saved < step:
                    saved = self._save(step, groups)
                continue
            last = parts[0].lease.id
            items = [describe(one) for part in parts for one in part.experiences]
            self._write("leased", lease=last, asked=asked, items=items)
            step += 1
            self._write("acking", lease=last, step=step)
            for rank in range(WORLD_SIZE):
                request = service_pb2.AckRequest(
                    buffer="steps", lease_id=last, step=step, rank=rank
                )
                ask(self._stub.Ack, request)
            groups.append(list(dict.fromkeys(key for _, key, *_ in items)))
            self._write("acked", lease=last, step=step)
            if step - saved >= STEPS_PER_CHECKPOINT:
                saved = self._save(step, groups)

    def _sample(self, last: int) -> list[Any] | None:
        """The parts of all ranks, or None where nothing is ready."""
        parts: list[Any] = []
        for rank in range(WORLD_SIZE):
            request = service_pb2.SampleRequest(
                buffer="steps",
                consumer="learner",
                batch_size=4,
                min_batch_size=1,
                timeout_seconds=0.0 if rank else 0.2,
                lease_seconds=work.LEASE_SECONDS,
            )
            request.rank_of.rank, request.rank_of.world_size = rank, WORLD_SIZE
            request.rank_of.after_lease_id = last
            part = ask(self._stub.Sample, request).message
            if not rank and not part.HasField("lease"):
                return None
            parts.append(part)
        if len({part.lease.id for part in parts}) > 1:
            raise LostError("the batch was gone before its second rank came")
        return parts

    def _save(self, step: int, groups: list[list[str]]) -> int:
        before = load_checkpoint(self._checkpoint)["step"]
        temporary = self._checkpoint.with_suffix(".new")
        temporary.write_text(json.dumps({"step": step, "groups": groups}), encoding="ascii")
        temporary.replace(self._checkpoint)
        if before >= 0:
            # One checkpoint is kept: nobody goes back to before it.
            request = service_pb2.DeclareSafeRequest(
                buffer="steps", consumer="learner", step=before
            )
            ask(self._stub.DeclareSafe, request)
        return step

    def _write(self, event: str, **fields: Any) -> None:
        self._journal.write(event, buffer="steps", consumer="learner", **fields)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The learner's state; the one before all training where there is none."""
    if not path.exists():
        return {"step": -1, "groups": []}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return loaded
