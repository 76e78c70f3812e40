"""Settings as callers give them: in which words two of them are contrasted."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.buffer.settings_checks import checked_settings, contrast

TRAINER = {"name": "trainer", "unit": "group"}


@pytest.mark.parametrize(
    ("stored", "wanted", "words"),
    [
        ({"group_size": 3}, {"group_size": 3}, ""),
        ({"group_size": 3}, {"group_size": 5}, "group_size is 3, not 5"),
        ({"on_full": "evict"}, {}, "on_full is 'evict', not 'refuse'"),
        (
            {"advantage": {"estimator": "grpo", "eps": 0.5}},
            {"advantage": {"estimator": "grpo", "eps": 0.25}},
            "advantage.eps is 0.5, not 0.25",
        ),
        (
            {"consumers": [TRAINER | {"staleness": {"max_lag": 2}}]},
            {"consumers": [TRAINER | {"staleness": {"max_lag": 4}}]},
            "consumers[0].staleness.max_lag is 2, not 4",
        ),
        (
            {"consumers": [TRAINER]},
            {"consumers": [TRAINER, {"name": "critic"}]},
            "consumers is ['trainer'], not ['trainer', 'critic']",
        ),
        (
            {"pacing": {"consumer": "trainer", "max_staleness": 1, "batch_size": 7}},
            {},
            "pacing is {'consumer': 'trainer', 'max_staleness': 1, 'batch_size': 7, "
            "'max_running': 0}, not None",
        ),
        (
            {"group_size": 2, "lease_seconds": 3.0, "max_items": 5, "max_bytes": 7_001},
            {"group_size": 11, "lease_seconds": 13.0, "max_items": 17, "max_bytes": 19_001},
            "group_size is 2, not 11, lease_seconds is 3.0, not 13.0, max_items is 5, not 17 "
            "and 1 more",
        ),
    ],
)
def test_other_settings_are_named_with_both_values(
    stored: dict[str, Any], wanted: dict[str, Any], words: str
) -> None:
    assert contrast(checked_settings(stored), checked_settings(wanted)) == words
