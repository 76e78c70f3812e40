"""The demo's loop, cut short: killed and interrupted, and ended when its target has held."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from examples.demo import processes
from examples.demo.display import Display
from examples.demo.report import verdict
from examples.demo.runner import Runner
from examples.demo.server import Server
from examples.demo.settings import DemoSettings
from tests.integration.server import command

_ROOT = Path(__file__).parents[2]
_DEMO = [sys.executable, "-u", "-m", "examples.demo"]


def test_a_short_run_survives_the_kill_of_its_server_and_of_its_trainer(tmp_path: Path) -> None:
    done = subprocess.run(
        [*_DEMO, "--updates", "24", "--kill", "--output", str(tmp_path)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "server: serves again" in done.stdout, done.stdout + done.stderr
    # The kill comes at update 11 or, where this process is slow, later.
    assert re.search(r"resumed from its checkpoint of update [12]0,", done.stdout)
    assert re.search(r" 6,144 trained \+ [\d,]+ still in the buffer", done.stdout), done.stdout
    assert "0 missing, 0 trained twice" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    # So few updates can't reach the target, and the exit status says so.
    assert re.search(r"^FAILED: [\d.]+% solved after 24 updates is under 90%$", done.stdout, re.M)
    assert done.returncode == 1
    # For a pipe, no colours and no bar; no process had anything to complain of.
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


def test_an_interrupted_run_ends_all_its_processes_and_leaves_no_file(tmp_path: Path) -> None:
    # A group of its own, as the foreground job of a terminal has, all of which Ctrl-C reaches.
    demo = subprocess.Popen(
        [*_DEMO, "--output", str(tmp_path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    assert demo.stderr is not None
    with demo:
        try:
            assert any(re.match(r" +0.0 s +0 ", line) for line in demo.stdout)
            os.killpg(demo.pid, signal.SIGINT)
            rest = demo.stdout.read() + demo.stderr.read()
        finally:
            demo.terminate()
    assert demo.returncode == 130
    assert rest.endswith("demo: interrupted; all its processes have ended\n")
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_training_ends_when_the_target_has_held(tmp_path: Path) -> None:
    server = Server(tmp_path)
    settings = DemoSettings(
        address=server.address,
        folder=tmp_path,
        num_updates=97,
        evaluate_every=3,
        target_accuracy=0.0,
        num_held=2,
        groups_per_update=4,
    )
    processes.prepare()
    try:
        with Display(settings) as display:
            outcome = Runner(settings, server, kills=False).run(display)
    finally:
        server.kill()
    assert verdict(outcome) == "success"
    assert 3 <= outcome.history.version < 97


def test_a_kept_server_can_be_looked_into_as_it_says(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*_DEMO, "--updates", "2", "--keep", "--output", str(tmp_path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    with demo:
        try:
            lines: list[str] = []
            while not lines or "# gives the group back" not in lines[-1]:
                lines.append(demo.stdout.readline())
                assert lines[-1], "".join(lines)
            shown = "".join(lines)
            code = re.findall(r"^ +>>> (.+)$", shown, re.MULTILINE)
            names: dict[str, Any] = {}
            for line in code:
                exec(line, names)
            assert len(names["batch"].experiences) == 8
            names["buffer"].close()
            told, invited = re.findall(r"http://[\d.:]+/ui/", shown)
            assert told == invited
            with urllib.request.urlopen(told, timeout=10) as answer:
                assert b"<title>" in answer.read()
            for line in re.findall(r"^ +\.venv/bin/experience-buffer (.+)$", shown, re.MULTILINE):
                looked = command(*shlex.split(line))
                assert looked.returncode == 0, looked.stderr
            demo.send_signal(signal.SIGINT)
            rest = demo.stdout.read()
        finally:
            demo.terminate()
    store = re.findall(r"make run ARGS='--data (.+)' serves it again", rest)[0]
    assert (Path(store) / "data.mdb").exists()
    assert "FAILED" in shown
    assert demo.returncode == 1
