"""The project's own promises about what it installs: pins, floors, reasons, generated code."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from trove_classifiers import classifiers

ROOT = Path(__file__).parent.parent.parent
PROJECT = "experience-buffer"
WITHOUT_ITS_DEPENDENCIES = "trinity-rft"
"""Installed by scripts/install.py with --no-deps, hence declared nowhere else."""
NOT_FOR_TESTS = ("fuzz",)
"""Extras that a target of their own installs: there isn't a wheel for every Python."""


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _declared(*, without: Collection[str] = ()) -> list[Requirement]:
    project = _pyproject()["project"]
    every = project["optional-dependencies"].items()
    extras = [texts for extra, texts in every if extra not in without]
    texts = [*project["dependencies"], *(text for extra in extras for text in extra)]
    requirements = [Requirement(text) for text in texts]
    return [r for r in requirements if canonicalize_name(r.name) != PROJECT]


def _build_requirements() -> list[Requirement]:
    return [Requirement(text) for text in _pyproject()["build-system"]["requires"]]


def _pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {name: Version(version) for name, version in pins}


def _floor(requirement: Requirement) -> Version:
    """The oldest version that the requirement allows."""
    floors = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
    assert len(floors) == 1, f"{requirement}: state one oldest version with >= or =="
    return floors[0]


def _needed_with(requirements: list[Requirement]) -> set[str]:
    """Names of all distributions that installing `requirements` brings here."""
    names: set[str] = set()
    waiting = list(requirements)
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name in names:
            continue
        names.add(name)
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed)
    return names


def test_every_dependency_has_a_floor() -> None:
    for requirement in [*_declared(), *_build_requirements()]:
        _floor(requirement)


def test_every_pin_satisfies_what_is_declared() -> None:
    pins = _pins()
    for requirement in _declared():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} excludes the pinned {pin}"


def test_everything_installed_with_the_project_is_pinned() -> None:
    missing = _needed_with(_declared(without=NOT_FOR_TESTS)) - _pins().keys()
    assert not missing, f"constraints.txt doesn't pin {sorted(missing)}"


def test_the_pinned_versions_are_the_ones_tested() -> None:
    pins = _pins()
    names = {WITHOUT_ITS_DEPENDENCIES, *_needed_with(_declared(without=NOT_FOR_TESTS))}
    installed = {name: Version(distribution(name).version).public for name in names}
    assert installed == {name: str(pins[name]) for name in names}


def test_every_dependency_has_a_reason() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Dependencies") :]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table, flags=re.MULTILINE))
    names = [canonicalize_name(r.name) for r in [*_declared(), *_build_requirements()]]
    assert sorted(rows) == sorted({WITHOUT_ITS_DEPENDENCIES, *names})
    assert all(len(reason) >= 10 for reason in rows.values())


@pytest.mark.parametrize(
    ("package", "pattern", "files"),
    [
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'", "*_pb2_grpc.py"),
        ("protobuf", r"# Protobuf Python Version: ([\d.]+)", "*_pb2.py"),
    ],
)
def test_generated_code_imports_under_the_floors(package: str, pattern: str, files: str) -> None:
    floor = next(_floor(r) for r in _declared() if r.name == package)
    paths = sorted((ROOT / "client" / "experience_buffer" / "v1").glob(files))
    assert paths, "no generated code; run: make proto"
    for path in paths:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
        assert found, f"{path.name} doesn't name the version that generated it"
        assert Version(found[1]) <= floor, f"{path.name} needs {package} {found[1]} > {floor}"


def test_this_python_is_supported() -> None:
    project = _pyproject()["project"]
    supported = SpecifierSet(project["requires-python"])
    install = (ROOT / "scripts" / "install.py").read_text(encoding="utf-8")
    found = re.search(r"MINIMUM_PYTHON = \((\d+), (\d+)\)", install)
    assert found
    assert str(supported) == f">={found[1]}.{found[2]}"


def test_skips_are_named_at_the_end_of_a_run() -> None:
    """Beside failures and errors, which pytest names by itself only as long as nothing is asked for."""
    options = _pyproject()["tool"]["pytest"]["ini_options"]["addopts"]
    (named,) = [option for option in options if option.startswith("-r")]
    assert set(named[2:]) >= set("fEs")


def test_the_classifiers_are_known_and_name_the_pythons() -> None:
    project = _pyproject()["project"]
    assert set(project["classifiers"]) <= classifiers
    named = [c.rpartition(" :: ")[2] for c in project["classifiers"] if "Python :: 3." in c]
    supported = SpecifierSet(project["requires-python"])
    assert all(supported.contains(version) for version in named)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named
