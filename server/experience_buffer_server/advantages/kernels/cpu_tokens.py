"""The arithmetic over tokens on the CPU: compiled loops, rows dealt over threads.

Recursions and sums accumulate in float64. Legend: B experiences, D tokens of all experiences one
after another, masked ones included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints, KlTerm, Tokens

from . import cpu_kernels as kernels
from .spread import Placed, Spread, is_identity

Precision = Literal["float32", "float64"]

_Array = NDArray[Any]
_Out = TypeVar("_Out", bound="_Array | tuple[_Array, ...]")
_KL_ESTIMATORS = {"k1": 1, "k2": 2, "k3": 3}
_MIN_TOKENS_TO_SHARE = 131_072
"""Fewer tokens are done before a second thread has woken up."""
_PARTS_PER_THREAD = 4
"""More even out threads that are held up; each costs some microseconds."""
_NOTHING = np.empty(0)

_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def _pool(num_helpers: int) -> ThreadPoolExecutor:
    with _pools_lock:
        if num_helpers not in _pools:
            _pools[num_helpers] = ThreadPoolExecutor(num_helpers, thread_name_prefix="tokens")
        return _pools[num_helpers]


class CpuTokens:
    """`TokenStages` on the CPU. Not thread-safe.

    Tokens are `Spread`, `Placed`, or arrays of shape [D] that are exactly +0.0 in masked slots.
    """

    def __init__(self, batch: Batch, *, threads: int, precision: Precision) -> None:
        """Prepare for one batch.

        Args:
            batch: The experiences.
            threads: How many threads work on a large batch, the calling one included.
            precision: In which precision results are kept between stages. Float32 where nothing
                but `fetch` follows a recursion; each stage after that would add its own rounding.
        """
        self._batch = batch
        self._threads = threads
        self._dtype = np.dtype(precision)
        self._mask = _frozen(batch.mask)
        self._offsets = _frozen(batch.offsets)
        self._num_valid = _frozen(batch.num_valid)
        self._parts = [_frozen(part) for part in deal(batch.offsets, threads=threads)]

    def spread(self, scores_B: Floats) -> Tokens:
        """See `TokenStages`."""
        return Spread(scores_B)

    def from_host(self, values_D: Floats) -> Tokens:
        """See `TokenStages`."""
        return self._run(kernels.copy, self._mask, values_D, out=self._empty())

    def rewards(self, rewards_B: Floats, kl: KlTerm | None) -> Tokens:
        """See `TokenStages`."""
        token_rewards = self._batch.columns.get("token_level_reward")
        if token_rewards is None and kl is None:
            return Placed(rewards_B)
        placed = np.zeros(len(self._mask))
        if token_rewards is not None:
            self._copy_token_rewards(_frozen(token_rewards), placed)
        if kl is not None:
            logprobs, references = self._pair("logprobs", "ref_logprobs")
            kind = _KL_ESTIMATORS[kl.estimator]
            self._run(
                kernels.subtract_kl, self._mask, logprobs, references, kl.coefficient, kind, kl.clip,
                out=placed,
            )  # fmt: skip
        return self._run(kernels.add_at_last, self._mask, rewards_B, out=placed)

    def returns(self, rewards: Tokens, *, gamma: float, mask_mode: str) -> Tokens:
        """See `TokenStages`."""
        if isinstance(rewards, Placed) and gamma == 1.0:
            return Spread(rewards.rewards_B)
        scalars_B, placed = self._reward_parts(rewards)
        return self._run(
            kernels.returns, self._mask, scalars_B, placed, gamma, mask_mode == "count",
            out=self._empty(),
        )  # fmt: skip

    def gae(
        self, rewards: Tokens, *, gamma: float, lam: float, mask_mode: str
    ) -> tuple[Tokens, Tokens]:
        """See `TokenStages`."""
        scalars_B, placed = self._reward_parts(rewards)
        values, bootstraps_B = self._batch.columns["values"], self._batch.bootstraps
        advantages, returns = self._empty(), self._empty()
        self._run(
            kernels.gae, self._mask, values, bootstraps_B, scalars_B, placed, gamma, gamma * lam,
            mask_mode == "count", out=(advantages, returns),
        )  # fmt: skip
        return advantages, returns

    def teacher_gap(self, coefficient: float) -> Tokens:
        """See `TokenStages`."""
        teacher, student = self._pair("teacher_logprobs", "logprobs")
        return self._run(
            kernels.scaled_gap, self._mask, teacher, student, coefficient, out=self._empty()
        )

    def affine(self, tokens: Tokens, *, shifts_B: Floats, scales_B: Floats) -> Tokens:
        """See `TokenStages`."""
        if is_identity(shifts_B=shifts_B, scales_B=scales_B):
            return tokens
        if isinstance(tokens, Spread):
            return tokens.affine(shifts_B=shifts_B, scales_B=scales_B)
        values = self._array(tokens)
        return self._run(kernels.affine, self._mask, values, shifts_B, scales_B, out=self._empty())

    def clip(self, tokens: Tokens, bound: float) -> tuple[Tokens, Ints]:
        """See `TokenStages`."""
        if isinstance(tokens, Spread):
            return tokens.clip(bound, num_valid=self._batch.num_valid)
        outside_B = np.empty(len(self._num_valid), dtype=np.int64)
        values = self._array(tokens)
        if not self._run(kernels.count_outside, values, bound, out=outside_B).any():
            return tokens, outside_B
        return self._run(kernels.clip, values, bound, out=self._empty()), outside_B

    def sums(self, tokens: Tokens) -> Floats:
        """See `TokenStages`."""
        if isinstance(tokens, Spread):
            return tokens.sums(num_valid=self._batch.num_valid)
        return self._run(kernels.sums, self._array(tokens), out=np.empty(len(self._num_valid)))

    def square_sums(self, tokens: Tokens, centres_B: Floats) -> Floats:
        """See `TokenStages`."""
        if isinstance(tokens, Spread):
            return tokens.square_sums(centres_B, num_valid=self._batch.num_valid)
        sums_B = np.empty(len(self._num_valid))
        return self._run(
            kernels.square_sums, self._mask, self._array(tokens), centres_B, out=sums_B
        )

    def fetch(self, tokens: Tokens, others: Tokens | None) -> tuple[NDArray[np.float32], ...]:
        """See `TokenStages`."""
        first = self._dense(tokens, np.dtype(np.float32))
        if others is None:
            return (first,)
        return first, first if others is tokens else self._dense(others, np.dtype(np.float32))

    def exact(self, tokens: Tokens) -> Floats:
        """See `TokenStages`."""
        result: Floats = self._dense(tokens, np.dtype(np.float64))
        return result

    def _dense(self, tokens: Tokens, dtype: np.dtype[Any]) -> _Array:
        """Shape [D] in the given dtype; the argument itself where it is that."""
        if isinstance(tokens, Spread):
            return self._fill(tokens, dtype)
        if isinstance(tokens, np.ndarray) and tokens.dtype == dtype:
            return tokens
        result = np.empty(len(self._mask), dtype=dtype)
        return self._run(kernels.copy, self._mask, self._array(tokens), out=result)

    def _fill(self, tokens: Spread, dtype: np.dtype[Any]) -> _Array:
        result = np.empty(len(self._mask), dtype=dtype)
        return self._run(kernels.spread, self._mask, self._num_valid, tokens.scores_B, out=result)

    def _array(self, tokens: Tokens) -> _Array:
        """Any tokens as an array."""
        if isinstance(tokens, Spread):
            return self._fill(tokens, self._dtype)
        if isinstance(tokens, Placed):
            placed = np.zeros(len(self._mask), dtype=self._dtype)
            return self._run(kernels.add_at_last, self._mask, tokens.rewards_B, out=placed)
        array: _Array = tokens
        return array

    def _reward_parts(self, rewards: Tokens) -> tuple[_Array, _Array]:
        """What a recursion takes: scalars of shape [B], and an array that is empty or [D]."""
        if isinstance(rewards, Placed):
            return rewards.rewards_B, _NOTHING
        placed = self._array(rewards).astype(np.float64, copy=False)
        return np.zeros(len(self._num_valid)), placed

    def _copy_token_rewards(self, token_rewards: _Array, out: Floats) -> None:
        has_B = self._batch.has_token_rewards
        for part in self._parts:
            rows = _frozen(part[has_B[part]])
            kernels.copy(rows, self._offsets, self._mask, token_rewards, out)

    def _pair(self, first: str, second: str) -> tuple[_Array, _Array]:
        """Two columns in one dtype, so that fewer combinations are compiled."""
        columns = self._batch.columns[first], self._batch.columns[second]
        dtype = np.result_type(*columns)
        with np.errstate(invalid="ignore"):  # masked slots may hold a signalling NaN
            return columns[0].astype(dtype, copy=False), columns[1].astype(dtype, copy=False)

    def _empty(self) -> _Array:
        return np.empty(len(self._mask), dtype=self._dtype)

    def _run(self, kernel: Callable[..., None], *inputs: object, out: _Out) -> _Out:
        """Run a kernel on all parts, here and on helpers, each taking the next part when free.

        Where the machine is busy, helpers come late or not at all; nobody waits for one that
        hasn't begun.

        Returns:
            `out`, which the kernel writes to.
        """
        given = [_frozen(each) if isinstance(each, np.ndarray) else each for each in inputs]
        outputs = out if isinstance(out, tuple) else (out,)
        parts = iter(self._parts)  # taking from it is atomic

        def work() -> None:
            for part in parts:
                kernel(part, self._offsets, *given, *outputs)

        num_helpers = min(self._threads, len(self._parts)) - 1
        if num_helpers <= 0:
            work()
            return out
        helpers = [_pool(num_helpers).submit(work) for _ in range(num_helpers)]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        return out


def deal(offsets: Ints, *, threads: int) -> list[Ints]:
    """Cut a batch into parts for threads to take, the one with most tokens first.

    Args:
        offsets: Row b holds tokens `offsets[b]` to `offsets[b + 1]`, shape [B + 1].
        threads: How many threads there are.

    Returns:
        Rows of each part, neighbours; no part without rows. One part where sharing doesn't pay.
    """
    num_rows, num_tokens = len(offsets) - 1, int(offsets[-1])
    if num_rows == 0:
        return []
    if threads == 1 or num_tokens < _MIN_TOKENS_TO_SHARE:
        return [np.arange(num_rows)]
    num_parts = threads * _PARTS_PER_THREAD
    cuts = np.searchsorted(offsets, num_tokens * np.arange(1, num_parts) / num_parts)
    parts = [part for part in np.split(np.arange(num_rows), cuts) if len(part)]
    return sorted(parts, key=lambda part: offsets[part[0]] - offsets[part[-1] + 1])


def _frozen(array: _Array) -> _Array:
    """A read-only view: to the compiler, writable arrays and others are of different types.

    Compiled loops take it for granted that elements are aligned.
    """
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view
