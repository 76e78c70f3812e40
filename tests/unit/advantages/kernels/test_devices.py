"""Where advantages are computed, and what is compiled before the first of them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experience_buffer_server.advantages.kernels import cpu_kernels
from experience_buffer_server.advantages.kernels.devices import (
    Device,
    DeviceError,
    find_device,
    warm_up,
)

INSTALL = "torch, which isn't installed here: pip install 'experience-buffer[gpu]'"
COMPILED = """
import json
from experience_buffer_server.advantages.kernels import cpu_kernels
from experience_buffer_server.advantages.kernels.devices import find_device, warm_up

def compiled():
    loops = vars(cpu_kernels)
    return [name for name, loop in loops.items() if getattr(loop, "signatures", None)]

is_compiling = find_device("auto", threads=1).is_compiling
first = compiled()
asked = iter((False, False, True))
warm_up("cpu", threads=1, stopped=lambda: next(asked))
print(json.dumps([is_compiling, first, compiled()]))
"""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has an NVIDIA driver."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def with_torch(monkeypatch: pytest.MonkeyPatch, *, finds_one: bool) -> None:
    cuda = SimpleNamespace(is_available=lambda: finds_one)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="9.8.7+cpu"))


def test_devices_that_are_there() -> None:
    assert find_device("cpu", threads=2).name == "cpu"
    assert find_device("torch:cpu", threads=2) == Device("torch:cpu")
    assert find_device("auto", threads=1).name in ("cpu", "cuda")


@pytest.mark.usefixtures("driver")
def test_a_gpu_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    device = find_device("auto", threads=1)
    assert device.name == "cpu"
    assert device.note.endswith(f"a GPU needs {INSTALL}")


@pytest.mark.usefixtures("driver")
def test_a_torch_that_finds_no_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, finds_one=False)
    device = find_device("auto", threads=1)
    assert device.name == "cpu"
    assert "torch 9.8.7+cpu finds no GPU" in device.note


@pytest.mark.parametrize("name", ["cuda:1", "torch:cpu", "mps"])
def test_what_a_torch_device_needs_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without_torch(monkeypatch)
    with pytest.raises(DeviceError) as caught:
        find_device(name, threads=1)
    assert str(caught.value) == f"compute.device = {name!r} needs {INSTALL}"
    assert not caught.value.is_known


@pytest.mark.parametrize(("name", "is_known"), [("nonsense", False), ("meta", True)])
def test_a_device_that_cannot_be_used(name: str, is_known: bool) -> None:
    with pytest.raises(DeviceError, match=rf"^compute.device = '{name}' can't be used: ") as caught:
        find_device(name, threads=1)
    assert caught.value.is_known is is_known


def compiled_with(cache: Path) -> tuple[bool, list[str], list[str]]:
    """Whether a worker has to compile, and which loops it has at first and a little later."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    is_compiling, first, then = json.loads(done.stdout)
    return is_compiling, first, then


def test_only_what_most_estimators_need_is_compiled_first(tmp_path: Path) -> None:
    """The rest in an order in which somebody may stop it."""
    is_compiling, first, then = compiled_with(tmp_path)
    assert is_compiling
    assert first == ["spread"]
    assert set(first) < set(then)
    assert "gae" not in then
    is_compiling, first, _ = compiled_with(tmp_path)
    assert not is_compiling, "it was kept"
    assert first == ["spread"]


def test_warming_leaves_no_loop_to_be_compiled() -> None:
    find_device("cpu", threads=1)
    warm_up("cpu", threads=1)
    loops = [loop for loop in vars(cpu_kernels).values() if hasattr(loop, "signatures")]
    assert loops
    assert all(loop.signatures for loop in loops)
