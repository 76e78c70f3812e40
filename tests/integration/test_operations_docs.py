"""What docs/operations.md and SECURITY.md name exists: settings, metrics, texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from experience_buffer import Client
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings
from experience_buffer_server.settings.server import Settings
from tests.integration.server import Server

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "operations.md", ROOT / "SECURITY.md")
SECTIONS = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def _quoted(text: str) -> list[str]:
    """What stands in backquotes, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist(page: Path) -> None:
    quoted = _quoted(page.read_text(encoding="utf-8"))
    for text in quoted:
        found = re.fullmatch(r"\[?(\w+)\]?(?:\.(\w+)(\*?))?(?: = .*)?", text)
        if found is None or found[1] not in SECTIONS:
            continue
        keys = SECTIONS[found[1]].model_fields
        if found[2] is None:
            continue
        is_there = any(key.startswith(found[2]) for key in keys) if found[3] else found[2] in keys
        assert is_there, f"{page.name}: {text}"
    # What is named without its section is a buffer's or a consumer's, or the text says where it is.
    known = {key for section in SECTIONS.values() for key in section.model_fields}
    known |= BufferSettings.model_fields.keys() | ConsumerSettings.model_fields.keys()
    known |= {name for name in dir(Client) if not name.startswith("_")}
    known |= {"waiting_for", "num_lost", "experience_buffer_pushes_held_back_total"}
    for text in quoted:
        found = re.fullmatch(r"(?:client\.)?([a-z]+(?:_[a-z]+)+)(?:\(.*\)| = .*)?", text)
        if found is not None and not found[1].startswith("experience_buffer"):
            assert found[1] in known, f"{page.name}: {text}"


def test_metrics_exist(shared_server: Server) -> None:
    there = set(re.findall(r"^# TYPE (\w+) ", shared_server.metrics(), re.MULTILINE))
    text = PAGES[0].read_text(encoding="utf-8")
    named = set(re.findall(r"`(experience_buffer_\w+)`", text))
    named |= {f"experience_buffer{end}" for end in re.findall(r"`\.\.\.(_\w+)`", text)}
    assert len(named) > 5
    assert not named - there


@pytest.mark.parametrize(
    "words",
    [
        "the disk is full",
        "the store has failed",
        "is in use by another server",
    ],
)
def test_what_the_log_is_said_to_say_is_said(words: str) -> None:
    sources = (ROOT / "server").rglob("*.py")
    assert any(words in path.read_text(encoding="utf-8") for path in sources)
