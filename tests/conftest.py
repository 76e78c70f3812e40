"""What holds for all tests, and what asks either client.

Bytecode is kept, Ctrl-C works, and no example has a deadline.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"

if sys.dont_write_bytecode:
    # Tests start hundreds of processes, and without a cache each of them compiles 400 modules anew.
    # Whoever wants none beside the sources gets it elsewhere.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(_CACHE)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(_CACHE)

# A job that a script has begun in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says what the machine is busy with, and nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def event_loop_thread() -> Iterator[None]:
    from tests import blocking

    with blocking.running_loop():
        yield


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Any:
    """What makes a client as `Client` does: that one, or the async one that is used like it."""
    from experience_buffer import Client
    from tests import blocking

    if request.param == "sync":
        return Client
    request.getfixturevalue("event_loop_thread")
    return blocking.connect
