"""The pages on advantages show what the code computes, and all of its parameters."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.advantages import ESTIMATORS, Column, ExperienceInput, compute, plan
from experience_buffer_server.advantages.estimators.custom_functions import load_estimators
from tests.integration.server import Server

from .builders import advantages, computed

DOCS = Path(__file__).parents[3] / "docs"
STAGES = (DOCS / "advantages.md").read_text(encoding="utf-8")
PAGE = (DOCS / "estimators.md").read_text(encoding="utf-8")
SPECS = {spec.name: spec for spec in ESTIMATORS.values()}

Parameters = dict[str, tuple[object, object]]
"""Default and limits of each parameter, by its name."""


def sections(text: str) -> dict[str, str]:
    """What stands below each heading of the second level, by the heading."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def tables(text: str, kind: str) -> list[str]:
    """Rows of the tables whose first column is called `kind`."""
    pattern = rf"^\| {kind} \|.*\n\|[-|]+\n((?:\|.*\n)+)"
    found = re.findall(pattern, text, flags=re.MULTILINE)
    return [row for rows in found for row in rows.splitlines()]


def limits_in(cell: str) -> object:
    """The limits that a cell names, as `limits_of` gives them."""
    interval = re.fullmatch(r"([\[(])(\S+), (\S+)\](, whole)?", cell)
    if interval is None:
        return {json.loads(option.strip("`")) for option in cell.split(", ")}
    bracket, low, high, whole = interval.groups()
    return float(low), float(high), bracket == "(", bool(whole)


def limits_of(field: dataclasses.Field[Any]) -> object:
    limits = field.metadata
    if "options" in limits:
        return set(limits["options"])
    if limits.get("switch"):
        return {True, False}
    bounds = (limits["minimum"], limits["maximum"])
    return *bounds, limits.get("above_minimum", False), limits.get("whole", False)


def documented(text: str, kind: str) -> Parameters:
    shown: Parameters = {}
    for row in tables(text, kind):
        name, default, span, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert name.strip("`") not in shown, f"{name} is there twice"
        assert meaning, f"{name}: say what it means"
        shown[name.strip("`")] = (json.loads(default.strip("`")), limits_in(span))
    return shown


def actual(name: str) -> Parameters:
    fields = dataclasses.fields(SPECS[name].parameters)
    return {field.name: (field.default, limits_of(field)) for field in fields}


def examples(text: str) -> str:
    # A fence right after the last line of output would be taken for output.
    return text.replace("\n```", "\n")


def test_examples_of_the_pages() -> None:
    text = examples(STAGES + PAGE)
    parsed = doctest.DocTestParser().get_doctest(text, {}, "docs", str(DOCS), 0)
    report: list[str] = []
    outcome = doctest.DocTestRunner().run(parsed, out=report.append)
    assert outcome.attempted > 60
    assert outcome.failed == 0, "".join(report)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_listed(name: str) -> None:
    listed = " ".join(tables(PAGE, "estimator"))
    assert f"`{name}`" in listed


@pytest.mark.parametrize("name", SPECS)
def test_every_estimator_has_a_section_with_an_executed_example(name: str) -> None:
    section = sections(PAGE)[f"`{name}`"]
    shown = doctest.DocTestParser().get_examples(examples(section))
    called = [example for example in shown if f'show("{name}"' in example.source]
    assert called
    assert all(example.want for example in called)
    assert "\nSource: " in section
    needs = re.search(r"^Needs (.+?)\.\s+Takes", section, re.MULTILINE | re.DOTALL)
    assert needs
    wanted = {field for need in SPECS[name].needs for field in need.split("|")}
    assert set(re.findall(r"`(\w+)`", needs[1])) == wanted


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_is_there_with_its_default_and_bounds(name: str) -> None:
    section = sections(PAGE)[f"`{name}`"]
    takes = re.search(r"Takes ([\w, \n]+?)\s+parameters", section)
    assert takes
    common: Parameters = {}
    for kind in re.findall(r"\w+", takes[1].replace(" and", "")):
        rows = documented(STAGES, f"{kind} parameter")
        assert rows, f"{kind}: no such table"
        assert not common.keys() & rows.keys()
        common |= rows
    own = documented(section, "parameter")
    assert not [key for key, value in own.items() if common.get(key) == value], "said twice"
    expected = actual(name)
    shown = common | own
    assert shown == expected
    assert {key: type(value[0]) for key, value in shown.items()} == {
        key: type(value[0]) for key, value in expected.items()
    }


def test_settings_for_those_who_come_from_elsewhere_are_accepted() -> None:
    settings = re.findall(r"`(estimator = [^`]+)`", PAGE)
    assert len(settings) > 35
    for text in settings:
        advantage = tomllib.loads(f"advantage = {{ {text} }}")["advantage"]
        plan(advantage.pop("estimator"), advantage)


def test_the_settings_of_the_example_load() -> None:
    (text,) = re.findall(r"^```toml\n(.+?)^```", STAGES, flags=re.MULTILINE | re.DOTALL)
    advantage = tomllib.loads(text)["buffers"]["math"]["advantage"]
    plan(advantage.pop("estimator"), advantage)


def test_the_estimator_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(import numpy.+?)^```", STAGES, re.MULTILINE | re.DOTALL)
    (tmp_path / "shown_in_docs.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = load_estimators(
        {
            "above_median": {
                "path": "shown_in_docs:above_median",
                "computes": "scores",
                "compares": "group",
                "needs": ["reward"],
                "parameters": {"scale": 1.0},
            }
        }
    )
    steps = ((9.0, "a", 0), (4.0, "a", 1), (1.0, "b", 0), (2.0, "c", 0))
    group = [
        ExperienceInput(reward=reward, mask=Column("U8", b"\x01"), run=run, step=step)
        for reward, run, step in steps
    ]
    parameters = {"scale": 0.5}
    (result,) = compute([group], estimator="above_median", parameters=parameters, custom=custom)
    assert [advantages(item) for item in computed(result).items] == [[1.0], [1.0], [-0.5], [0.0]]


def test_fields_that_come_late(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(from exp.+?)^```", STAGES, re.MULTILINE | re.DOTALL)
    server = Server(tmp_path / "server")
    try:
        code = code.replace("127.0.0.1:50051", server.start().address)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stderr + server.tail()
    assert f"print(batch.experiences[0].advantages.tolist())  # {done.stdout}" in code
