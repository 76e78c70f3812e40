"""A KL coefficient that follows a target: state of a trainer, set at the server when it changes."""

from __future__ import annotations

import math
from typing import Any, Final

from experience_buffer._arguments import as_number, as_whole, refused

__all__ = ["AdaptiveKLController"]
__dir__ = __all__.copy

_MAX_ERROR: Final = 0.2
"""Largest relative error that one update reacts to."""


class AdaptiveKLController:
    """Raises the KL coefficient where the policy strays too far, lowers it where it stays near.

    The server subtracts `kl_coef * KL` from the rewards of tokens. The trainer measures the KL of
    what it trained on and sets the next coefficient for groups that become whole from then on:

        controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
        ...
        kl_coef = controller.update(measured_kl, num_samples=256)
        parameters = {"gamma": 1.0, "kl_coef": kl_coef}
        client.update_buffer("ppo", advantage=AdvantageConfig("reinforce", parameters))

    An `AdvantageConfig` replaces the one before: name all parameters that aren't defaults. After a
    restart, begin with the coefficient that the buffer has. One thread at a time.

    Args:
        kl_coef: The coefficient to begin with, at least 0. From 0 it never changes.
        target: Wanted KL, above 0, in the unit of what is measured: per sequence or per token.
        horizon: Number of samples over which an error is corrected, above 0: the coefficient
            changes by at most a factor of `1 +- 0.2 * num_samples / horizon` per update.

    Raises:
        InvalidRequestError: An argument is out of bounds or not finite.

    Source: Ziegler et al. 2019 (arXiv:1909.08593); LightRFT `AdaptiveKLController`.
    """

    def __init__(self, kl_coef: float, *, target: float, horizon: float) -> None:
        self._kl_coef = _finite("kl_coef", kl_coef, "a finite number of at least 0")
        if self._kl_coef < 0:
            raise refused("kl_coef", kl_coef, "a finite number of at least 0")
        wanted = "a finite number above 0"
        self._target = _finite("target", target, wanted)
        self._horizon = _finite("horizon", horizon, wanted)
        for name, value in (("target", self._target), ("horizon", self._horizon)):
            if value <= 0:
                raise refused(name, value, wanted)

    def __repr__(self) -> str:
        numbers = f"target={self._target:g}, horizon={self._horizon:g}"
        return f"AdaptiveKLController({self._kl_coef:g}, {numbers})"

    @property
    def kl_coef(self) -> float:
        """The coefficient to use now."""
        return self._kl_coef

    def update(self, kl: float, *, num_samples: int) -> float:
        """Return the next coefficient.

        It is `kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)`.

        Args:
            kl: Mean KL measured over the samples. An estimate may be negative.
            num_samples: Experiences that were trained on since the last update; below
                5 * horizon, where the coefficient could become 0 or negative.

        Raises:
            InvalidRequestError: The KL isn't finite, which would spoil the coefficient for good, or the
                number of samples is out of bounds; the coefficient stays as it is.
        """
        kl = _finite(
            "kl", kl, "a finite number: leave tokens without log-probabilities out of the mean"
        )
        limit = self._horizon / _MAX_ERROR
        wanted = f"0 or more and less than {limit:g}, or a horizon above {self._horizon:g}"
        num_samples = as_whole(
            "num_samples", num_samples, least=0, most=math.ceil(limit) - 1, wanted=wanted
        )
        error = min(max(kl / self._target - 1, -_MAX_ERROR), _MAX_ERROR)
        self._kl_coef *= 1 + error * num_samples / self._horizon
        return self._kl_coef


def _finite(name: str, value: Any, wanted: str) -> float:
    number = as_number(name, value, wanted)
    if not math.isfinite(number):
        raise refused(name, value, wanted)
    return number
