"""A trainer over an `ExperienceDataset`, to be killed: ADDRESS BUFFER CHECKPOINT NUM_STEPS.

What it has "learned" is a list of uids, saved with the dataset's state before the first step and
after every third.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from experience_buffer.collation import padded_collate
from experience_buffer.dataset import ExperienceDataset


def main(address: str, buffer: str, checkpoint: Path, num_steps: int) -> None:
    """Train to the end, from the checkpoint if there is one."""
    learned: list[list[str]] = []
    dataset = ExperienceDataset(
        address,
        buffer=buffer,
        batch_size=2,
        collate=padded_collate(pad_token_id=0, columns=["uid"]),
    )
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text(encoding="utf-8"))
        learned = saved["learned"]
        dataset.load_state_dict(saved["dataset"])
    else:
        save(checkpoint, learned, dataset)
    for batch in dataset:
        learned.append(batch["uid"])
        if len(learned) % 3 == 0:
            save(checkpoint, learned, dataset)
        print(len(learned), flush=True)  # noqa: T201 - says how far it is
        if len(learned) == num_steps:
            return


def save(checkpoint: Path, learned: list[list[str]], dataset: ExperienceDataset) -> None:
    """Write a checkpoint, whole or not at all."""
    draft = checkpoint.with_suffix(".draft")
    state = {"learned": learned, "dataset": dataset.state_dict()}
    draft.write_text(json.dumps(state), encoding="utf-8")
    os.replace(draft, checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
