"""A writer that nobody closed: what it holds is stored when its process ends, or it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experience_buffer import Client
from tests.integration.plain import create
from tests.integration.server import Server, Stub
from tests.ports import unused_ports

NUM = 5
SCRIPT = f"""
import asyncio, multiprocessing, os, sys
from experience_buffer import EID, AsyncClient, Client, ClientOptions, Experience

HOW, ADDRESS, BUFFER = sys.argv[1:]
SOME = [
    Experience(eid=EID(0, 0, run), tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=0.5)
    for run in range({NUM})
]

def append():
    client = Client(ADDRESS, timeout=1.0 if HOW == "away" else 60.0)
    client.writer(buffer=BUFFER).append(SOME)

async def append_and_leave():
    if HOW == "loop":
        await AsyncClient(ADDRESS).writer(buffer=BUFFER).append(SOME)
        return
    async with AsyncClient(ADDRESS) as client:
        writer = client.writer(buffer=BUFFER)
        await writer.append(SOME)
    try:
        await writer.flush()
    except Exception as error:
        print(error)

if __name__ == "__main__":
    if HOW in ("fork", "spawn"):
        child = multiprocessing.get_context(HOW).Process(target=append)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    if HOW == "client":
        with Client(ADDRESS) as client:
            writer = client.writer(buffer=BUFFER)
            writer.append(SOME)
            writer.flush()
        sys.exit(0)
    if HOW in ("loop", "closed"):
        asyncio.run(append_and_leave())
        sys.exit(0)
    append()
    if HOW == "child":
        if not (pid := os.fork()):
            sys.exit(3)  # As its parent would: what it has inherited isn't its own.
        assert os.waitpid(pid, 0)[1] >> 8 == 3
"""


def run(folder: Path, how: str, address: str, buffer: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), how, address, buffer]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("how", ["return", "child", "client", "fork", "spawn"])
def test_what_it_holds_is_stored(
    shared_server: Server, stub: Stub, name: str, tmp_path: Path, how: str
) -> None:
    create(stub, name)
    done = run(tmp_path, how, shared_server.address, name)
    assert done.returncode == 0, done.stderr
    assert "writer" not in done.stderr
    with Client(shared_server.address) as client:
        assert len(list(client.list(buffer=name))) == NUM


def test_what_nobody_takes_is_told(tmp_path: Path) -> None:
    """The server is away; the client's timeout is what a process waits for it, or ten seconds."""
    (port,) = unused_ports(1)
    done = run(tmp_path, "away", f"127.0.0.1:{port}", "math")
    assert done.returncode == 0
    assert "a writer was open when the process ended, close it before: 5 exp" in done.stderr


@pytest.mark.parametrize(
    ("how", "what"), [("loop", "event loop ended"), ("closed", "client was closed")]
)
def test_a_loop_that_ends_can_send_nothing_and_says_so(
    shared_server: Server, tmp_path: Path, how: str, what: str
) -> None:
    done = run(tmp_path, how, shared_server.address, "default")
    assert f"a writer was open when its {what}, close it before: 5 exp" in done.stderr
    assert done.stdout == ("the client is closed; make a new one\n" if how == "closed" else "")
