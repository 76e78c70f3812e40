"""Fuzzing does without atheris only where it has no wheel, and every other failure is shown."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.fuzz.install import install

PACKAGE = "experience-buffer-no-such-package"
WHEEL = "experience_buffer_no_such_package-1.0-cp27-cp27m-win32.whl"


def test_no_wheel_for_this_platform(tmp_path: Path) -> None:
    (tmp_path / WHEEL).touch()
    assert install(PACKAGE, "--no-index", "--find-links", str(tmp_path)) == "no wheel"


def test_what_is_installed_stays(tmp_path: Path) -> None:
    assert install("pytest", "--no-index") == "installed"


def test_an_index_that_does_not_answer_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--index-url", f"http://127.0.0.1:{port}/", "--retries", "1", "--timeout", "1"]
    with pytest.raises(RuntimeError, match=r"can't be installed:[^$]*No matching distribution"):
        install(PACKAGE, *options)


def test_a_damaged_wheel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / WHEEL.replace("cp27-cp27m-win32", "py3-none-any")).touch()
    with pytest.raises(RuntimeError, match=r"can't be installed:\n[^$]*[Ii]nvalid"):
        install(PACKAGE, "--no-index", "--find-links", str(tmp_path))
