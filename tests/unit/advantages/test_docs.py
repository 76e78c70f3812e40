"""The page on advantages shows what the code computes."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path

from experience_buffer_server.advantages import ESTIMATORS

PAGE = Path(__file__).parents[3] / "docs" / "advantages.md"


def test_examples_of_the_page() -> None:
    # A fence right after the last line of output would be taken for output.
    parsed = doctest.DocTestParser().get_doctest(
        PAGE.read_text().replace("\n```", "\n"), {}, PAGE.name, str(PAGE), 0
    )
    report: list[str] = []
    outcome = doctest.DocTestRunner().run(parsed, out=report.append)
    assert outcome.attempted > 10
    assert outcome.failed == 0, "".join(report)


def test_parameter_table_of_the_page() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    specs = {spec.name: spec for spec in ESTIMATORS.values()}
    expected: dict[str, list[str]] = {}
    for spec in specs.values():
        for field in dataclasses.fields(spec.parameters):
            limits = field.metadata
            span = (
                ", ".join(limits["options"])
                if "options" in limits
                else f"{'(' if limits['above_minimum'] else '['}{limits['minimum']}, "
                f"{limits['maximum']}]"
            )
            row = expected.setdefault(field.name, ["", str(field.default), span])
            row[0] = ", ".join(filter(None, [row[0], f"`{spec.name}`"]))
    shown = {name: row.split(" | ") for name, row in rows.items() if name not in specs}
    assert shown == expected
