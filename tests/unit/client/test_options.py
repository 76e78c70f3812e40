"""Settings given as in TOML, and what is said of those that can't be."""

from __future__ import annotations

import pickle
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from experience_buffer import Client, aio
from experience_buffer.consumer_options import (
    ConsumerConfig,
    Limiter,
    Pacing,
    Selector,
    Staleness,
)
from experience_buffer.errors import InvalidRequestError
from experience_buffer.leaving_options import Retention
from experience_buffer.options import (
    AdvantageConfig,
    BufferConfig,
    ClientOptions,
    RetryOptions,
    TlsOptions,
    WriterOptions,
)

FULL = BufferConfig(
    "math",
    group_size=8,
    advantage=AdvantageConfig("grpo", {"eps": 1e-4}),
    consumers=(
        ConsumerConfig("trainer", "group", selector=Selector("max", key="reward")),
        ConsumerConfig("critic", limiter=Limiter(min_size=3), staleness=Staleness(max_lag=4)),
    ),
    remover=Selector("lifo"),
    retention=Retention(max_lag=5),
    pacing=Pacing(consumer="trainer", max_staleness=2, batch_size=16),
)
TOML = """
name = "math"
group_size = 8
advantage = { estimator = "grpo", eps = 1e-4 }
remover = "lifo"
retention = { max_lag = 5 }
pacing = { consumer = "trainer", max_staleness = 2, batch_size = 16 }
consumers = [
    { name = "trainer", unit = "group", selector = { kind = "max", key = "reward" } },
    { name = "critic", limiter = { min_size = 3 }, staleness = { max_lag = 4 } },
]
"""


def test_a_table_of_toml_is_a_configuration() -> None:
    assert BufferConfig(**tomllib.loads(TOML)) == FULL
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_names_alone_stand_for_what_they_name() -> None:
    config = BufferConfig("math", advantage="grpo", consumers=["trainer", "critic"])
    assert config.advantage == AdvantageConfig("grpo")
    assert config.consumers == (ConsumerConfig("trainer"), ConsumerConfig("critic"))
    assert BufferConfig("math", consumers=("a",)).consumers == (ConsumerConfig("a"),)
    mixed = BufferConfig("math", consumers=["a", {"name": "b"}, ConsumerConfig("c")])
    assert [consumer.name for consumer in mixed.consumers or ()] == ["a", "b", "c"]


def test_options_may_be_tables_too() -> None:
    client = Client("host", options={"max_push_items": 7, "retry": {"max_attempts": 1}})
    assert client.options == ClientOptions(max_push_items=7, retry=RetryOptions(max_attempts=1))
    assert aio.AsyncClient("host", options={}).options == ClientOptions()


BAD: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: BufferConfig("a", consumers="trainer"), "consumers", 'such as ["trainer"]'),
    (lambda: BufferConfig("a", consumers=ConsumerConfig("b")), "consumers", "a list of names"),  # type: ignore[arg-type]
    (lambda: BufferConfig("a", consumers={"name": "b"}), "consumers", "a list of names"),  # type: ignore[arg-type]
    (lambda: BufferConfig("a", consumers=[]), "consumers", "at least one"),
    (lambda: BufferConfig("a", consumers=["b", 7]), "consumers[1]", "ConsumerConfig(...)"),  # type: ignore[list-item]
    (lambda: BufferConfig("a", consumers=[{"unit": "group"}]), "consumers[0]", "lacks 'name'"),
    (
        lambda: BufferConfig("a", consumers=[{"name": "b", "unitt": "group"}]),
        "consumers[0]",
        "no field 'unitt'; did you mean 'unit'?",
    ),
    (lambda: BufferConfig("a", advantage=7), "advantage", "its estimator as text"),  # type: ignore[arg-type]
    (
        lambda: BufferConfig("a", advantage={"estimator": "grpo", "parameters": {"eps": 1}}),
        "advantage",
        "{'estimator': 'grpo', 'eps': 1}",
    ),
    (lambda: BufferConfig("a", remover=7), "remover", "its kind as text"),  # type: ignore[arg-type]
    (lambda: BufferConfig("a", retention="5 days"), "retention", "a dict of its fields"),
    (lambda: BufferConfig("a", retention={"max_log": 5}), "retention", "did you mean 'max_lag'?"),
    (lambda: BufferConfig("a", pacing={"batch_size": 5}), "pacing", "lacks 'consumer'"),
    (lambda: ConsumerConfig("a", limiter=7), "limiter", "limiter is 7; give Limiter(...)"),  # type: ignore[arg-type]
    (lambda: ConsumerConfig("a", staleness=4), "staleness", "give Staleness(...)"),  # type: ignore[arg-type]
    (lambda: ConsumerConfig("a", selector=None), "selector", "selector is None"),  # type: ignore[arg-type]
    (lambda: ConsumerConfig("a", selector={"key": 1, "x": 2}), "selector", "kind, key, exponent"),
    (lambda: RetryOptions(multiplier=0.5), "multiplier", "at least 1"),
    (lambda: RetryOptions(multiplier="2"), "multiplier", "is '2'"),  # type: ignore[arg-type]
    (lambda: RetryOptions(max_attempts=1.5), "max_attempts", "a whole number"),  # type: ignore[arg-type]
    (lambda: RetryOptions(max_backoff_seconds=0), "max_backoff_seconds", "above 0"),
    (lambda: RetryOptions(reconnect_seconds=float("nan")), "reconnect_seconds", "is nan"),
    (lambda: WriterOptions(max_batch_items=0), "max_batch_items", "at least 1"),
    (lambda: WriterOptions(max_batch_bytes="8M"), "max_batch_bytes", "is '8M'"),  # type: ignore[arg-type]
    (lambda: WriterOptions(linger_seconds=-1), "linger_seconds", "at least 0"),
    (lambda: ClientOptions(max_push_items=True), "max_push_items", "is True"),
    (lambda: ClientOptions(max_message_bytes=1024), "max_message_bytes", "from 65536"),
    (lambda: ClientOptions(keepalive_seconds=None), "keepalive_seconds", "is None"),  # type: ignore[arg-type]
    (lambda: ClientOptions(retry=3), "retry", "give RetryOptions(...)"),  # type: ignore[arg-type]
    (lambda: TlsOptions(key_file="key.pem"), "certificate_file", "give both or neither"),
    (lambda: Client(7), "address", "'host:port' as text"),  # type: ignore[arg-type]
    (lambda: Client("a:b:c"), "address", "none of 'host'"),
    (lambda: Client("host", timeout=0), "timeout", "above 0"),
    (lambda: Client("host", timeout="1"), "timeout", "is '1'"),  # type: ignore[arg-type]
    (lambda: Client("host", token=1234), "token", "of type int"),  # type: ignore[arg-type]
    (lambda: Client("host", token="secret"), "token", "tls=TlsOptions()"),
    (lambda: Client("localhost", token="a b"), "token", "3 characters"),
    (lambda: Client("host", tls=True), "tls", "give TlsOptions(...)"),  # type: ignore[arg-type]
    (lambda: Client("host", options={"max_items": 3}), "options", "'max_push_items'?"),
    (lambda: Client("host").writer(options={"linger": 3}), "options", "'linger_seconds'?"),
    (lambda: Client("host").writer(options=3), "options", "give WriterOptions(...)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "subject", "words"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_named_with_what_can(
    make: Callable[[], Any], subject: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.subject == subject
    assert words in str(caught.value)
    assert "1234" not in str(caught.value)
    assert "secret" not in str(caught.value)
