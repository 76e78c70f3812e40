"""docs/configuration.md names every setting with its default, and its example loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from experience_buffer_server.advantages import ESTIMATORS
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.settings.access import AccessSection, TlsSection
from experience_buffer_server.settings.buffer import (
    AdvantageSettings,
    ArchiveSettings,
    BufferSettings,
    RetentionSettings,
)
from experience_buffer_server.settings.consumer import (
    ConsumerSettings,
    LimiterSettings,
    PacingSettings,
    SelectorSettings,
    StalenessSettings,
)
from experience_buffer_server.settings.estimators import EstimatorSettings
from experience_buffer_server.settings.server import (
    ComputeSection,
    ServerSection,
    Settings,
    SnapshotsSection,
    StoreSection,
    load_settings,
)

TEXT = (Path(__file__).parent.parent.parent / "docs" / "configuration.md").read_text("utf-8")
SECTIONS: dict[str, type[BaseModel]] = {
    "`[server]`": ServerSection,
    "`[store]`": StoreSection,
    "`[compute]`": ComputeSection,
    "`[snapshots]`": SnapshotsSection,
    "`[tls]`": TlsSection,
    "`[access]`": AccessSection,
    "`[buffers.NAME]`": BufferSettings,
    "`[[buffers.NAME.consumers]]`": ConsumerSettings,
    "`[buffers.NAME.consumers.selector]` and `[buffers.NAME.remover]`": SelectorSettings,
    "`[buffers.NAME.consumers.limiter]`": LimiterSettings,
    "`[buffers.NAME.consumers.staleness]`": StalenessSettings,
    "`[buffers.NAME.retention]`": RetentionSettings,
    "`[buffers.NAME.archive]`": ArchiveSettings,
    "`[buffers.NAME.pacing]`": PacingSettings,
    "`[buffers.NAME.advantage]`": AdvantageSettings,
    "`[estimators.NAME]`": EstimatorSettings,
}


def _rows(heading: str) -> list[list[str]]:
    """The cells of the tables' rows below a heading, up to the next heading."""
    start = TEXT.index(f"# {heading}\n")
    section = re.split(r"^#+ ", TEXT[start + 2 :], flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def _parsed(cell: str) -> object:
    return json.loads(cell.strip("`")) if cell else None


def _tables(annotation: object) -> set[type[BaseModel]]:
    """The settings' classes that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {table for part in get_args(annotation) for table in _tables(part)}


def _plain(value: object) -> object:
    """A default as the documentation writes it."""
    match value:
        case Path():
            return str(value)
        case AdvantageSettings():
            return value.model_dump(exclude_defaults=True)
        case SelectorSettings():
            assert value == SelectorSettings(kind=value.kind)
            return value.kind
        case tuple():
            return [consumer.name for consumer in value]
        case _:
            return value


def test_every_section_is_listed_here() -> None:
    top_level = {name.strip("`[]").split(".")[0] for name in SECTIONS}
    assert top_level == Settings.model_fields.keys()


def test_every_table_of_a_buffer_is_listed_here() -> None:
    """A table within a table, however it is optional, has its own section."""
    pending: list[type[BaseModel]] = [BufferSettings]
    seen = set[type[BaseModel]]()
    while pending:
        for field in pending.pop().model_fields.values():
            tables = _tables(field.annotation) - seen
            seen |= tables
            pending += tables
    assert seen <= set(SECTIONS.values())


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented_with_its_default(heading: str) -> None:
    rows = {cells[0].strip("`"): cells for cells in _rows(heading)}
    fields = SECTIONS[heading].model_fields
    assert list(rows) == list(fields)
    for key, field in fields.items():
        default = None if field.is_required() else _plain(field.get_default())
        documented = _parsed(rows[key][1])
        assert (documented, type(documented)) == (default, type(default)), f"{heading} {key}"
        assert rows[key][3], f"{heading} {key}: say what it means"


def test_every_estimator_is_named() -> None:
    """Their parameters are on another page."""
    listed = re.search(r"The estimators are (.+?), and those of", TEXT, flags=re.DOTALL)
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == list(ESTIMATORS)


def test_the_examples_load(tmp_path: Path) -> None:
    examples = re.findall(r"^```toml\n(.+?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "server.toml"
    path.write_text(examples[0], encoding="utf-8")
    settings = load_settings(path)
    assert settings.buffers["math"].advantage.parameters == {"eps": 1e-4}
    trainer, evaluator = settings.buffers["math"].consumers
    assert (trainer.unit, trainer.selector.kind) == ("group", "freshest")
    assert (evaluator.selector.kind, evaluator.selector.exponent) == ("prioritized", 0.6)
    pacing = settings.buffers["math"].pacing
    assert trainer.staleness is not None
    assert pacing is not None
    assert (trainer.staleness.max_lag, pacing.max_staleness) == (4, 4)
    path.write_text(examples[1], encoding="utf-8")
    settings = load_settings(path)
    assert settings.buffers["math"].advantage.estimator in settings.estimators
    custom.declare({})
