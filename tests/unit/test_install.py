"""When scripts/install.py runs pip, and when it must not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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


def test_dev_contains_server(root: Path) -> None:
    install.stamp("dev").write_text(install.digest(), encoding="utf-8")
    assert install.main(["server"]) == 0
    assert install.main(["dev"]) == 0


def test_server_does_not_contain_dev(root: Path) -> None:
    install.stamp("server").write_text(install.digest(), encoding="utf-8")
    assert install.main(["server"]) == 0
    assert install.main(["dev"]) != 0


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
