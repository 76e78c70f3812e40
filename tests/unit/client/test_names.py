"""What a user meets by a star import or by completion: the public names, and nothing else."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import experience_buffer

BASE = Path(experience_buffer.__file__).parent
MODULES = sorted(
    path.stem
    for path in BASE.glob("*.py")
    if not path.stem.startswith("_") and path.stem != "collate"  # Names that are elsewhere now.
)

FOR_US = {"delivered", "refusal", "task_in_key", "text_of_key"}
"""For the writer and the server: no user needs them."""


def module(name: str) -> ModuleType:
    return importlib.import_module(f"experience_buffer.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_completion_in_a_module_offers_what_a_star_import_brings(name: str) -> None:
    public = module(name)
    star: dict[str, object] = {}
    exec(f"from experience_buffer.{name} import *", star)
    assert dir(public) == sorted(public.__all__) == sorted(star.keys() - {"__builtins__"})
    assert not [each for each in dir(public) if each.startswith("_")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_no_other_class_or_function_of_its_own_that_looks_public(name: str) -> None:
    public, tree = module(name), ast.parse((BASE / f"{name}.py").read_text("utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name for node in tree.body if isinstance(node, kinds)}
    found = {each for each in defined if not each.startswith("_")}
    assert found - set(public.__all__) <= FOR_US


def test_the_package_offers_all_that_type_checkers_see_in_it() -> None:
    tree = ast.parse((BASE / "__init__.py").read_text("utf-8"))
    seen = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    names = experience_buffer.__all__
    assert sorted(seen) == names
    assert dir(experience_buffer) == sorted([*names, "__version__"])
    for name, where in seen.items():
        assert getattr(experience_buffer, name) is getattr(
            importlib.import_module(str(where)), name
        )


def test_a_star_import_brings_the_public_names_alone_also_after_others_were_used() -> None:
    code = (
        "import experience_buffer, experience_buffer.trxp, experience_buffer.collation\n"
        "experience_buffer.Client\n"
        "before = set(globals()) | {'before'}\n"
        "from experience_buffer import *\n"
        "print(sorted(set(globals()) - before) == experience_buffer.__all__)\n"
        "print(dir(experience_buffer) == sorted([*experience_buffer.__all__, '__version__']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\nTrue\n"


def test_a_star_import_without_torch_leaves_out_what_is_made_of_it() -> None:
    code = (
        "import sys\n"
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)\n"
        "from experience_buffer import *\n"
        "print('Client' in globals(), 'ExperienceDataset' in globals(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True False False\n"
