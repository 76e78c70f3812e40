"""What holds for all tests: modules are compiled once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"

if sys.dont_write_bytecode:
    # Tests start hundreds of processes, and without a cache each of them compiles 400 modules anew.
    # Whoever wants none beside the sources gets it elsewhere.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(_CACHE)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(_CACHE)
