"""When scripts/install.py runs pip, and when it must not."""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import install

INPUTS = ("pyproject.toml", "constraints.txt", "hatch_build.py", "proto/a/b.proto")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a folder with a space, with pip and venv replaced by a failing command."""
    root = tmp_path / "a project"
    for name in (*INPUTS, "scripts/install.py", "generated.py", ".venv/keep"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    monkeypatch.setattr(install, "ROOT", root)
    monkeypatch.setattr(install, "VENV", root / ".venv")
    monkeypatch.setattr(install, "GENERATED", root / "generated.py")
    monkeypatch.setattr(install, "__file__", str(root / "scripts/install.py"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    return root


@pytest.mark.parametrize("installed", install.PROFILES)
@pytest.mark.parametrize("wanted", install.PROFILES)
def test_a_profile_contains_those_before_it(root: Path, installed: str, wanted: str) -> None:
    """What is there isn't installed again, and what is missing would be."""
    install.stamp(installed).write_text(install.digest(), encoding="utf-8")
    order = list(install.PROFILES)
    contains = order.index(installed) >= order.index(wanted)
    assert (install.main([wanted]) == 0) is contains


def test_profiles_are_extras_that_contain_one_another() -> None:
    """As pip will see it: what is in one is in those after it."""
    path = install.ROOT / "pyproject.toml"
    extras = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    order = [_needs(profile, extras) for profile in install.PROFILES]
    for smaller, larger in pairwise(order):
        assert smaller < larger
    server, gpu, demo, dev = order
    assert "torch" not in server
    assert "torch" in gpu
    assert "matplotlib" in demo
    assert demo.isdisjoint({"pytest", "mypy", "ruff", "hypothesis"}), "what only developers need"
    assert "pytest" in dev


def _needs(extra: str, extras: dict[str, list[str]]) -> set[str]:
    names: set[str] = set()
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "experience-buffer":
            names |= set().union(*(_needs(other, extras) for other in requirement.extras))
        else:
            names.add(requirement.name)
    return names


@pytest.mark.parametrize(
    ("there", "profile"),
    [
        ([], "server"),
        (["dev/nvidiactl", "dev/nvidia-uvm"], "server"),
        (["dev/nvidia0"], "gpu"),
        (["dev/nvidia7"], "gpu"),
        (["libcuda"], "gpu"),
    ],
)
def test_run_takes_torch_where_there_is_a_gpu(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: list[str],
    profile: str,
) -> None:
    (root / "dev").mkdir()
    for name in there:
        (root / name).touch()
    monkeypatch.setattr(install, "DEVICES", root / "dev")
    monkeypatch.setattr(install, "WSL_DRIVER", root / "libcuda")
    asked: list[str] = []
    monkeypatch.setattr(install, "install", lambda profile, wanted: asked.append(profile))
    assert install.main(["run"]) == 0
    assert asked == [profile]
    said = capsys.readouterr().out
    assert f"Installing into .venv, once: {install.PROFILES[profile]}." in said
    assert ("make run PROFILE=server leaves it out" in said) is (profile == "gpu")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["server", "dev"]])
def test_what_can_be_installed_is_said(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.main(arguments) == 2
    assert capsys.readouterr().err == "usage: install.py run|server|gpu|demo|dev\n"


def test_make_installs_what_each_target_needs() -> None:
    """Nothing is installed that the target's command doesn't use."""
    text = (install.ROOT / "Makefile").read_text(encoding="utf-8")
    needs = dict(re.findall(r"^([a-z-]+): (install-[a-z]+)", text, re.MULTILINE))
    assert needs["run"] == "install-run"
    assert needs["demo"] == "install-demo"
    recipes = dict(re.findall(r"^(install-[a-z]+):\n\t@(.+)$", text, re.MULTILINE))
    assert recipes["install-demo"].endswith("scripts/install.py demo")
    assert recipes["install-run"].endswith("scripts/install.py $(PROFILE)")
    assert re.search(r"^PROFILE \?= run$", text, re.MULTILINE)


def test_missing_generated_code_is_not_installed(root: Path) -> None:
    wanted = install.digest()
    install.stamp("dev").write_text(wanted, encoding="utf-8")
    assert install.is_installed("dev", wanted)
    (root / "generated.py").unlink()
    assert not install.is_installed("dev", wanted)


@pytest.mark.parametrize("name", INPUTS)
def test_each_input_matters(root: Path, name: str) -> None:
    before = install.digest()
    (root / name).write_text("changed", encoding="utf-8")
    assert install.digest() != before


def test_a_failed_install_leaves_no_stamp(root: Path) -> None:
    install.stamp("server").write_text("old", encoding="utf-8")
    assert install.main(["dev"]) != 0
    assert not any(install.stamp(profile).exists() for profile in install.PROFILES)


def test_an_old_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert install.main(["server"]) == 1
    assert "3.11 or newer is needed" in capsys.readouterr().err
