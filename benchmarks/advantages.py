"""`python -m benchmarks.advantages`: advantages against plain loops, and against the clock.

The loops and ours take turns within one run. `kernel` starts from arrays in memory and ends with
float32 arrays; `bytes` starts from raw bytes and ends with bytes, through the public function.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import advantage_loops as loops
from benchmarks.advantage_devices import launches
from benchmarks.advantage_loops import GAMMA, LAM, Padded, Sequences, distance
from experience_buffer_server.advantages import Column, ExperienceInput, GroupResult, compute, plan
from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Tokens, TokenStages
from experience_buffer_server.advantages.kernels.devices import token_stages, warm_up
from experience_buffer_server.advantages.packing import pack

_MAX_ERROR, _MAX_DIFFERENCE = 1e-6, 1e-5
_VALID = 0.37
_PARAMETERS: dict[str, float | str] = {"gamma": GAMMA, "lam": LAM, "mask_mode": "count"}
_GROUP_SECONDS = 1.0
_GROUP_ESTIMATORS = ("grpo", "rloo", "dr_grpo", "opmd", "asymre", "reinforce_baseline")

Dense = NDArray[np.float32]

_REST_SECONDS = 0.25
_RUNS_PER_TURN = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison with a loop."""

    name: str
    sequences: Sequences
    is_padded: bool
    target: float
    """How many times faster than the loop."""


def main() -> int:
    """Run everything and print tables; 1 if anything is less exact than it has to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "",
        help="torch device that is compared with the CPU; cuda where there is one",
    )  # fmt: skip
    options = parser.parse_args()
    print(_machine(options.threads))
    started = time.perf_counter()
    warm_up("cpu", threads=options.threads)
    print(f"compiled in {time.perf_counter() - started:.1f} s")
    cases = _cases()
    exact = [_gae_on_cpu(cases, options.threads, options.runs), _groups(options.threads)]
    if options.device:
        exact.append(_gae_on_device(cases, options.device, options.runs))
        exact.append(launches(_own(options.device), options.threads) <= _MAX_DIFFERENCE)
    else:
        print("\nGPU: none found, nothing measured")
    return 0 if all(exact) else 1


def _cases() -> list[Case]:
    return [
        Case("(512, 8192)", loops.padded_equivalent(512, 8192, valid=_VALID), True, 60.0),
        Case("(64, 4096)", loops.padded_equivalent(64, 4096, valid=_VALID), True, 100.0),
        Case("64 ragged, 100,000", loops.uneven(64, 100_000), False, 1000.0),
    ]


def _gae_on_cpu(cases: Sequence[Case], threads: int, runs: int) -> bool:
    print(
        "\nGAE on the CPU, ms, medians (the loop over single tokens: once). Targets are the "
        "kernel's, over\na packed batch; `bytes` adds checks, packing and cutting: a launch as the "
        "server does it."
    )
    print(
        f"{'case':20}{'valid':>10}{'loop':>10}{'kernel':>9}{'ratio':>8}{'bytes':>9}{'ratio':>8}"
        f"{'target':>8}  {'error':>8}"
    )
    exact = True
    for case in cases:
        batch, groups = _packed(case.sequences), case.sequences.experiences()

        def kernel(batch: Batch = batch) -> tuple[Dense, ...]:
            return _kernel(batch, "cpu", threads)

        def through_bytes(groups: list[list[ExperienceInput]] = groups) -> object:
            return compute(groups, estimator="gae", parameters=_PARAMETERS, threads=threads)

        through_bytes()
        loop, own, whole = _interleaved([_loop(case, "cpu"), kernel, through_bytes], runs, case)
        error = _error(case, kernel())
        exact &= error <= _MAX_ERROR
        print(
            f"{case.name:20}{batch.num_valid.sum():10,}{loop:10.2f}{own:9.3f}{loop / own:8,.0f}"
            f"{whole:9.3f}{loop / whole:8,.0f}{case.target:8,.0f}  {error:8.1e}  "
            f"{_verdict(loop / own >= case.target)}, error {_verdict(error <= _MAX_ERROR)}",
            flush=True,
        )
    return exact


def _gae_on_device(cases: Sequence[Case], device: str, runs: int) -> bool:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    warm_up(_own(device), threads=1)
    print(f"\nGAE on {name}, ms, median of {runs}; aims: 1,000 times alone, 100 with transfers")
    print(
        f"{'case':20}{'loop':>10}{'alone':>9}{'ratio':>8}{'moved':>9}{'ratio':>8}  difference to CPU"
    )
    agree = True
    for case in cases:
        batch = _packed(case.sequences)
        stages = token_stages(batch, device=_own(device), threads=1, precision="float32")
        rewards = stages.rewards(batch.rewards, None)

        def alone(stages: TokenStages = stages, rewards: Tokens = rewards) -> None:
            stages.gae(rewards, gamma=GAMMA, lam=LAM, mask_mode="count")
            _wait(device)

        def moved(batch: Batch = batch) -> tuple[Dense, ...]:
            return _kernel(batch, _own(device), 1)

        alone()
        loop, own, whole = _interleaved([_loop(case, device), alone, moved], runs, case)
        pairs = zip(moved(), _kernel(batch, "cpu", 1), strict=True)
        difference = max(distance(found, expected) for found, expected in pairs)
        agree &= difference <= _MAX_DIFFERENCE
        print(
            f"{case.name:20}{loop:10.2f}{own:9.3f}{loop / own:8,.0f}{whole:9.3f}{loop / whole:8,.0f}"
            f"  {difference:8.1e}  alone {_verdict(loop / own >= 1000)}, "
            f"moved {_verdict(loop / whole >= 100)}, "
            f"agreement {_verdict(difference <= _MAX_DIFFERENCE)}",
            flush=True,
        )
    return agree


def _groups(threads: int) -> bool:
    """Group estimators from bytes to bytes."""
    num_groups, size, num_tokens = 8192, 8, 1024
    rewards = np.random.default_rng(3).integers(0, 5, size=(num_groups, size)) / 4
    groups = [
        [
            ExperienceInput(
                reward=reward, mask=Column("BOOL", bytes(bytearray(b"\1") * num_tokens))
            )
            for reward in own
        ]
        for own in rewards.tolist()
    ]
    print(
        f"\nGroup estimators, bytes to bytes: {num_groups * size:,} experiences in "
        f"{num_groups:,} groups, {num_tokens:,} tokens each; s, target {_GROUP_SECONDS:.0f}"
    )
    print(f"{'estimator':20}{'first':>8}{'median':>8}  {'error':>8}")
    exact = True
    for estimator in _GROUP_ESTIMATORS:
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            outcomes = compute(groups, estimator=estimator, parameters={}, threads=threads)
            seconds.append(time.perf_counter() - started)
            error = _group_error(estimator, outcomes, rewards)
            del outcomes
        median = statistics.median(seconds[1:])
        exact &= error <= _MAX_ERROR
        print(
            f"{estimator:20}{seconds[0]:8.3f}{median:8.3f}  {error:8.1e}  "
            f"{_verdict(median < _GROUP_SECONDS)}, error {_verdict(error <= _MAX_ERROR)}",
            flush=True,
        )
    return exact


def _group_error(estimator: str, outcomes: Sequence[object], rewards: NDArray[np.float64]) -> float:
    """Largest error of any experience's first token, by NumPy's own mean and deviation."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    size = rewards.shape[1]
    expected = {
        "grpo": centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6),
        "rloo": centred * size / (size - 1),
        "asymre": centred + 0.1,
        # Every experience has as many tokens: normalising over tokens is normalising over them.
        "reinforce_baseline": (whitened := centred / (centred.std(ddof=1) + 1e-8)) / whitened.std(),
    }.get(estimator, centred)
    found = [
        memoryview(item.advantages).cast("B")[:4]
        for outcome in outcomes
        if isinstance(outcome, GroupResult)
        for item in outcome.items
    ]
    return distance(np.frombuffer(b"".join(found), dtype="<f4"), expected.reshape(-1))


def _packed(sequences: Sequences) -> Batch:
    return pack(sequences.experiences(), plan("gae", _PARAMETERS), batches=None)


def _kernel(batch: Batch, device: str, threads: int) -> tuple[Dense, ...]:
    stages = token_stages(batch, device=device, threads=threads, precision="float32")
    rewards = stages.rewards(batch.rewards, None)
    return stages.fetch(*stages.gae(rewards, gamma=GAMMA, lam=LAM, mask_mode="count"))


def _loop(case: Case, device: str) -> Callable[[], object]:
    if not case.is_padded:

        def by_token() -> None:
            loops.token_loop(case.sequences, dtype=torch.float32, device=device)
            _wait(device)

        return by_token
    padded = Padded.of(case.sequences, dtype=torch.float32, device=device)

    def by_step() -> None:
        loops.padded_loop(padded)
        _wait(device)

    return by_step


def _error(case: Case, found: Sequence[Dense]) -> float:
    """Largest error against the loop in float64, over the larger of 1 and the number itself."""
    expected: list[torch.Tensor]
    if case.is_padded:
        padded = Padded.of(case.sequences, dtype=torch.float64, device="cpu")
        lengths = torch.from_numpy(np.diff(case.sequences.offsets))
        inside = torch.arange(int(lengths.max())) < lengths[:, None]
        expected = [result[inside] for result in loops.padded_loop(padded)]
    else:
        expected = list(loops.token_loop(case.sequences, dtype=torch.float64, device="cpu"))
    valid = case.sequences.mask
    pairs = zip(found, expected, strict=True)
    return max(distance(own[valid], other.numpy()[valid]) for own, other in pairs)


def _interleaved(functions: Sequence[Callable[[], object]], runs: int, case: Case) -> list[float]:
    """Median milliseconds of each, taking turns of three; a loop over tokens runs once."""
    seconds: list[list[float]] = [[] for _ in functions]
    for run in range(runs):
        for number, function in enumerate(functions):
            is_once = number == 0 and not case.is_padded
            if is_once and run > 0:
                continue
            # The threads of torch's loop go on spinning for a while, on the cores of the next.
            time.sleep(_REST_SECONDS)
            for _ in range(1 if is_once else _RUNS_PER_TURN):
                started = time.perf_counter()
                function()
                seconds[number].append(time.perf_counter() - started)
    return [statistics.median(own) * 1e3 for own in seconds]


def _own(device: str) -> str:
    """A torch device as the token stages call it."""
    return f"torch:{device}"


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def _machine(threads: int) -> str:
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {threads} threads, "
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}, "
        f"torch {torch.__version__} on {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    sys.exit(main())
