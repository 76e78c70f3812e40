"""The operator's own estimators where they are computed: loaded and called.

Everything about them comes from the server's configuration (`custom.py`). Their code may do whatever
it likes, so here, and nowhere else, any exception is caught; `isolation.py` finds the groups that it
is to fail. Legend: B experiences, D tokens of all experiences.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, TokenStages
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.kernels.devices import NEEDS_TORCH
from experience_buffer_server.advantages.plan.custom import custom_spec
from experience_buffer_server.advantages.plan.parameters import RewardParameters
from experience_buffer_server.advantages.plan.specs import EstimatorSpec
from experience_buffer_server.advantages.stages.reward_shaping import (
    token_reward_sums,
    voting_rewards,
)
from experience_buffer_server.advantages.stages.votes import (
    votes_of_runs,
    zero_variance,
)

from .group_relative import record
from .registry import Estimator
from .token_returns import TokenAdvantages

Function = Callable[[Floats, Batch, Any], object]
"""An operator's function: from rewards, shape [B], to numbers of shape [B] or [D]."""

_MAX_REASON = 500
"""Most characters of an exception's text that are reported."""


class CustomLoadError(ValueError):
    """The configuration names a function that can't be used; the message names the key."""


class CustomEstimatorError(Exception):
    """An operator's function failed, or returned something else than was asked for."""


def load_estimators(
    declared: Mapping[str, Mapping[str, Any]],
) -> dict[str, tuple[EstimatorSpec, Estimator]]:
    """Import the functions that the configuration names.

    Args:
        declared: Per name, the values of its section: `path`, `computes`, `compares`, `needs` and
            `parameters`.

    Returns:
        What `advantages.compute` takes as `custom`.

    Raises:
        CustomLoadError: One can't be imported, or can't be called as it will be.
    """
    loaded = {}
    for name, section in declared.items():
        values = dict(section)
        function = _load(name, values.pop("path"))
        spec = custom_spec(name, **values)
        own = _Own(spec, function)
        if values["computes"] == "tokens":
            estimator = Estimator(scores=own.pass_rewards, tokens=own.tokens)
        else:
            estimator = Estimator(scores=own.scores)
        loaded[name] = (spec, estimator)
    return loaded


def _load(name: str, path: str) -> Function:
    key = f"estimators.{name}.path"
    module, _, attributes = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            target = getattr(target, attribute)
    except (Exception, SystemExit) as error:
        # A module may raise anything while it is imported.
        cure = "; its module must be installed, on PYTHONPATH or in the server's working directory"
        raise CustomLoadError(
            f"{key}: can't load {path!r}: {_describe(error)}{'' if _lacks_torch(error) else cure}"
        ) from error
    if not callable(target):
        raise CustomLoadError(
            f"{key}: {path!r} is of type {type(target).__name__}, which can't be called; name a "
            "function(rewards, batch, parameters)"
        )
    _check_signature(key, path, target)
    function: Function = target
    return function


def _check_signature(key: str, path: str, target: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:
        return  # Compiled functions need not tell theirs.
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise CustomLoadError(
            f"{key}: {path!r} takes {signature} ({error}); it is called with three positional "
            "arguments: (rewards, batch, parameters)"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Own:
    """An operator's function, in the forms in which the registry has estimators."""

    spec: EstimatorSpec
    function: Function

    def scores(
        self, rewards_B: Floats, batch: Batch, parameters: RewardParameters, details: GroupDetails
    ) -> Floats:
        """What takes the rewards' place, shape [B]; as `group_relative.Scores`."""
        scores_B = self._call(rewards_B, batch, parameters, shape=rewards_B.shape)
        bad = np.flatnonzero(~_fits(scores_B))
        if bad.size:
            raise self._not_finite(scores_B[bad[0]], int(bad[0]), batch)
        return self.pass_rewards(scores_B, batch, parameters, details)

    def pass_rewards(
        self, rewards_B: Floats, batch: Batch, parameters: RewardParameters, details: GroupDetails
    ) -> Floats:
        """Record what policies on groups read: votes, and whether all their rewards are equal."""
        if self.spec.compares != "group":
            return rewards_B
        raw_B = voting_rewards(batch, parameters)
        if batch.has_token_rewards.any():
            raw_B = raw_B + token_reward_sums(batch)
        votes = votes_of_runs(batch, parameters).votes(raw_B)
        record(details, votes=votes.sizes, singleton=votes.sizes == 1)
        if any("reward" in need.split("|") for need in self.spec.needs):
            record(details, zero_variance=zero_variance(votes))
        return rewards_B

    def tokens(
        self, stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: RewardParameters
    ) -> TokenAdvantages:
        """Advantages of all tokens, which are their returns too; as `registry.TokenStep`."""
        values_D = self._call(rewards_B, batch, parameters, shape=batch.mask.shape)
        bad = np.flatnonzero(~_fits(values_D) & (batch.mask != 0))
        if bad.size:
            experience = int(np.searchsorted(batch.offsets, bad[0], side="right")) - 1
            raise self._not_finite(values_D[bad[0]], experience, batch)
        tokens = stages.from_host(values_D)
        return TokenAdvantages(advantages=tokens, returns=tokens)

    def _call(
        self, rewards_B: Floats, batch: Batch, parameters: Any, *, shape: tuple[int, ...]
    ) -> Floats:
        """Call the function; its numbers as an array of ours, without -0.0."""
        start = f"estimator {self.spec.name!r}"
        try:
            result = np.asarray(self.function(_frozen(rewards_B), _frozen_batch(batch), parameters))
        except Exception as error:
            # An operator's code may raise anything; it must not take the worker down.
            raise CustomEstimatorError(f"{start}: {_describe(error)}") from error
        if result.shape != shape:
            per = "experience" if shape == rewards_B.shape else "token"
            raise CustomEstimatorError(
                f"{start} returned an array of shape {result.shape}; one number per {per} is "
                f"expected, shape {shape}"
            )
        if result.dtype.kind not in "iuf":
            raise CustomEstimatorError(
                f"{start} returned an array of {result.dtype}; return real numbers, such as float64"
            )
        return result.astype(np.float64) + 0.0

    def _not_finite(self, value: float, experience: int, batch: Batch) -> CustomEstimatorError:
        group = int(np.searchsorted(batch.group_offsets, experience, side="right")) - 1
        return CustomEstimatorError(
            f"estimator {self.spec.name!r} returned {value} for experience "
            f"{experience - int(batch.group_offsets[group])} of the group; return numbers that are "
            "finite in float32"
        )


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _frozen_batch(batch: Batch) -> Batch:
    """The batch in read-only views: what other stages read must not change under them."""
    values = {known.name: getattr(batch, known.name) for known in dataclasses.fields(batch)}
    views: dict[str, Any] = {
        name: _frozen(value) for name, value in values.items() if isinstance(value, np.ndarray)
    }
    columns = {name: _frozen(column) for name, column in batch.columns.items()}
    return dataclasses.replace(batch, columns=columns, problems={}, **views)


def _fits(numbers: Floats) -> NDArray[np.bool_]:
    """Which numbers are finite in float32; sums of others might overflow even in float64."""
    fits: NDArray[np.bool_] = np.abs(numbers) <= np.finfo(np.float32).max
    return fits


def _lacks_torch(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def _describe(error: BaseException) -> str:
    """An exception in one line: its type, its text, and where it was raised."""
    try:
        text = f"it needs {NEEDS_TORCH}" if _lacks_torch(error) else str(error)
    except Exception:  # The estimator's own code: its exception may have no text that can be made.
        text = ""
    text = text.encode("utf-8", "backslashreplace").decode()
    text = " ".join(text.split())[:_MAX_REASON]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    if not frames or frames[-1].filename == importlib.__file__:
        return what
    last = frames[-1]
    return f"{what} (line {last.lineno} of {Path(last.filename).name})"
