"""The worker and trainer processes of an epoch: started, killed, started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.integration.server import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
NUM_PUSHERS: Final = 2
_ROLES: Final = (
    ("queue:trainer", "groups:actor", "replay:sampler"),
    ("queue:trainer", "groups:critic", "fresh:sampler", "learn"),
)
"""Of each trainer process: `BUFFER:CONSUMER`."""
_COMPLAINT_CHARACTERS: Final = 2000


class Client:
    """A worker or trainer process, restarted after its death."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._arguments = [sys.executable, "-m", "tests.chaos.worker", *arguments]
        self._errors = folder / f"{name}.errors"
        self.start()

    @property
    def kind(self) -> str:
        """What it does: "pusher" or "trainer"."""
        return self.name.partition("-")[0]

    def start(self) -> None:
        """Begin a life."""
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                self._arguments,
                cwd=ROOT,
                # A server that goes away is no news here.
                env=os.environ | {"GRPC_VERBOSITY": "NONE"},
                stderr=errors,
            )

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self.process.kill()
        self.process.wait()

    @property
    def complaint(self) -> str:
        """What it has complained of."""
        return self._errors.read_text(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]


class Clients:
    """All of an epoch's, with their journals in its folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._stop = folder / "stop"
        self.all: list[Client] = []

    def start(self, address: str) -> None:
        """Start them, and wait until all have begun."""
        for number in range(NUM_PUSHERS):
            self._add(f"pusher-{number}", address, "push", str(number), str(self._seed))
        for number, roles in enumerate(_ROLES):
            self._add(f"trainer-{number}", address, "train", f"trainer-{number}", *roles)
        # Lives are too short to wait for the workers' own start in the first one.
        journals = [f"pusher-{number}" for number in range(NUM_PUSHERS)] + ["learner"]
        eventually(
            lambda: all((self._folder / name).exists() for name in journals),
            "every worker and trainer to have begun",
        )

    def _add(self, name: str, address: str, role: str, *rest: str) -> None:
        arguments = [role, address, str(self._folder), *rest]
        self.all.append(Client(self._folder, name, arguments))

    @property
    def learner(self) -> Client:
        """The one that begins anew from a checkpoint."""
        return self.all[-1]

    def check(self) -> None:
        """Nobody has ended who wasn't told to."""
        for client in self.all:
            status = client.process.poll()
            done = status == 0 and self._stop.exists()
            assert status is None or done, f"{client.name} ended: {client.complaint}"

    def stop_pushing(self, seconds: float) -> None:
        """Let the workers finish what they are at, and end."""
        self._stop.touch()
        for client in self.all[:NUM_PUSHERS]:
            assert client.process.wait(seconds) == 0, f"{client.name}: {client.complaint}"

    def close(self) -> list[str]:
        """Kill all that are left; what they have complained of. Idempotent."""
        for client in self.all:
            client.kill()
        return [f"{one.name}: {one.complaint}" for one in self.all if one.complaint]
