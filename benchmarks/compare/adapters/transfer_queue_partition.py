"""TransferQueue: one partition, a put per group, batches by `get_meta` and `get_data`.

Columns are tensors with a row per experience; what isn't a number travels as bytes in a tensor,
its fastest way. What was read is cleared, as a consumer does before its partition grows. Its Ray
cluster is its own: one that runs on the machine, or was left there, is neither joined nor disturbed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Nothing is reported to anyone, no token is left on disk, and everything stays on loopback, where
# Ray otherwise takes the machine's own address.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.workload import POOL_GROUPS, Received, Rollout, Size, pool

_PARTITION = "train_0"
_TASK = "train"
_MANY_GROUPS = 8


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run a local Ray cluster with the controller and two storage units, its defaults."""
    del folder, size, variant
    _forget_others()
    # Not in the benchmark's folder: the path of a Unix socket has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        # Without an address it would join the cluster that /tmp/ray names, and refuse `num_cpus`.
        context = ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            _temp_dir=own,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        try:
            tq.init()
            yield context.address_info["gcs_address"], {}
        finally:
            tq.close()
            ray.shutdown()


def writer(address: str, size: Size, writer: int, mode: str) -> PartitionWriter:
    """Connect a writer; mode `group`, a put per group, or `many`, a put per eight groups."""
    return PartitionWriter(address, size, writer, _MANY_GROUPS if mode == "many" else 1)


def reader(address: str, size: Size, mode: str) -> PartitionReader:
    """Connect a reader; there is one mode."""
    del mode
    return PartitionReader(address, size)


def leave() -> None:
    """Leave the cluster."""
    if ray.is_initialized():
        tq.interface._TQ_CLIENT.close()
        tq.interface._TQ_CLIENT = None
        tq.interface._TQ_CONTROLLER = None
        ray.shutdown()


def versions() -> Mapping[str, str]:
    """Of the packages that count."""
    return {name: version(name).split("+")[0] for name in ("TransferQueue", "ray", "torch")}


class PartitionWriter:
    """Puts that return when the storage units have them."""

    def __init__(self, address: str, size: Size, writer: int, num_groups: int) -> None:
        self._client = _connect(address)
        self._size = size
        self._writer = writer
        self._contents = pool(size)
        self._num_groups = num_groups
        self._waiting: list[tuple[int, int, Rollout]] = []
        self.num_acked = 0

    def push(self, number: int) -> None:
        """Put one group, or note it until there are enough."""
        group = self._contents[number % POOL_GROUPS]
        self._waiting += [(number, run, rollout) for run, rollout in enumerate(group)]
        if len(self._waiting) == self._num_groups * self._size.group_size:
            self.flush()

    def push_one(self, number: int) -> None:
        """Put one experience."""
        group, run = divmod(number, self._size.group_size)
        self._put([(group, run, self._contents[group % POOL_GROUPS][run])])

    def flush(self) -> None:
        """Put what waits."""
        if self._waiting:
            self._put(self._waiting)
            self.num_acked += len(self._waiting)
            self._waiting = []

    def close(self) -> None:
        """Nothing: the process stays in the cluster, since joining takes seconds."""

    def _put(self, rows: Sequence[tuple[int, int, Rollout]]) -> None:
        rollouts = [rollout for _, _, rollout in rows]
        ids = [(self._writer, number, run) for number, run, _ in rows]
        columns = {
            "id": torch.tensor(ids),
            "tokens": _stack([rollout.tokens for rollout in rollouts]),
            "logprobs": _stack([rollout.logprobs for rollout in rollouts]),
            "mask": _stack([rollout.mask for rollout in rollouts]),
            "reward": torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
            "metadata": _stack(
                [
                    _bytes(json.dumps(rollout.metadata, sort_keys=True).encode())
                    for rollout in rollouts
                ]
            ),
            "text": _stack([_bytes(rollout.text.encode()) for rollout in rollouts]),
        }
        if rollouts[0].image is not None:
            columns["image"] = _stack([rollout.image for rollout in rollouts])
        data = TensorDict(columns, batch_size=len(rows))
        self._client.put(data=data, partition_id=_PARTITION)


class PartitionReader:
    """Takes what its task hasn't had yet, in order."""

    def __init__(self, address: str, size: Size) -> None:
        self._client = _connect(address)
        self._size = size
        self._fields = ["id", "tokens", "logprobs", "mask", "reward", "metadata", "text"]
        self._fields += ["image"] if size.image_bytes else []

    @property
    def keeps_groups(self) -> bool:
        """It doesn't say so: its default sampler takes what is ready in order."""
        return False

    def sample(self) -> Any:
        """Take one batch."""
        meta = self._client.get_meta(
            data_fields=self._fields,
            batch_size=self._size.batch_size,
            partition_id=_PARTITION,
            mode="fetch",
            task_name=_TASK,
        )
        data = self._client.get_data(meta)
        self._client.clear_samples(meta)
        return data

    def fetch(self) -> Any:
        """Take one batch."""
        return self.sample()

    def settle(self, batch: Any) -> None:
        """Nothing: what was taken is cleared."""

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        return [_received(batch[index]) for index in range(self._size.batch_size)]

    def close(self) -> None:
        """Nothing: the process stays in the cluster, since joining takes seconds."""


def _connect(address: str) -> Any:
    torch.set_num_threads(1)
    if not ray.is_initialized():
        _forget_others()
        ray.init(address=address, _node_ip_address="127.0.0.1", log_to_driver=False)
        tq.init()
    return tq.get_client()


def _forget_others() -> None:
    """Drop what the environment says of another cluster."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_TMPDIR"):
        os.environ.pop(name, None)


def _stack(arrays: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def _bytes(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def _received(row: Any) -> Received:
    writer, number, run = row["id"].tolist()
    rollout = Rollout(
        tokens=row["tokens"].numpy(),
        logprobs=row["logprobs"].numpy(),
        mask=row["mask"].numpy(),
        reward=float(row["reward"]),
        metadata=json.loads(row["metadata"].numpy().tobytes()),
        text=row["text"].numpy().tobytes().decode(),
        image=row["image"].numpy() if "image" in row.keys() else None,  # noqa: SIM118
    )
    return Received(writer, number, run, rollout)
