"""Faults of the disk and of the clock for a real server: `Faults` makes them, `shim.c` carries them out.

Nothing of this is in the product. The server and its writer process are started with a small
library in front of the C library; it stands between them and the files of the store: LMDB's, and
the one that large payloads lie in.
"""

from __future__ import annotations

import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Final

_SOURCES: Final = [
    str(Path(__file__).with_name(f"{name}.c")) for name in ("shim", "files", "notes", "clock")
]
FILES: Final = ("data.mdb", "payloads.bin")
"""What a store consists of."""
_FIELDS: Final = (
    "is_full",
    "write_errno",
    "sync_errno",
    "sync_errors_left",
    "sync_delay_us",
    "clock_offset_ns",
    "kill_event",
    "kill_countdown",
    "killed",
    "num_writes",
    "num_syncs",
    "num_meta_writes",
    "num_payload_writes",
    "num_payload_syncs",
    "free_bytes",
    "meta_errno",
)
EVENTS: Final = (
    "",
    "before-write",
    "torn-write",
    "after-write",
    "before-sync",
    "after-sync",
    "before-meta",
    "after-meta",
    "before-payload",
    "torn-payload",
    "after-payload",
    "before-payload-sync",
    "after-payload-sync",
)
"""Moments of a commit, by the numbers that `faults.h` has for them: LMDB's, then those of large
payloads, which come before LMDB's. Either are in order."""


def build(folder: Path) -> Path:
    """Compile the library into a folder, once; its path.

    Raises:
        RuntimeError: There is no compiler, or it refuses; the text says what to do.
    """
    library = folder / "faults.so"
    if library.exists():
        return library
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "no C compiler (cc or gcc) is installed; install the Debian packages gcc and libc6-dev"
        )
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library)]
    done = subprocess.run([*command, *_SOURCES, "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the fault library can't be compiled:\n{done.stderr}")
    return library


class Faults:
    """The faults of one store, switched while the server runs. It can be shared between threads.

    Args:
        library: As `build` made it.
        data: The server's data directory.
        folder: Where the library's own files go; not in the data directory.
    """

    def __init__(self, library: Path, data: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._undo = folder / "undo"
        self._undo.mkdir(exist_ok=True)
        self._library = library
        self._control = folder / "control"
        self._control.write_bytes(bytes(8 * len(_FIELDS)))
        # Both sides know the files by the names that the system has for them.
        self._data = data.resolve()
        with self._control.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 8 * len(_FIELDS))
        self._numbers = memoryview(self._mapped).cast("q")

    def environment(self, *, notes_writes: bool = False) -> dict[str, str]:
        """What a server has to be started with; `notes_writes` is needed to fail its power."""
        variables = {
            "LD_PRELOAD": str(self._library),
            "FAULTS_CONTROL": str(self._control),
            "FAULTS_FOLDER": str(self._data),
        }
        return variables | ({"FAULTS_UNDO": str(self._undo)} if notes_writes else {})

    @property
    def files(self) -> list[tuple[Path, Path]]:
        """Each file and the notes of what its writes have replaced, for a power failure."""
        return [(self._data / name, self._undo / name) for name in FILES]

    def fill_disk(self, *, full: bool = True, left_bytes: int = 0) -> None:
        """The files can't grow any more, or only by so much together."""
        self._set("free_bytes", left_bytes)
        self._set("is_full", int(full))

    def fail_writes(self, number: int) -> None:
        """Every write fails with this error; 0: none does."""
        self._set("write_errno", number)

    def fail_syncs(self, number: int, *, times: int = 0) -> None:
        """Every sync fails with this error, or only so many; 0: none does."""
        self._set("sync_errors_left", times)
        self._set("sync_errno", number)

    def fail_meta_writes(self, number: int) -> None:
        """Every write of a meta page reaches the disk and ends with this error; 0: none does."""
        self._set("meta_errno", number)

    def delay_syncs(self, seconds: float) -> None:
        """Every sync takes so much longer."""
        self._set("sync_delay_us", int(seconds * 1e6))

    def set_clock(self, offset_seconds: float) -> None:
        """The wall clock is so far off; the monotonic one isn't."""
        self._set("clock_offset_ns", int(offset_seconds * 1e9))

    def kill_at(self, event: str, times: int = 1) -> None:
        """The process dies at the n-th event of a kind, from now on."""
        self._set("kill_countdown", times)
        self._set("kill_event", EVENTS.index(event))

    def spare(self) -> None:
        """Nobody is to die any more."""
        self._set("kill_event", 0)
        self._set("killed", 0)

    @property
    def killed_at(self) -> str:
        """The event that somebody died at; empty: nobody has."""
        return EVENTS[self._get("killed")]

    @property
    def num_syncs(self) -> int:
        """Syncs of LMDB's file so far."""
        return self._get("num_syncs")

    @property
    def num_payload_writes(self) -> int:
        """Writes of large payloads so far."""
        return self._get("num_payload_writes")

    @property
    def num_payload_syncs(self) -> int:
        """Syncs of the file of large payloads so far."""
        return self._get("num_payload_syncs")

    def _set(self, name: str, value: int) -> None:
        self._numbers[_FIELDS.index(name)] = value

    def _get(self, name: str) -> int:
        return int(self._numbers[_FIELDS.index(name)])

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._numbers.release()
        self._mapped.close()
