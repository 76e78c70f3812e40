"""Which policy made an experience: read from wherever it may be said, or asked for in its pusher's words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import trxp
from experience_buffer._dense.tensors import tensor_view
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Candidate, Reason, Refusal
from experience_buffer_server.settings.buffer import BufferSettings
from tests.unit.builders import NUM_RESPONSE, experience, settings


def window(**staleness: Any) -> BufferSettings:
    return settings(consumers=[{"name": "trainer", "staleness": staleness or {"max_lag": 2}}])


def admitted(config: BufferSettings, **fields: Any) -> Candidate | Refusal:
    (item,) = trxp.read(experience(0, 0, **fields).serialize())
    assert isinstance(item, trxp.Item)
    return admit(item, config)


def refusal(config: BufferSettings, **fields: Any) -> Refusal:
    refused = admitted(config, **fields)
    assert isinstance(refused, Refusal)
    return refused


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({"info": {"model_version": 3}}, (3, 3)),
        ({"info": {"model_version": 0}}, (0, 0)),
        ({"info": {"model_version": np.int64(3)}}, (3, 3)),
        ({"info": {"version_start": 3, "version_end": 5}}, (3, 5)),
        ({"info": {"model_version": 3, "version_end": 5}}, (3, 5)),
        ({"versions": [-1, 3, 5, 5, 5, 5, 5]}, (3, 5)),
        ({"versions": torch.full((NUM_RESPONSE,), 3, dtype=torch.uint16)}, (3, 3)),
        (
            {"versions": torch.full((NUM_RESPONSE,), 2**32 - 1, dtype=torch.uint32)},
            (2**32 - 1,) * 2,
        ),
        ({"versions": [3] * NUM_RESPONSE, "info": {"model_version": "not read"}}, (3, 3)),
    ],
)
def test_what_says_its_version_is_stored(fields: dict[str, Any], versions: tuple[int, int]) -> None:
    for config in (window(), settings()):
        candidate = admitted(config, **fields)
        assert isinstance(candidate, Candidate)
        assert (candidate.min_version, candidate.max_version) == versions


UNSAID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "info['model_version'] is missing", ""),
    ({"info": {"model_version": None}}, "info['model_version'] is missing", ""),
    ({"info": {"model_version": -1}}, "info['model_version'] is -1", ""),
    ({"info": {"version_end": 9}}, "info['version_start'] is missing", ""),
    ({"versions": [-1] * NUM_RESPONSE}, "no token has a version of 0 or more", ""),
    ({"info": {"model_versoin": 3}}, "info['model_version'] is missing", "info['model_versoin']"),
    ({"info": {"modelversion": 3}}, "info['model_version'] is missing", "info['modelversion']"),
    ({"info": {"Model-Version": 3}}, "info['model_version'] is missing", "info['Model-Version']"),
    ({"info": {"model_verison": 3}}, "info['model_version'] is missing", "info['model_verison']"),
    ({"info": {"policy_version": 3}}, "info['model_version'] is missing", "info['policy_version']"),
    ({"info": {"weight_version": 3}}, "info['model_version'] is missing", "info['weight_version']"),
    ({"info": {"version": 3}}, "info['model_version'] is missing", "info['version']"),
    (
        {"info": {"version_strat": 3, "version_end": 9}},
        "info['version_start'] is missing",
        "info['version_strat']",
    ),
    ({"metrics": {"model_version": 3.0}}, "is missing", "metrics['model_version']"),
    ({"extra": {"model_version": torch.tensor([3])}}, "is missing", "the tensor 'model_version'"),
    ({"extra": {"version": torch.zeros(7)}}, "is missing", "the tensor 'version'"),
    (
        {"info": {"versionn": 1}, "metrics": {"weights_version": 2.0}},
        "is missing",
        "info['versionn'] or metrics['weights_version']",
    ),
    ({"info": {"task_index": 3, "attempt": 2, "mode": "eval"}}, "is missing", ""),
]


@pytest.mark.parametrize(("fields", "what", "meant"), UNSAID)
def test_a_window_takes_nothing_without_version(
    fields: dict[str, Any], what: str, meant: str
) -> None:
    refused = refusal(window(), **fields)
    assert refused.reason is Reason.MISSING_FIELD
    assert f": {what}" in refused.message or what == "is missing" in refused.message
    assert "the staleness of consumer 'trainer' (max_lag = 2) is judged by it" in refused.message
    assert ("? Set" if meant else "; set") + ' info={"model_version": N}, or' in refused.message
    assert 'on_missing_version = "deliver"' in refused.message
    question = refused.message.partition("did you mean it by ")[2].partition("?")[0]
    assert question == meant
    lenient = window().model_copy(update={"on_missing_version": "deliver"})
    for config in (settings(), window(max_age_seconds=3.0), lenient):
        assert isinstance(admitted(config, **fields), Candidate)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (window(max_version_span=3), "consumer 'trainer' (max_version_span = 3)"),
        (
            settings(consumers=["critic", {"name": "trainer", "staleness": {"max_lag": 0}}]),
            "consumer 'trainer' (max_lag = 0)",
        ),
    ],
)
def test_the_bound_that_needs_it_is_named(config: BufferSettings, words: str) -> None:
    assert f"{words} is judged by it" in refusal(config).message


@pytest.mark.parametrize("config", [window(), settings()], ids=["window", "none"])
@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"model_version": "3"}, "info['model_version'] is '3'; a policy version is a whole"),
        ({"model_version": 3.5}, "info['model_version'] is 3.5; a policy version is a whole"),
        ({"model_version": 3.0}, "info['model_version'] is 3.0; a policy version is a whole"),
        ({"model_version": np.float32(3)}, "info['model_version'] is 3.0; a policy version"),
        ({"model_version": True}, "info['model_version'] is True; a policy version is a whole"),
        ({"model_version": [3]}, "info['model_version'] is a list; a policy version is a"),
        ({"version_start": "3", "version_end": 5}, "info['version_start'] is '3'"),
        ({"version_start": 3, "version_end": 5.5}, "info['version_end'] is 5.5"),
        ({"model_version": 2**63}, "info['model_version'] is 9223372036854775808; a policy"),
    ],
)
def test_a_version_of_another_kind_is_named(
    config: BufferSettings, info: dict[str, Any], words: str
) -> None:
    refused = refusal(config, info=info)
    assert refused.reason is Reason.INVALID
    assert words in refused.message


def test_versions_of_another_dtype_are_refused() -> None:
    for dtype in (torch.float32, torch.bool, torch.uint64):
        odd = {"versions": tensor_view(torch.ones(NUM_RESPONSE).to(dtype))}
        (item,) = trxp.read(trxp.with_tensors(experience(0, 0).serialize(), odd))
        assert isinstance(item, trxp.Item)
        refused = admit(item, settings())
        assert isinstance(refused, Refusal)
        assert "an integer dtype is expected, one of I64, I32" in refused.message
