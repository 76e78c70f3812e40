"""A process that was forked after gRPC was used is warned: it may hang in gRPC's locks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, warnings
from experience_buffer import Client
from experience_buffer.errors import UnavailableError

def call():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Client("127.0.0.1:1", timeout=0.2).get_stats()
        except UnavailableError:
            pass
    return sum("spawn" in str(w.message) and w.category is RuntimeWarning for w in caught)

def forked():
    child = os.fork()
    if child == 0:
        os._exit(call_without_network())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def call_without_network():
    # The warning comes before gRPC is asked for anything, which might hang here.
    from experience_buffer._transport import channel as _channel
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _channel.note_use()
        _channel.note_use()
    return len(caught)

print(forked(), call(), forked())
"""


def test_a_fork_after_the_first_call_is_warned_of_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["0", "0", "1"], done.stderr


WRITER = """
import os, sys
from experience_buffer import Client, Experience, WrongStateError
with Client("127.0.0.1:1") as client:
    unused, used = client.writer(), client.writer()
    one = Experience(tokens=[1, 2], prompt_length=1)
    used.append(one)
    child = os.fork()
    if child == 0:
        for verb in (lambda: used.append(one), used.flush, lambda: used.counts):
            try:
                verb()
            except WrongStateError as error:
                print(type(error).__name__, "make a writer in each process" in str(error))
        used.close()
        unused.append(one)
        print(unused.counts.num_appended)
        sys.stdout.flush()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, used.counts.num_pending)
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_writer_in_use_says_after_a_fork_that_it_is_the_other_process_s() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [*["WrongStateError", "True"] * 3, "1", "0", "1"], done.stderr
