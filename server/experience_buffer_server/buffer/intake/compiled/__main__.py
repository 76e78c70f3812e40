"""`python -m experience_buffer_server.buffer.intake.compiled`: compile the reader of payloads, for servers to load.

Takes half a minute, or a second where that has been done. Exits with 1, and a reason, where there
is no place to keep it: neither beside the sources, nor in the user's cache, nor NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

_NICENESS = 5


def main() -> None:
    """Compile, unless that is kept already."""
    # A server has pushes to read meanwhile.
    os.nice(_NICENESS)
    try:
        import_module("experience_buffer_server.buffer.intake.compiled.scan")
    except RuntimeError as error:
        sys.exit(f"{error}; set NUMBA_CACHE_DIR to a folder that can be written")


if __name__ == "__main__":
    main()
