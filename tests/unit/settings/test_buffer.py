"""Settings of a buffer that could never come to anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.settings_checks import checked_settings
from experience_buffer_server.settings.buffer import MIN_PAYLOAD_BYTES, BufferSettings
from experience_buffer_server.settings.server import ConfigurationError, load_settings
from tests.unit.builders import World, payload, push

GROUPS: dict[str, Any] = {"consumers": [{"name": "trainer", "unit": "group"}]}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (GROUPS | {"group_size": 8, "max_items": 4}, "group_size = 8 is over max_items = 4"),
    (
        {"group_size": 8, "max_items": 4, "advantage": {"estimator": "grpo"}},
        "group_size = 8 is over max_items = 4",
    ),
    (
        GROUPS | {"group_size": 8, "max_bytes": 1000},
        "group_size = 8 is too large for max_bytes = 1000",
    ),
    ({"max_bytes": 100}, "max_bytes = 100 has no room for any experience"),
    (
        {
            "group_size": 4,
            "min_group_size": 5,
            "group_deadline_seconds": 9,
            "on_group_deadline": "use_partial",
        },
        "min_group_size = 5 is over group_size = 4",
    ),
    (
        {
            "max_items": 4,
            "min_group_size": 5,
            "group_deadline_seconds": 9,
            "on_group_deadline": "use_partial",
        },
        "min_group_size = 5 is over max_items = 4",
    ),
    (
        {"max_items": 4, "consumers": [{"name": "critic", "limiter": {"min_size": 5}}]},
        "'critic': limiter.min_size = 5 items never fit into max_items = 4",
    ),
    (
        {
            "max_items": 8,
            "group_size": 4,
            "consumers": [{"name": "actor", "unit": "group", "limiter": {"min_size": 3}}],
        },
        "'actor': limiter.min_size = 3 groups of 4 never fit into max_items = 8",
    ),
    (
        {"max_items": 4, "consumers": [{"name": "actor", "limiter": {"min_diff": 4.0}}]},
        "limiter.min_diff = 4 lets nothing be sampled before 5 items are stored",
    ),
]


@pytest.mark.parametrize(("values", "words"), IMPOSSIBLE)
def test_what_could_never_come_to_anything_is_refused_with_the_numbers(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"max_|min_") as refused:
        checked_settings(values)
    assert words in str(refused.value)
    assert BufferSettings.model_validate(values), "a store that has them can be opened"


@pytest.mark.parametrize(
    "values",
    [
        GROUPS | {"group_size": 4, "max_items": 4},
        {"group_size": 8, "max_items": 4},
        {"max_items": 4, "consumers": [{"name": "a", "limiter": {"min_size": 4}}]},
        {"max_items": 4, "consumers": [{"name": "a", "limiter": {"min_diff": 3.0}}]},
        {
            "max_items": 2,
            "consumers": [
                {
                    "name": "a",
                    "replay": True,
                    "limiter": {"min_diff": 3.0, "max_diff": 9, "samples_per_insert": 2},
                }
            ],
            "group_by": "none",
        },
        {"min_group_size": 9},
    ],
)
def test_what_is_just_possible_is_taken(values: dict[str, Any]) -> None:
    checked_settings(values)


def test_the_configuration_file_is_told_which_buffer(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        "[buffers.math]\ngroup_size = 8\nmax_items = 4\nadvantage = {estimator = 'grpo'}\n"
    )
    with pytest.raises(ConfigurationError, match="math: group_size = 8 is over max_items = 4"):
        load_settings(file)


async def test_a_store_with_such_settings_opens_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.create(group_size=8, max_items=4, **GROUPS)
    registry = world.registry()
    await registry.load()
    assert "stored buffer 'buffer-1': group_size = 8 is over max_items = 4" in caplog.text
    with pytest.raises(errors.InvalidRequestError, match="group_size = 8 is over max_items = 5"):
        await registry.update("buffer-1", {"max_items": 5})
    buffer = await registry.update("buffer-1", {"max_items": 8})
    await buffer.push(push((1, 0)))


def test_no_payload_is_smaller() -> None:
    assert len(payload((1, 0))) > MIN_PAYLOAD_BYTES
