"""Which implementation of the token stages computes on which device.

torch is loaded only where a device needs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import KlTerm, TokenStages

from . import cpu_kernels
from .cpu_tokens import CpuTokens, Precision

_TORCH_PREFIX = "torch:"
NEEDS_TORCH = "torch, which isn't installed here: pip install 'experience-buffer[gpu]'"
"""What to say where something needs it: the server comes without."""


def token_stages(batch: Batch, *, device: str, threads: int, precision: Precision) -> TokenStages:
    """Return the token stages of a batch on a device.

    Args:
        batch: The experiences.
        device: `cpu` for compiled loops on the CPU; otherwise a torch device such as `cuda:0`, or
            `torch:cpu` for torch on the CPU.
        threads: How many threads compiled loops may use, the calling one included.
        precision: What compiled loops keep between stages; torch always keeps float64.
    """
    if device == "cpu":
        return CpuTokens(batch, threads=threads, precision=precision)
    from .torch_tokens import TorchTokens

    return TorchTokens(batch, device=device.removeprefix(_TORCH_PREFIX))


class DeviceError(RuntimeError):
    """Nothing can be computed on the configured device; the message says why, and what to do."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.is_known = is_known
        """There may be such a device, at another time: only using it has failed."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where advantages are computed."""

    name: str
    """As `token_stages` takes it."""
    note: str = ""
    """What an operator may want to know of the choice; mostly nothing."""
    is_compiling: bool = False
    """Its loops aren't kept on this machine: launches may wait for some of them."""


def find_device(name: str, *, threads: int) -> Device:
    """Choose a device, and see that it computes.

    On the CPU it compiles, where that isn't kept, the one loop that most estimators need, in half a
    second; `warm_up` the others. A torch device has computed with every stage when this returns.

    Args:
        name: As in `token_stages`, or `auto`: `cuda` where torch is installed and finds a GPU, else
            `cpu`.
        threads: As in `token_stages`.

    Raises:
        DeviceError: It is a torch device, and torch isn't installed, knows no such device, or can't
            use it.
    """
    device = _chosen() if name == "auto" else Device(name)
    if device.name == "cpu":
        stages = token_stages(_SAMPLE, device="cpu", threads=threads, precision="float32")
        stages.fetch(stages.spread(_SAMPLE.rewards), None)
        return replace(device, is_compiling=not cpu_kernels.spread.stats.cache_hits)  # type: ignore[attr-defined]
    try:
        _use(device.name, threads=threads)
    except DeviceError as error:
        raise DeviceError(f"compute.device = {name!r} {error}", is_known=error.is_known) from error
    return device


def _use(device: str, *, threads: int) -> None:
    """See that a torch device computes.

    Raises:
        DeviceError: It doesn't.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise DeviceError(f"needs {NEEDS_TORCH}", is_known=False) from error
    own = device.removeprefix(_TORCH_PREFIX)
    is_known = False
    try:
        if torch.device(own).type == "cuda" and not torch.cuda.is_available():
            is_known = torch.version.cuda is not None
            raise RuntimeError(_no_gpu(torch.__version__))
        is_known = True
        warm_up(device, threads=threads)
    except (RuntimeError, AssertionError) as error:
        # An AssertionError: torch was built without what the device needs.
        what = str(error).strip().partition("\n")[0].rstrip(".")
        raise DeviceError(
            f"can't be used: {what}; set it to auto, cpu, or a device that torch finds here",
            is_known=is_known and isinstance(error, RuntimeError),
        ) from error


def warm_up(device: str, *, threads: int, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compile what launches on a device would otherwise wait for.

    Takes three seconds of CPU time on a CPU; a tenth of that where what was compiled is kept. May
    run in a thread of its own beside launches: these wait for the loop that is being compiled, and
    for those that they need themselves.

    Args:
        device: As in `token_stages`.
        threads: As in `token_stages`.
        stopped: Asked between loops whether to end.
    """
    for precision in _PRECISIONS:
        stages = token_stages(_SAMPLE, device=device, threads=threads, precision=precision)
        for _ in _every_stage(stages):
            if stopped():
                return


def _every_stage(stages: TokenStages) -> Iterator[None]:
    kl = KlTerm(coefficient=0.1, estimator="k3", clip=0.0)
    stages.fetch(stages.spread(_SAMPLE.rewards), None)
    yield
    rewards = stages.rewards(_SAMPLE.rewards, kl)
    yield
    returns = stages.returns(rewards, gamma=0.9, mask_mode="skip")
    yield
    advantages, _ = stages.gae(rewards, gamma=0.9, lam=0.9, mask_mode="skip")
    yield
    advantages = stages.affine(advantages, shifts_B=_SAMPLE.rewards, scales_B=_SAMPLE.rewards)
    yield
    clipped, _ = stages.clip(advantages, 0.0)
    yield
    stages.sums(clipped)
    yield
    stages.square_sums(clipped, _SAMPLE.rewards)
    yield
    stages.teacher_gap(1.0)
    yield
    stages.fetch(clipped, returns)


def _chosen() -> Device:
    try:
        ctypes.CDLL("libcuda.so.1")  # takes no time where there is no driver, unlike torch
    except OSError:
        return Device("cpu")
    has_driver = "this machine has an NVIDIA driver"
    try:
        import torch
    except ModuleNotFoundError:
        return Device("cpu", f"{has_driver}; a GPU needs {NEEDS_TORCH}")
    if torch.cuda.is_available():
        return Device("cuda")
    return Device("cpu", f"{has_driver}, but {_no_gpu(torch.__version__)}")


def _no_gpu(version: str) -> str:
    return f"torch {version} finds no GPU that it can use (is it a build for CPUs?)"


_PRECISIONS: tuple[Precision, ...] = ("float32", "float64")
_COLUMN = np.array([0.5, 0.25], dtype=np.float32)
_SAMPLE = Batch(
    group_offsets=np.array([0, 1]),
    batches=np.zeros(1, dtype=np.int64),
    voters=np.zeros(1, dtype=np.int64),
    first_steps=np.zeros(1, dtype=np.int64),
    next_steps=np.full(1, -1),
    places=np.zeros(1, dtype=np.int64),
    offsets=np.array([0, 2]),
    mask=np.ones(2, dtype=np.uint8),
    num_valid=np.array([2]),
    rewards=np.full(1, 0.5),
    has_token_rewards=np.ones(1, dtype=np.bool_),
    num_turns=np.ones(1, dtype=np.int64),
    baselines=np.zeros(1),
    states=("",),
    bootstraps=np.zeros(1),
    bootstrapped=np.zeros(1, dtype=np.bool_),
    columns=dict.fromkeys(
        ("token_level_reward", "values", "logprobs", "ref_logprobs", "teacher_logprobs"), _COLUMN
    ),
    problems={},
)  # fmt: skip
"""One experience with every column, in the dtype that columns mostly have."""
