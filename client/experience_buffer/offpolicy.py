"""What a trainer needs when tokens come from older policies than the one it trains.

Three policies occur: the behaviour policy that sampled a token, the proximal policy that the update
starts from, and the current policy that is being optimised. Functions on tensors of one shape,
padded or packed; no gradient flows through a result. Nothing here talks to a server, and torch is
loaded by the first call only. All functions are thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from experience_buffer._arguments import check_number, check_whole, refused
from experience_buffer.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ProximalMethod", "proximal_logprobs", "second_moment_mask"]
__dir__ = __all__.copy

ProximalMethod: TypeAlias = Literal["loglinear", "linear", "rollout"]
"""How `proximal_logprobs` interpolates."""


def proximal_logprobs(
    behaviour_logprobs: Tensor,
    *,
    current_logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    method: ProximalMethod = "loglinear",
) -> Tensor:
    """Approximate log-probabilities under the policy one update before the current one.

    Saves the forward pass that decoupled PPO needs for them. With d = current_version - version
    and w = (d - 1) / d, the way from the token's version to current_version - 1:

    - `"loglinear"`: `(1 - w) * behaviour + w * current`, a geometric mean of probabilities.
    - `"linear"`: `log((1 - w) * exp(behaviour) + w * exp(current))`, an arithmetic one.
    - `"rollout"`: `behaviour`, as if the policy hadn't changed since the rollout.

    The behaviour's value stays as it is where nothing lies between (d = 1), where the token is
    as new as the current policy or newer (after a rollback), and where its version is unknown.
    There the current value isn't read, so garbage in masked slots does no harm.

    Args:
        behaviour_logprobs: An experience's `logprobs`, any shape and float dtype.
        current_logprobs: Of the same tokens under the current policy, same shape.
        versions: Policy version that sampled each token, same shape, an integer dtype;
            negative: unknown, or no sampled token.
        current_version: Version of the current policy, at least 0.
        method: "loglinear", "linear" or "rollout", as above.

    Returns:
        The same shape; float64 if either input is, else float32.

    Raises:
        InvalidRequestError: Shapes differ, versions aren't integers, the current version is negative or
            the method is unknown.

    Source: decoupled PPO, Hilton et al. 2021; AReaL `compute_prox_logp_approximations`.
    """
    import torch

    if method not in get_args(ProximalMethod):
        known = ", ".join(map(repr, get_args(ProximalMethod)))
        raise refused("method", method, f"one of {known}")
    check_whole("current_version", current_version)
    _check_shapes(behaviour_logprobs, current_logprobs=current_logprobs, versions=versions)
    if versions.is_floating_point() or versions.is_complex() or versions.dtype == torch.bool:
        raise refused("versions", versions.dtype, "a tensor of an integer dtype")
    # At least float32: differences of bfloat16 would lose all digits.
    dtype = torch.promote_types(behaviour_logprobs.dtype, current_logprobs.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    behaviour = behaviour_logprobs.detach().to(dtype)
    if method == "rollout":
        return behaviour
    current = current_logprobs.detach().to(dtype)
    # In 64 bits: a narrow unsigned or signed dtype would wrap around.
    distance = current_version - versions.to(torch.int64)
    is_between = (versions >= 0) & (distance > 1)
    steps = distance.clamp(min=1).to(dtype)
    if method == "loglinear":
        interpolated = behaviour + (current - behaviour) * ((steps - 1) / steps)
    else:
        # Summed in log space, where the probability of an unlikely token can't become 0.
        interpolated = torch.logaddexp(behaviour, current + (steps - 1).log()) - steps.log()
    return torch.where(is_between, interpolated, behaviour)


def second_moment_mask(
    behaviour_logprobs: Tensor, *, proximal_logprobs: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Mask the tokens that moved furthest, until the second moment of the rest is in bounds.

    A token's second moment is `(behaviour - proximal)**2`. The largest are masked, one after the
    other, until the mean over the kept tokens of the whole tensor is below the threshold; of equal
    ones the later goes first. A moment that is NaN or infinite counts as the largest.

    Where even the smallest moment isn't below the threshold, no token is kept. (AReaL keeps that
    one, and trains on a token that is out of bounds.)

    Args:
        behaviour_logprobs: An experience's `logprobs`, any shape and float dtype.
        proximal_logprobs: Of the same tokens, from a forward pass or approximated; same shape.
        mask: Non-zero where a token takes part, same shape, any dtype. Slots outside of it aren't
            read.
        threshold: Bound of the mean second moment, above 0.

    Returns:
        True where a token is kept, the same shape, bool. Of an all-zero mask: all False.

    Raises:
        InvalidRequestError: Shapes differ, or the threshold isn't above 0.

    Source: M2PO, Zheng et al. 2025 (arXiv:2510.01161); AReaL `_apply_m2po_masking`.
    """
    import torch

    check_number("threshold", threshold, is_open=True)
    _check_shapes(behaviour_logprobs, proximal_logprobs=proximal_logprobs, mask=mask)
    selected = mask != 0
    behaviour_N = behaviour_logprobs.detach()[selected].to(torch.float64)
    proximal_N = proximal_logprobs.detach()[selected].to(torch.float64)
    # Ascending, the mean of the first k never falls with k: those below are a prefix. NaN is last.
    moments_N, order_N = (behaviour_N - proximal_N).square().sort(stable=True)
    counts_N = torch.arange(1, len(moments_N) + 1, dtype=torch.float64, device=mask.device)
    is_below_N = moments_N.cumsum(0) / counts_N < threshold
    kept = torch.zeros_like(selected)
    kept[selected] = torch.empty_like(is_below_N).scatter_(0, order_N, is_below_N)
    return kept


def _check_shapes(behaviour_logprobs: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.shape != behaviour_logprobs.shape:
            raise InvalidRequestError(
                f"{name} has shape {list(other.shape)}, behaviour_logprobs "
                f"{list(behaviour_logprobs.shape)}; give one value per token",
                subject=name,
            )
