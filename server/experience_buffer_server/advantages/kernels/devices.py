"""Which implementation of the token stages computes on which device.

torch is loaded only where a device needs it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import KlTerm, TokenStages

from .cpu_tokens import CpuTokens, Precision

_TORCH_PREFIX = "torch:"


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


def warm_up(device: str, *, threads: int) -> str:
    """Check a device, and compile what a first launch would otherwise wait for some seconds.

    Args:
        device: As in `token_stages`, or `auto`: `cuda` where torch is installed and finds a GPU,
            else `cpu`.
        threads: As in `token_stages`.

    Returns:
        The device to compute on.

    Raises:
        ImportError: It is a torch device, and torch isn't installed.
        RuntimeError: torch knows no such device, or it can't be used.
    """
    device = _found() if device == "auto" else device
    for precision in _PRECISIONS:
        stages = token_stages(_SAMPLE, device=device, threads=threads, precision=precision)
        kl = KlTerm(coefficient=0.1, estimator="k3", clip=0.0)
        rewards = stages.rewards(_SAMPLE.rewards, kl)
        returns = stages.returns(rewards, gamma=0.9, mask_mode="skip")
        advantages, _ = stages.gae(rewards, gamma=0.9, lam=0.9, mask_mode="skip")
        advantages = stages.affine(advantages, shifts_B=_SAMPLE.rewards, scales_B=_SAMPLE.rewards)
        clipped, _ = stages.clip(advantages, 0.0)
        stages.sums(clipped)
        stages.square_sums(clipped, _SAMPLE.rewards)
        stages.teacher_gap(1.0)
        stages.fetch(stages.spread(_SAMPLE.rewards), None)
        stages.fetch(clipped, returns)
    return device


def _found() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")  # takes no time where there is no driver, unlike torch
    except OSError:
        return "cpu"
    try:
        import torch
    except ModuleNotFoundError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


_PRECISIONS: tuple[Precision, ...] = ("float32", "float64")
_COLUMN = np.array([0.5, 0.25], dtype=np.float32)
_SAMPLE = Batch(
    group_offsets=np.array([0, 1]),
    batches=np.zeros(1, dtype=np.int64),
    voters=np.zeros(1, dtype=np.int64),
    first_steps=np.zeros(1, dtype=np.int64),
    next_steps=np.full(1, -1),
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
