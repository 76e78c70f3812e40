"""The process that reads archives: `python -m experience_buffer_server.archive.reader_process`.

It keeps no state but open files: a new one finds the same. One request at a time, each bounded.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from experience_buffer_server.archive.lookup import Lookup, Place
from experience_buffer_server.archive.search import Wanted
from experience_buffer_server.archive.segment import SegmentError
from experience_buffer_server.runtime.child_process import Parent
from experience_buffer_server.store.engines import open_reader
from experience_buffer_server.store.interface import StoreError, StoreReader

_NICENESS: Final = 5
_MOST_TRIES: Final = 3


class Reader:
    """Reads the archives of one server. Not thread-safe.

    Args:
        root: The folder that they are in.
        store: Reads the store.
    """

    def __init__(self, root: Path, store: StoreReader) -> None:
        self._root = root
        self._store = store
        self._lookups: dict[str, Lookup] = {}

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer; `error` in the answer says why it can't be done.

        A request is `get` (`uid`, and `waiting`, its number in the store if it is there) or `list`
        (`filter`, `size`, and `before`, the place where the page before ended).
        """
        for number in range(_MOST_TRIES):
            try:
                return self._answer(request)
            except FileNotFoundError as error:
                # A file was merged while it was about to be read.
                if number == _MOST_TRIES - 1:
                    return {"error": str(error)}
            except (OSError, StoreError, SegmentError) as error:
                return {"error": str(error)}
        raise AssertionError

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["folder"]
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = Lookup(self._root / name, request["buffer"], self._store)
            self._lookups[name] = lookup
        if request["kind"] == "get":
            return {"row": lookup.get(request["uid"], request["waiting"])}
        before = Place(*request["before"]) if request["before"] else None
        wanted = Wanted.of(request["filter"])
        rows, following = lookup.page(wanted, request["size"], before)
        return {"rows": rows, "before": following and list(following)}


def main() -> None:
    """Serve until the server closes the socket."""
    descriptor, root, spec = sys.argv[1:]
    parent = Parent(int(descriptor))
    os.nice(_NICENESS)
    reader = Reader(Path(root), open_reader(spec))
    gc.freeze()
    parent.ready()
    while (request := parent.receive()) is not None:
        parent.answer(reader.handle(request))


if __name__ == "__main__":
    main()
