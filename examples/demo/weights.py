"""Handing the policy from the trainer to the workers: one file, replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from examples.demo.model import Policy


def publish(policy: Policy, *, version: int, path: Path) -> None:
    """Replace the file; a reader finds either the old policy or the new one, never a part."""
    draft = path.with_suffix(".draft")
    torch.save({"version": version, "parameters": policy.state_dict()}, draft)
    os.replace(draft, path)


def load(policy: Policy, *, path: Path) -> int:
    """Read the newest policy into `policy`; its version."""
    content = torch.load(path, weights_only=True)
    policy.load_state_dict(content["parameters"])
    return int(content["version"])


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
