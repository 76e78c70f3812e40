"""Reverb: a queue table, written by trajectory writers, read through a `TrajectoryDataset`.

Two modes, because Reverb has no groups. `items`: an experience is an item, whatever its lengths;
what keeps a group together is that it is flushed at once. `groups`: a group is an item of eight
steps, which Reverb moves faster, and which needs experiences of equal lengths, as these are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import json

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.workload import (
    METADATA_BYTES,
    POOL_GROUPS,
    TEXT_BYTES,
    Received,
    Rollout,
    Size,
    pool,
)

_MAX_ITEMS = 10**7
_WAIT_MILLISECONDS = 10_000


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run the server within this process, a table per mode."""
    del folder, variant
    tables = [
        reverb.Table.queue(mode, _MAX_ITEMS, signature=_signature(size, mode))
        for mode in ("items", "groups")
    ]
    server = reverb.Server(tables, port=None)
    try:
        yield f"localhost:{server.port}", {"server": os.getpid()}
    finally:
        server.stop()


def writer(address: str, size: Size, writer: int, mode: str) -> TrajectoryWriter:
    """Connect a writer; mode `items` or `groups`."""
    return TrajectoryWriter(address, size, writer, mode)


def reader(address: str, size: Size, mode: str) -> DatasetReader:
    """Connect a reader; mode `items` or `groups`."""
    return DatasetReader(address, size, mode)


def leave() -> None:
    """Nothing: each writer and reader has its own connection."""


def versions() -> Mapping[str, str]:
    """Of the packages that count."""
    return {name: version(name) for name in ("dm-reverb", "tensorflow-cpu")}


class TrajectoryWriter:
    """Appends a group's steps, makes its items, and waits until the server has them."""

    def __init__(self, address: str, size: Size, writer: int, mode: str) -> None:
        self._client = reverb.Client(address)
        self._size = size
        self._mode = mode
        self._writer = writer
        self._contents = pool(size)
        self._writing = self._client.trajectory_writer(num_keep_alive_refs=size.group_size)
        # One chunk per item: no item is then sent with parts of others.
        chunk = size.group_size if mode == "groups" else 1
        for name in _fields(size):
            self._writing.configure(
                (name,), num_keep_alive_refs=size.group_size, max_chunk_length=chunk
            )
        self.num_acked = 0

    def push(self, number: int) -> None:
        """Push one group."""
        group = self._contents[number % POOL_GROUPS]
        for run, rollout in enumerate(group):
            self._append(number, run, rollout)
        if self._mode == "groups":
            self._create(slice(-len(group), None))
        self._writing.flush()
        self.num_acked += len(group)

    def push_one(self, number: int) -> None:
        """Push one experience, in mode `groups` as a step of a group that goes when it is whole."""
        group, run = divmod(number, self._size.group_size)
        self._append(group, run, self._contents[group % POOL_GROUPS][run])
        self._writing.flush()

    def flush(self) -> None:
        """Nothing: every group was flushed."""

    def close(self) -> None:
        """Disconnect."""
        self._writing.close()

    def _append(self, number: int, run: int, rollout: Rollout) -> None:
        step = {
            "id": np.array((self._writer, number, run), np.int64),
            "tokens": rollout.tokens,
            "logprobs": rollout.logprobs,
            "mask": rollout.mask,
            "reward": np.float64(rollout.reward),
            "metadata": np.frombuffer(
                json.dumps(rollout.metadata, sort_keys=True).encode(), np.uint8
            ),
            "text": np.frombuffer(rollout.text.encode(), np.uint8),
        }
        if rollout.image is not None:
            step["image"] = rollout.image
        self._writing.append(step)
        if self._mode == "items":
            self._create(-1)

    def _create(self, steps: int | slice) -> None:
        history = self._writing.history
        trajectory = {name: history[name][steps] for name in _fields(self._size)}
        self._writing.create_item(self._mode, 1.0, trajectory)


class DatasetReader:
    """A dataset that reads ahead two to three batches, as its documentation recommends."""

    def __init__(self, address: str, size: Size, mode: str) -> None:
        self._size = size
        self._mode = mode
        self._client = reverb.Client(address)
        self._num_items = size.batch_groups if mode == "groups" else size.batch_size
        dataset = reverb.TrajectoryDataset.from_table_signature(
            address,
            mode,
            max_in_flight_samples_per_worker=3 * self._num_items,
            # A queue takes exactly one.
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=_WAIT_MILLISECONDS,
        )
        dataset = dataset.batch(self._num_items, drop_remainder=True).prefetch(2)
        self._batches = iter(())
        self._dataset = dataset

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups."""
        return self._mode == "groups"

    def sample(self) -> dict[str, Any]:
        """Take the dataset's next batch, as numpy arrays."""
        if not hasattr(self._batches, "_iterator"):
            self._batches = self._dataset.as_numpy_iterator()
        return dict(next(self._batches).data)

    def fetch(self) -> dict[str, Any]:
        """Take one batch by `Client.sample`, stacked."""
        found = list(self._client.sample(self._mode, self._num_items, emit_timesteps=False))
        return {
            name: np.stack([item.data[index] for item in found])
            for index, name in enumerate(sorted(_fields(self._size)))
        }

    def settle(self, batch: Any) -> None:
        """Nothing: what was taken is gone."""

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        rows = {
            name: array.reshape(self._size.batch_size, *_fields(self._size)[name][0])
            for name, array in batch.items()
        }
        return [_received(rows, index) for index in range(self._size.batch_size)]

    def close(self) -> None:
        """Let go of the dataset."""
        self._batches = iter(())


def _fields(size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each column."""
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        "id": ((3,), np.int64),
        "tokens": ((size.num_tokens,), np.int32),
        "logprobs": ((size.num_response_tokens,), np.float32),
        "mask": ((size.num_response_tokens,), np.bool_),
        "reward": ((), np.float64),
        "metadata": ((METADATA_BYTES,), np.uint8),
        "text": ((TEXT_BYTES,), np.uint8),
    }
    if size.image_bytes:
        fields["image"] = ((size.image_bytes,), np.uint8)
    return fields


def _signature(size: Size, mode: str) -> dict[str, Any]:
    lead = (size.group_size,) if mode == "groups" else ()
    return {
        name: tf.TensorSpec((*lead, *shape), tf.as_dtype(dtype))
        for name, (shape, dtype) in _fields(size).items()
    }


def _received(rows: Mapping[str, Any], index: int) -> Received:
    writer, number, run = rows["id"][index].tolist()
    rollout = Rollout(
        tokens=rows["tokens"][index],
        logprobs=rows["logprobs"][index],
        mask=rows["mask"][index],
        reward=float(rows["reward"][index]),
        metadata=json.loads(rows["metadata"][index].tobytes()),
        text=rows["text"][index].tobytes().decode(),
        image=rows["image"][index] if "image" in rows else None,
    )
    return Received(writer, number, run, rollout)
