"""The reference has everything that is public, each with what it means."""

from __future__ import annotations

import importlib
import re
import zlib
from pathlib import Path

import pytest
import typer
from google.protobuf.descriptor import Descriptor, FileDescriptor
from pydantic import BaseModel

from experience_buffer_server.commands import cli
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import Settings
from scripts.documentation.reference import (
    client,
    commands,
    contract,
    http,
    metrics,
    running,
    settings,
)

ROOT = Path(__file__).parents[3]


def test_every_public_name_of_the_client_is_there(built: Path) -> None:
    text = (built / "objects.inv").read_bytes().split(b"\n", 4)[4]
    shown = {line.split(" ")[0] for line in zlib.decompress(text).decode().splitlines()}
    assert len(client.modules()) > 10
    for module in client.modules():
        loaded = importlib.import_module(f"experience_buffer.{module}")
        missing = {
            name
            for name in loaded.__all__
            if f"experience_buffer.{module}.{name}" not in shown
            and f"{getattr(loaded, name).__module__}.{name}" not in shown
        }
        assert not missing, module
    verbs = set(dir(importlib.import_module("experience_buffer").Client))
    assert {"push", "sample", "list", "get_stats"} <= verbs
    for verb in (verb for verb in verbs if not verb.startswith("_")):
        assert f"experience_buffer.client.Client.{verb}" in shown
        assert f"experience_buffer.aio.AsyncClient.{verb}" in shown


def test_every_setting_is_there_with_its_meaning() -> None:
    keys = list(settings.keys())
    assert not [f"{key.section}.{key.name}" for key in keys if not key.meaning]
    shown = {(key.section, key.name): key for key in keys}
    assert shown["server", "port"] == settings.Key(
        "server",
        "port",
        "whole number, at least 0, at most 65535",
        "50051",
        '0: a free port; the log line "listening" names it.',
    )
    assert shown["buffers.NAME.consumers", "unit"].values == '`"item"`, `"group"`'
    tables: list[type[BaseModel]] = [Settings]
    count = 0
    while tables:
        table = tables.pop()
        for name, field in table.model_fields.items():
            inner = settings.tables_of(field.annotation)
            tables += inner
            if table is not Settings:
                assert any(name == key for _, key in shown), f"{table.__name__}.{name}"
                count += 1
    assert count >= len(shown) > 60


def test_every_command_is_there_with_its_options() -> None:
    page, count = commands.page(), 0
    pending = [("", typer.main.get_command(cli.application()))]
    while pending:
        name, found = pending.pop()
        inner = getattr(found, "commands", {})
        pending += [(f"{name} {key}".strip(), each) for key, each in inner.items()]
        if not inner:
            section = page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
            assert found.help
            assert found.help.split("\n")[0] in section
            for parameter in found.params:
                if parameter.name != "help" and not getattr(parameter, "hidden", False):
                    assert any(f"`{option}`" in section for option in parameter.opts) or (
                        (getattr(parameter, "metavar", None) or parameter.name or "").upper()
                        in section
                    ), f"{name} {parameter.name}"
            count += 1
    assert count > 10


def test_every_metric_is_there_with_its_labels() -> None:
    shown = {family.name: family for family in metrics.families()}
    assert not [family.name for family in shown.values() if not family.text]
    for metric in Metrics().registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert name in shown
    assert shown["experience_buffer_policy_version"].labels == ("buffer",)
    assert set(shown["experience_buffer_sample_wait_seconds"].labels) == {"buffer", "consumer"}
    assert all(f"`{name}`" in metrics.page() for name in shown)


def _file(name: str) -> FileDescriptor:
    module = importlib.import_module(f"experience_buffer.v1.{name}_pb2")
    descriptor = module.DESCRIPTOR
    assert isinstance(descriptor, FileDescriptor)
    return descriptor


@pytest.mark.parametrize("path", sorted((ROOT / "proto").rglob("*.proto")), ids=lambda p: p.stem)
def test_everything_in_the_contract_is_there_with_its_comment(path: Path) -> None:
    found = {part.name: part for part in contract.parts(path)}
    descriptor = _file(path.stem)
    messages: list[tuple[str, Descriptor]] = list(descriptor.message_types_by_name.items())
    expected: dict[str, set[str]] = {}
    while messages:
        name, message = messages.pop()
        if message.GetOptions().map_entry:
            continue
        expected[name] = {field.name for field in message.fields}
        messages += [(f"{name}.{each.name}", each) for each in message.nested_types]
        for enum in message.enum_types:
            expected[f"{name}.{enum.name}"] = set(enum.values_by_name)
    for name, enum in descriptor.enum_types_by_name.items():
        expected[name] = set(enum.values_by_name)
    for name, service in descriptor.services_by_name.items():
        expected[name] = {method.name for method in service.methods}
    assert {name: {row[0] for row in part.rows} for name, part in found.items()} == expected
    bare = [f"{p.name}.{row[0]}" for p in found.values() for row in p.rows if not row[2]]
    assert not bare
    assert not [part.name for part in found.values() if not part.text]


def test_types_of_the_contract_are_linked() -> None:
    page = contract.page()
    anchors = {
        heading.lower().replace(".", "") for heading in re.findall(r"^## `(.+)`$", page, re.M)
    }
    links = set(re.findall(r"\]\(#(\w+)\)", page))
    assert len(links) > 40
    assert links <= anchors


def test_every_route_and_value_of_http_is_there() -> None:
    page, document = http.page(), running.said().openapi
    assert len(document["paths"]) > 10
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            section = page.split(f"\n## `{method.upper()} {path}`\n")[1].split("\n## ")[0]
            assert all(
                f"| `{each['name']}` |" in section for each in operation.get("parameters", [])
            )
    for name, schema in document["components"]["schemas"].items():
        section = page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        assert all(f"| `{key}` |" in section for key in schema.get("properties", {}))
    anchors = {heading.lower() for heading in re.findall(r"^## `(\w+)`$", page, re.MULTILINE)}
    links = set(re.findall(r"\]\(#(\w+)\)", page))
    assert len(links) > 10
    assert links <= anchors


def test_addresses_that_pages_name_are_served() -> None:
    paths = set(running.said().openapi["paths"])
    text = (ROOT / "docs" / "looking.md").read_text("utf-8")
    (prefix,) = re.findall(r"below `(/api[^`]+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`/" in line]
    named = [path for row in rows for path in re.findall(r"`(/[a-z/]+)(?:\?\w+=)?`", row)]
    assert len(named) > 10
    assert {prefix + path for path in named} <= paths
