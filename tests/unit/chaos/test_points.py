"""Every point of the crash matrix is there, and a run says which of them never came."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.chaos import points
from tests.chaos.__main__ import judge_reach
from tests.chaos.points import matrix, schedule, unreached
from tests.chaos.report import Report


def test_a_full_run_goes_through_every_point() -> None:
    assert {one.name for one in schedule(200, Random(1))} == {one.name for one in matrix()}


@pytest.mark.parametrize("place", [("retentions", "Retention._gone"), ("buffer", "Buffer.gone")])
def test_code_that_is_gone_is_an_error(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    monkeypatch.setattr(points, "_CALLS", (("renamed", *place, "after", "", 1),))
    with pytest.raises(LookupError, match=r"points\.py names .* which is gone"):
        matrix()


def test_a_kind_that_never_came_is_named_and_a_group_is_a_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = matrix()
    names = {one.name for one in asked}
    assert unreached(asked, names) == ([], [])
    others = {name for name in names if not name.startswith(("snapshot", "commit of nack"))}
    report = Report(points=Counter(others))
    judge_reach(asked, report)
    assert report.problems == ["no process died at any of the snapshots"]
    assert "NEVER REACHED" in (said := capsys.readouterr().out)
    assert "commit of nack, snapshot begun, snapshot copied, snapshot published" in said
