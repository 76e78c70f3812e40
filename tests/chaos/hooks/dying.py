"""Makes a server's process die at a chosen moment, or break a promise, without a word in the product.

Runs inside the server and inside its writer process. What is to happen is in CHAOS_PLAN, in JSON:

    {"process": "writer", "of": "ack", "phase": "after-sync", "count": 7}
    {"process": "server", "of": "Leasing._begin_ack", "module": "...leasing", "phase": "after", ...}
    {"sabotage": "nosync"}
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.large.payload_file import Aligned
from experience_buffer_server.store.lmdb.large.writes import large_bytes
from experience_buffer_server.store.lmdb.writer_protocol import (
    PRUNE,
    REMOVE,
    Operation,
    Reply,
    Result,
    Status,
    Work,
)

_MODULES = {
    "server": "experience_buffer_server",
    "snapshot": "experience_buffer_server.store.lmdb.snapshots.copy_process",
}
"""What `python -m` is given."""
_SMALL_MAP_BYTES = 1 << 18
"""The map begins with so little that it grows while a server lives."""
_REPLY_SECONDS = 0.002
"""A reply has left by then."""
_KILL_EVENT, _KILL_COUNTDOWN = 6, 7
_EVENTS = (
    *("", "before-write", "torn-write", "after-write"),
    *("before-sync", "after-sync", "before-meta", "after-meta"),
    *("before-payload", "torn-payload", "after-payload"),
    *("before-payload-sync", "after-payload-sync"),
)
"""As in `tests/faults/shim.py`, which this folder can't import."""


def _bytes(value: bytes | memoryview | Aligned) -> bytes:
    return bytes(value.payload if isinstance(value, Aligned) else value)


def _is_put(table: int, word: bytes = b"") -> Callable[[Operation], bool]:
    return lambda one: one[0] == table and one[2] is not None and word in _bytes(one[2])


_KINDS: dict[str, Callable[[Operation], bool]] = {
    "append": _is_put(Table.PAYLOADS),
    "large-append": lambda one: large_bytes(one[2]) > 0,
    "group-whole": _is_put(Table.GROUPS, b"whole"),
    "group-sealed": _is_put(Table.GROUPS, b"sealed"),
    "group-dropped": _is_put(Table.GROUPS, b"dropped"),
    "advantages": _is_put(Table.ADVANTAGES),
    "lease": _is_put(Table.LEASES, b"open"),
    "ack": _is_put(Table.LEASES, b"acked"),
    "nack": _is_put(Table.LEASES, b"nacked"),
    "expiry": _is_put(Table.LEASES, b"expired"),
    "timeline": _is_put(Table.CONSUMERS),
    "removal": lambda one: one[0] == REMOVE and one[2] != b"",
    "prune": lambda one: one[0] == PRUNE,
}
"""What a commit holds, by what is written."""


def prepare(arguments: Sequence[str]) -> None:
    """Change this process as the plan says, if the plan is about it."""
    plan: dict[str, Any] = json.loads(os.environ["CHAOS_PLAN"])
    if "experience_buffer_server.store.lmdb.writer_process" in arguments:
        _open_with(initial_map_bytes=_SMALL_MAP_BYTES)
        if plan.get("sabotage"):
            _SABOTAGES[plan["sabotage"]]()
        if plan.get("process") == "writer":
            _die_in_commit(plan)
    elif _MODULES.get(plan.get("process", "")) in arguments:
        _die_in_call(plan)


def _die(plan: dict[str, Any]) -> NoReturn:
    file = os.open(os.environ["CHAOS_DEATHS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(plan).encode() + b"\n")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


# --- the writer process


def _open_with(**changes: Any) -> None:
    """Open the store with other options than the writer's."""
    from experience_buffer_server.store.lmdb.engine import Engine

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def start(engine: Any, path: Any, **options: Any) -> None:
            original(engine, path, **options | changes)

        return start

    _wrap(Engine, "__init__", make)


def _die_in_commit(plan: dict[str, Any]) -> None:
    from experience_buffer_server.store.lmdb.engine import Engine

    if plan["of"] == "map-growth":
        _die_in_growth(Engine, plan)
        return
    is_kind, phase, left = _KINDS[plan["of"]], plan["phase"], plan["count"]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def transact(engine: Any, requests: Sequence[Any]) -> Any:
            nonlocal left
            if not any(is_kind(one) for request in requests for one in request.operations):
                return original(engine, requests)
            left -= 1
            if left:
                return original(engine, requests)
            if phase == "before":
                _die(plan)
            if phase in _EVENTS:
                _arm(_EVENTS.index(phase))
            result = original(engine, requests)
            if phase == "committed":
                _die(plan)
            if phase == "answered":
                threading.Timer(_REPLY_SECONDS, _die, (plan,)).start()
            return result

        return transact

    _wrap(Engine, "_transact_once", make)


def _arm(event: int) -> None:
    """Let the fault library end this process at the first such event from now on."""
    with open(os.environ["FAULTS_CONTROL"], "r+b") as file:
        numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    numbers[_KILL_COUNTDOWN] = 1
    numbers[_KILL_EVENT] = event


class _Environment:
    """An LMDB environment whose map grows once too often."""

    def __init__(self, environment: Any, plan: dict[str, Any]) -> None:
        self._environment = environment
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def set_mapsize(self, size: int) -> None:
        """Grow, and die before or after."""
        self._plan["count"] -= 1
        if self._plan["count"] <= 0 and self._plan["phase"] == "before":
            _die(self._plan)
        self._environment.set_mapsize(size)
        if self._plan["count"] <= 0:
            _die(self._plan)


def _die_in_growth(engine: Any, plan: dict[str, Any]) -> None:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def start(one: Any, *arguments: Any, **options: Any) -> None:
            original(one, *arguments, **options)
            one._env = _Environment(one._env, plan)

        return start

    _wrap(engine, "__init__", make)


# --- the server


def _die_in_call(plan: dict[str, Any]) -> None:
    owner: Any = importlib.import_module(plan["module"])
    *path, name = plan["of"].split(".")
    for part in path:
        owner = getattr(owner, part)
    left = plan["count"]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if plan["phase"] == "before":
                left -= 1
                if not left:
                    _die(plan)
                return original(*arguments, **options)
            result = original(*arguments, **options)
            # Of calls that may find nothing to do, those count that did something.
            left -= bool(getattr(result, plan.get("where", ""), True))
            if not left:
                _die(plan)
            return result

        return call

    _wrap(owner, name, make)


# --- broken promises


def _early_ack() -> None:
    """Batches are answered before their commit instead of after it."""
    from experience_buffer_server.store.lmdb import writer_protocol
    from experience_buffer_server.store.lmdb.engine import Engine

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(engine: Any, requests: Sequence[Any]) -> Any:
            loop = sys._getframe(1).f_locals["self"]
            answers = [Result(request.number, Status.OK) for request in requests]
            loop._connection.sendall(writer_protocol.encode(Reply(answers, Work())))
            _, work = original(engine, requests)
            return [], work

        return write

    _wrap(Engine, "write", make)


_SABOTAGES: dict[str, Callable[[], None]] = {
    # Commits don't wait for the disk: what the writer does with a fsync taken out.
    "nosync": functools.partial(_open_with, sync=False),
    "early-ack": _early_ack,
}
