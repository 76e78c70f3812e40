"""Ports of the tests' servers belong to one server for ever."""

from __future__ import annotations

import pytest

from tests.ports import unused_ports


def test_no_two_servers_of_any_test_runner_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    given: list[set[int]] = []
    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        given.append({port for _ in range(250) for port in unused_ports(2)})
    assert [len(ports) for ports in given] == [500] * 3
    assert len(set.union(*given)) == 1500
