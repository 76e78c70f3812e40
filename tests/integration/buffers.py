"""Buffers for tests of the client: made in one line, and looked at."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from experience_buffer import BufferConfig, Client, ConsumerConfig
from experience_buffer.values import BufferStats, ConsumerStats

_OF_CONSUMERS = {field.name for field in fields(ConsumerConfig)}


def config(
    name: str, size: int = 0, *, others: tuple[ConsumerConfig, ...] = (), **options: Any
) -> BufferConfig:
    """A buffer of groups of `size` that a trainer takes as a whole; of single experiences for 0.

    Args:
        name: Its name.
        size: Members of a group.
        others: Consumers beside the trainer.
        options: Of the buffer and of the trainer; no two of them have one name.
    """
    mine = {key: options.pop(key) for key in _OF_CONSUMERS & options.keys()}
    trainer = ConsumerConfig("trainer", **({"unit": "group" if size else "item"} | mine))
    grouping = {"group_size": size} if size else {"group_by": "none"}
    return BufferConfig(name, **({"consumers": (trainer, *others)} | grouping | options))


def create(client: Client, name: str, size: int = 0, **options: Any) -> None:
    """Create the buffer that `config` describes."""
    client.create_buffer(config(name, size, **options))


def stats(client: Client, name: str) -> BufferStats:
    """A buffer's statistics."""
    return client.get_stats(name).buffers[0]


def trainer(client: Client, name: str) -> ConsumerStats:
    """Those of its first consumer."""
    return stats(client, name).consumers[0]


def states(client: Client, name: str) -> list[str]:
    """The state of every experience, oldest first."""
    return [one.state for one in client.list(buffer=name)]
