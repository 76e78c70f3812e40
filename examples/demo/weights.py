"""Files of the policy: what the workers sample with, what the trainer resumes from.

Each is replaced atomically: a reader finds either the old file or the new one, never a part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from examples.demo.model import Policy


def publish(policy: Policy, *, version: int, path: Path) -> None:
    """Replace the workers' policy."""
    draft = path.with_suffix(".draft")
    torch.save({"version": version, "parameters": policy.state_dict()}, draft)
    os.replace(draft, path)


def load(policy: Policy, *, path: Path) -> int:
    """Read the newest policy into `policy`; its version."""
    content = torch.load(path, weights_only=True)
    policy.load_state_dict(content["parameters"])
    return int(content["version"])


def save_checkpoint(content: dict[str, Any], *, path: Path) -> None:
    """Replace the checkpoint; it is on disk, and outlasts a power cut, when this returns."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read the checkpoint; None while there is none."""
    if not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


class Follower:
    """Keeps a policy at the newest published version. Not to be shared between threads."""

    def __init__(self, path: Path) -> None:
        self.policy = Policy()
        self.version = -1
        """Version of `policy`; -1 before the first `refresh`."""
        self._path = path
        self._stamp = (0, 0)

    def refresh(self) -> int:
        """Load the file if it has been replaced; the version held then, -1 while there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return self.version
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            self.version = load(self.policy, path=self._path)
            self._stamp = stamp
        return self.version
