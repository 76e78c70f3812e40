"""`help()` explains everything public: fields, parameters, words that are allowed, errors."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import experience_buffer
from experience_buffer import errors

PACKAGE: Final = "experience_buffer"
MODULES: Final = sorted(
    path.stem
    for path in Path(experience_buffer.__file__).parent.glob("*.py")
    if not path.stem.startswith("_") and path.stem != "collate"
)
REACHED: Final = (
    "_async.batch.AsyncBatch",
    "_async.batch.AsyncPendingAck",
    "_async.listing.AsyncPages",
    "_async.policy_watch.AsyncPolicyVersions",
    "_async.scanning.AsyncScan",
    "_async.stream.AsyncSampleStream",
    "_async.writer.AsyncWriter",
    "_sync.batch.Batch",
    "_sync.batch.PendingAck",
    "_sync.listing.Pages",
    "_sync.policy_watch.PolicyVersions",
    "_sync.scanning.Scan",
    "_sync.stream.SampleStream",
    "_sync.writer.Writer",
)
"""Classes that no public module has, but calls return."""
ELSEWHERE: Final = {"BufferChanges": "BufferConfig"}
"""Whose fields another class explains."""


def public() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        for each in module.__all__:
            yield f"{name}.{each}", getattr(module, each)
    for path in REACHED:
        where, _, name = path.rpartition(".")
        yield path, getattr(importlib.import_module(f"{PACKAGE}.{where}"), name)


THINGS: Final = dict(public())
CLASSES: Final = {
    where: thing
    for where, thing in THINGS.items()
    if isinstance(thing, type) and thing.__module__.startswith(PACKAGE)
}
CALLED: Final[dict[str, Callable[..., Any]]] = {
    where: thing for where, thing in THINGS.items() if isinstance(thing, types.FunctionType)
} | {
    f"{where}.{name}": member
    for where, cls in CLASSES.items()
    for name, member in inspect.getmembers(cls)
    if not name.startswith("_")
    and isinstance(member, types.FunctionType | types.MethodType)
    and member.__module__.startswith(PACKAGE)
}
"""Functions, and methods, inherited ones too."""


def sections(text: str | None) -> dict[str, dict[str, str]]:
    """Section, and entry in it, to text, of a docstring in Google's form."""
    found: dict[str, dict[str, str]] = {}
    parts = re.split(r"^(\w+):\n(?= {4})", inspect.cleandoc(text or ""), flags=re.MULTILINE)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        block = re.match(r"(?:(?: {4}.*)?\n?)*", body)
        assert block is not None
        entries = re.split(r"^ {4}\*{0,2}([\w.]+)(?: \([^)]*\))?: ", block[0], flags=re.MULTILINE)
        found.setdefault(title, {}).update(zip(entries[1::2], entries[2::2], strict=True))
    return found


def fields(cls: type[Any]) -> set[str]:
    """What its instances have for all to see: fields, annotations and descriptors."""
    found = {field.name for field in dataclasses.fields(cls)} if _is_dataclass(cls) else set()
    for base in cls.__mro__:
        if base.__module__.startswith(PACKAGE) and not base.__name__.startswith("_"):
            found.update(inspect.get_annotations(base))
            found.update(
                name
                for name, value in vars(base).items()
                if type(value).__module__ == f"{PACKAGE}._fields"
            )
    return {name for name in found if not name.startswith("_")}


def _is_dataclass(cls: type[Any]) -> bool:
    return dataclasses.is_dataclass(cls)


def explained(cls: type[Any]) -> dict[str, str]:
    """Fields that a class explains, and what an error inherits."""
    classes = cls.__mro__ if issubclass(cls, errors.ExperienceBufferError) else (cls,)
    found: dict[str, str] = {}
    for each in classes:
        found = {**sections(each.__doc__).get("Attributes", {}), **found}
    return found


@pytest.mark.parametrize("where", CLASSES)
def test_a_class_explains_its_fields(where: str) -> None:
    cls = CLASSES[where]
    assert inspect.cleandoc(cls.__doc__ or "")
    if cls.__name__ in ELSEWHERE:
        other = getattr(experience_buffer, ELSEWHERE[cls.__name__])
        assert fields(cls) <= fields(other)
        assert f"`{other.__name__}`" in (cls.__doc__ or "")
        return
    assert sorted(fields(cls) - explained(cls).keys()) == []
    # And explains none that it hasn't.
    known = fields(cls) | {name for name, _ in inspect.getmembers(cls)}
    if not issubclass(cls, dict):  # Of one, the fields are all.
        known |= parameters(cls)
    assert sorted(explained(cls).keys() - known) == []


ALIASES: Final = {
    name: set(typing.get_args(value))
    for module in (*MODULES, "_fields")
    for name, value in vars(importlib.import_module(f"{PACKAGE}.{module}")).items()
    if typing.get_origin(value) is typing.Literal
}
"""By the name of a type that allows certain words: these."""


def unnamed(annotation: object, text: str) -> set[str]:
    """The words that a type allows and a text doesn't name, itself or by the class that does."""
    found: set[str] = set()
    for part in str(annotation).split(" | "):
        found |= ALIASES.get(part, set())
        if part.startswith("Literal["):
            found |= set(re.findall(r"['\"](\w+)['\"]", part))
    texts = [text]
    for cls in CLASSES.values():
        if f"`{cls.__name__}`" in text:
            texts += explained(cls).values()
    return {word for word in found if word and f'"{word}"' not in " ".join(texts)}


@pytest.mark.parametrize("where", [where for where, cls in CLASSES.items() if _is_dataclass(cls)])
def test_a_field_of_certain_words_names_each(where: str) -> None:
    texts = explained(CLASSES[where])
    for field in dataclasses.fields(CLASSES[where]):
        assert unnamed(field.type, texts[field.name]) == set(), field.name


@pytest.mark.parametrize("where", CALLED)
def test_a_parameter_of_certain_words_names_each(where: str) -> None:
    function = CALLED[where]
    for name, text in sections(inspect.getdoc(function)).get("Args", {}).items():
        hint = inspect.signature(function).parameters[name].annotation
        assert unnamed(hint, text) == set(), name


@pytest.mark.parametrize("where", CLASSES)
def test_a_class_explains_its_properties(where: str) -> None:
    cls = CLASSES[where]
    for name, member in inspect.getmembers(cls, lambda member: isinstance(member, property)):
        if not name.startswith("_") and not type(cls).__module__.startswith("torch"):
            assert member.__doc__, f"{where}.{name}"


def parameters(function: Callable[..., Any]) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {each.name for each in found if each.name not in ("self", "cls")}


@pytest.mark.parametrize("where", CLASSES)
def test_a_class_explains_how_to_make_one(where: str) -> None:
    cls = CLASSES[where]
    if issubclass(cls, tuple | dict) or "_async" in where or "_sync" in where:
        return  # The fields are all; or only calls make them.
    if cls.__name__ in ("Collate", "PackedBatch"):
        return  # A protocol; and what `parse` makes.
    of_class, of_init = sections(cls.__doc__), sections(cls.__init__.__doc__)
    known = {*of_class.get("Args", ()), *of_init.get("Args", ()), *explained(cls)}
    if "__init__" in vars(cls) or _is_dataclass(cls):
        assert sorted(parameters(cls) - known) == []


@pytest.mark.parametrize("where", CALLED)
def test_a_function_explains_its_parameters_and_errors(where: str) -> None:
    function = CALLED[where]
    text = inspect.getdoc(function)
    assert text
    found = sections(text)
    assert sorted(parameters(function) - found.get("Args", {}).keys()) == []
    assert sorted(found.get("Args", {}).keys() - parameters(function)) == []
    for name in found.get("Raises", ()):
        error = getattr(errors, name, None) or getattr(builtins, name, None)
        assert isinstance(error, type), f"{where} raises {name}, which nobody can catch"
        assert issubclass(error, Exception)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_says_what_it_is_and_what_its_subject_names(name: str) -> None:
    error = getattr(errors, name)
    assert inspect.cleandoc(error.__doc__ or "")
    assert {"status", "reason", "subject", "retry_delay_seconds"} <= explained(error).keys()
