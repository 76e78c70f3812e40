"""A buffer's configuration on its way to the server and back."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields
from typing import Any

import pytest

from experience_buffer import (
    AdvantageConfig,
    Archive,
    BufferConfig,
    ConsumerConfig,
    InvalidRequestError,
    Limiter,
    Pacing,
    Retention,
    Selector,
    Staleness,
    options,
)
from experience_buffer._messages import config as _config
from experience_buffer._messages import convert
from experience_buffer.v1 import config_pb2

ACTOR = ConsumerConfig(
    "actor",
    "group",
    raw=True,
    selector=Selector("min", key="reward", exponent=2.5, decay=0.25, seed=2**64 - 59),
    replay=True,
    max_times_sampled=31,
    with_replacement=True,
    limiter=Limiter(
        min_size=37, samples_per_insert=1.5, min_diff=-41.5, max_diff=43.5, max_ahead_bytes=47
    ),
    staleness=Staleness(max_lag=53, max_version_span=59, max_age_seconds=61.5, on_stale="mark"),
    max_deliveries=67,
    max_leased_experiences=71,
    max_leased_bytes=73,
    retain_steps=79,
)
FULL = BufferConfig(
    "math",
    group_by="run",
    group_size=11,
    group_deadline_seconds=13.5,
    on_group_deadline="use_partial",
    min_group_size=3,
    late_members="new_group",
    on_bad_reward="tombstone",
    on_missing_field="wait",
    consumers=(ACTOR, ConsumerConfig("critic", selector="uniform")),
    advantage=AdvantageConfig("gae", {"lam": 0.95, "whiten": True, "mode": "x", "clip": math.inf}),
    lease_seconds=17.0,
    max_items=19,
    max_bytes=23,
    duplicate_horizon_seconds=29.0,
    on_full="block",
    full_timeout_seconds=101.5,
    max_pending_bytes=103,
    retention=Retention(max_age_seconds=107.5, max_lag=109),
    remover=Selector("prioritized", exponent=0.5),
    on_future_version="deliver",
    on_missing_version="deliver",
    pacing=Pacing(consumer="actor", max_staleness=83, batch_size=89, max_running=97),
    archive=Archive(
        consumed=False,
        dropped=False,
        deleted=True,
        refused=False,
        max_age_seconds=113.5,
        max_bytes=127 << 20,
        max_pending_bytes=131 << 20,
        segment_seconds=137.5,
    ),
)


def test_configuration_survives_the_wire() -> None:
    assert all(getattr(FULL, field.name) is not None for field in fields(FULL))
    message = _config.config_to_message(FULL)
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in config_pb2.BufferConfig.DESCRIPTOR.fields
    }
    consumer = message.consumers[0]
    parts = (consumer, consumer.selector, consumer.limiter, consumer.staleness)
    for part in (*parts, message.pacing, message.retention):
        assert len(part.ListFields()) == len(part.DESCRIPTOR.fields), part.DESCRIPTOR.name
    back = convert.value_of(BufferConfig, message)
    assert back == FULL
    assert back.advantage is not None
    assert [type(value) for value in back.advantage.parameters.values()] == [
        float,
        float,
        str,
        bool,
    ]
    bare = BufferConfig("math")
    assert convert.value_of(BufferConfig, _config.config_to_message(bare)) == bare


def test_changes_are_the_configurations_fields() -> None:
    names = [field.name for field in fields(BufferConfig) if field.name != "name"]
    assert list(options.BufferChanges.__annotations__) == names
    assert sorted(_config.changed_fields(FULL)) == sorted(names)


CONSUMER_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"selector": "random"}, "selector.kind"),
    ({"selector": Selector("uniform", seed=-1)}, "selector.seed"),
    ({"max_deliveries": -1}, "max_deliveries"),
    ({"retain_steps": "all"}, "retain_steps"),
    ({"limiter": Limiter(min_size=-1)}, "limiter.min_size"),
    ({"staleness": Staleness(max_lag=0.5)}, "staleness.max_lag"),  # type: ignore[arg-type]
    ({"staleness": Staleness(on_stale="refuse")}, "staleness.on_stale"),  # type: ignore[arg-type]
]


def test_a_selector_may_be_its_kind_alone() -> None:
    consumer = ConsumerConfig("critic", selector="uniform")
    assert consumer == ConsumerConfig("critic", selector=Selector("uniform"))
    assert ConsumerConfig("critic").selector == Selector("fifo")
    config = BufferConfig("math", remover="lifo", consumers=(consumer,))
    assert config.remover == Selector("lifo")
    assert pickle.loads(pickle.dumps(config)) == config
    message = _config.config_to_message(config)
    assert message.remover.kind == config_pb2.SELECTOR_KIND_LIFO
    assert not message.remover.HasField("seed")
    assert message.consumers[0].selector.kind == config_pb2.SELECTOR_KIND_UNIFORM


def test_what_is_absent_from_a_consumer_is_the_default() -> None:
    message = config_pb2.BufferConfig(name="math")
    message.consumers.add(name="trainer").limiter.SetInParent()
    message.consumers[0].staleness.SetInParent()
    [consumer] = convert.value_of(BufferConfig, message).consumers or ()
    assert consumer == ConsumerConfig("trainer", limiter=Limiter(), staleness=Staleness())
    sent = _config.config_to_message(BufferConfig("math", consumers=(consumer,))).consumers[0]
    assert sent.HasField("limiter")
    assert not sent.limiter.HasField("min_diff")
    assert not sent.staleness.HasField("max_lag")
    [plain] = _config.config_to_message(
        BufferConfig("math", consumers=(ConsumerConfig("trainer"),))
    ).consumers
    assert (plain.HasField("limiter"), plain.HasField("staleness")) == (False, False)
    config = BufferConfig("math", retention=Retention(), advantage=AdvantageConfig())
    message = _config.config_to_message(config)
    assert (message.HasField("retention"), message.HasField("advantage")) == (True, True)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_by": "tasks"}, "group_by"),
        ({"group_size": -1}, "group_size"),
        ({"max_items": "many"}, "max_items"),
        ({"consumers": (ConsumerConfig("a", "batch"),)}, "consumers[0].unit"),  # type: ignore[arg-type]
        ({"on_missing_field": "drop"}, "on_missing_field"),
        ({"on_full": "drop"}, "on_full"),
        ({"on_future_version": "drop"}, "on_future_version"),
        ({"remover": "oldest"}, "remover.kind"),
        ({"remover": Selector("max", key="length")}, "remover.key"),  # type: ignore[arg-type]
        ({"remover": {"kind": "maximum"}}, "remover.kind"),
        ({"remover": {"kin": "max"}}, "remover"),
        ({"remover": 7}, "remover"),
        ({"name": 7}, "name"),
        ({"pacing": Pacing(consumer="a", max_staleness=-1, batch_size=1)}, "pacing.max_staleness"),
        *(
            ({"consumers": (ConsumerConfig("a", **bad),)}, f"consumers[0].{where}")
            for bad, where in CONSUMER_MISTAKES
        ),
        ({"advantage": AdvantageConfig(7)}, "advantage.estimator"),  # type: ignore[arg-type]
        *(
            ({"advantage": AdvantageConfig("x", bad)}, where)  # type: ignore[arg-type]
            for bad, where in (
                ({"a": object()}, "advantage.a"),
                ({"a": None}, "advantage.a"),
                ({"a": [1.0]}, "advantage.a"),
                ({"a": {"b": 1.0}}, "advantage.a"),
                ({"a": 10**400}, "advantage.a"),
                ({"a": "\ud800"}, "advantage.a"),
                ({3: 1.0}, "advantage.3"),
                (17, "advantage.parameters"),
            )
        ),
    ],
)
def test_bad_configuration_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field.split(".")[-1]) as caught:
        _config.config_to_message(BufferConfig(**{"name": "math"} | changes))
    assert caught.value.subject == field
