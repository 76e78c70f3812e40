"""The Ray cluster of TransferQueue's benchmark: its own, whatever else runs on the machine."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.workload import SIZES

NAME = "benchmarks.compare.adapters.transfer_queue_partition"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Ray, of which only the calls are of interest; TransferQueue is installed for itself alone."""
    ray = Mock()
    ray.init.return_value = SimpleNamespace(address_info={"gcs_address": "127.0.0.1:61001"})
    ray.is_initialized.return_value = False
    for name, module in (("ray", ray), ("transfer_queue", Mock()), ("tensordict", Mock())):
        monkeypatch.setitem(sys.modules, name, module)
    return ray


@pytest.fixture
def adapter(ray: Mock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter where the environment and a file name the cluster of somebody else."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ |= {"RAY_ADDRESS": "10.1.2.3:6379", "RAY_NAMESPACE": "n", "RAY_TMPDIR": "/elsewhere"}
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def test_the_cluster_is_started_and_not_joined(ray: Mock, adapter: Any, tmp_path: Path) -> None:
    with adapter.serve(tmp_path, SIZES["S"], "") as (address, _):
        assert not {"RAY_ADDRESS", "RAY_NAMESPACE", "RAY_TMPDIR"} & os.environ.keys()
        given = ray.init.call_args.kwargs
        assert (given["address"], given["num_cpus"]) == ("local", 8)
        own = Path(given["_temp_dir"])
        assert own.is_dir()
        assert own != Path("/tmp/ray")
        assert len(f"{own}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store") < 107
        assert address == "127.0.0.1:61001"
    assert not own.exists()
    ray.shutdown.assert_called_once_with()


def test_workers_join_the_cluster_that_was_started(ray: Mock, adapter: Any) -> None:
    adapter.writer("127.0.0.1:61001", SIZES["S"], 0, "group")
    assert ray.init.call_args.kwargs["address"] == "127.0.0.1:61001"
    assert "RAY_ADDRESS" not in os.environ
