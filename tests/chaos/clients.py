"""The worker and trainer processes of an epoch: started, killed, started again."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.chaos import worker
from tests.integration.server import eventually
from tests.lives import Lives

NUM_PUSHERS: Final = 2
_ROLES: Final = (
    ("queue:trainer", "groups:actor", "replay:sampler"),
    ("queue:trainer", "groups:critic", "fresh:sampler", "learn"),
)
"""Of each trainer process: `BUFFER:CONSUMER`."""


class Clients:
    """All of an epoch's, with their journals in its folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._stop = folder / "stop"
        self.all: list[Lives] = []

    def start(self, address: str) -> None:
        place = (address, self._folder)
        for number in range(NUM_PUSHERS):
            name = f"pusher-{number}"
            self.all.append(Lives(name, self._folder, worker.push, *place, number, self._seed))
        for number, roles in enumerate(_ROLES):
            name = f"trainer-{number}"
            self.all.append(Lives(name, self._folder, worker.train, *place, name, *roles))
        # Lives are too short to wait for the workers' own start in the first one.
        journals = [f"pusher-{number}" for number in range(NUM_PUSHERS)] + ["learner"]
        eventually(
            lambda: all((self._folder / name).exists() for name in journals),
            "every worker and trainer to have begun",
        )

    @property
    def learner(self) -> Lives:
        return self.all[-1]

    def check(self) -> None:
        """Nobody has ended who wasn't told to."""
        for client in self.all:
            status = client.process.exitcode
            done = status == 0 and self._stop.exists()
            assert status is None or done, f"{client.name} ended: {client.complaint}"

    def stop_pushing(self, seconds: float) -> None:
        """Let the workers finish what they are at, and end."""
        self._stop.touch()
        for client in self.all[:NUM_PUSHERS]:
            client.end(seconds)

    def close(self) -> list[str]:
        """Kill all that are left; what they have complained of. Idempotent."""
        for client in self.all:
            client.kill()
        return [f"{one.name}: {one.complaint}" for one in self.all if one.complaint]
