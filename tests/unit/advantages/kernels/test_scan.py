"""The recurrence as a scan, against a loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages.kernels.scan import (
    ScanLayout,
    powers_down,
    reverse_scan,
    segment_sums,
)
from tests.unit.advantages.devices import TORCH_DEVICES

LENGTHS = st.lists(
    st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 511, 512, 513, 4096])),
    min_size=1,
    max_size=6,
)
BASES = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


@dataclass(frozen=True)
class Joined:
    """Sequences as a scan takes them."""

    terms_N: torch.Tensor
    slots_N: torch.Tensor
    layout: ScanLayout
    lengths: list[int]


def join(terms: list[torch.Tensor], device: str) -> Joined:
    device = device.removeprefix("torch:")
    lengths = [len(term) for term in terms]
    layout = ScanLayout.of(np.array(lengths, dtype=np.int64))
    slots = [
        start + torch.arange(length)
        for start, length in zip(layout.starts.tolist(), lengths, strict=True)
    ]
    return Joined(torch.cat(terms).to(device), torch.cat(slots).to(device), layout, lengths)


def solve(terms: list[torch.Tensor], base: float, device: str) -> list[torch.Tensor]:
    """All sequences in one scan."""
    joined = join(terms, device)
    powers = torch.from_numpy(powers_down(base, max(joined.lengths))[:-1])
    solved = reverse_scan(
        joined.terms_N,
        slots_N=joined.slots_N,
        powers_K=powers.to(joined.terms_N.device),
        layout=joined.layout,
    )
    return list(torch.split_with_sizes(solved.cpu(), joined.lengths))


def draw(lengths: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize("device", TORCH_DEVICES)
@settings(max_examples=60)
@given(lengths=LENGTHS, base=BASES, seed=st.integers(0, 2**32))
def test_a_scan_agrees_with_a_loop(device: str, lengths: list[int], base: float, seed: int) -> None:
    terms = draw(lengths, seed)
    for found, own_terms in zip(solve(terms, base, device), terms, strict=True):
        later, expected = 0.0, []
        for term in reversed(own_terms.tolist()):
            later = term + base * later
            expected.append(later)
        np.testing.assert_allclose(found.numpy(), expected[::-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", TORCH_DEVICES)
@settings(max_examples=60)
@given(lengths=LENGTHS, base=BASES, seed=st.integers(0, 2**32))
def test_a_sequence_does_not_depend_on_its_neighbours(
    device: str, lengths: list[int], base: float, seed: int
) -> None:
    terms = draw(lengths, seed)
    for together, own_terms in zip(solve(terms, base, device), terms, strict=True):
        (alone,) = solve([own_terms], base, device)
        assert alone.numpy().tobytes() == together.numpy().tobytes()


@pytest.mark.parametrize("device", TORCH_DEVICES)
@settings(max_examples=60)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_sums_are_what_a_scan_has_at_the_starts(device: str, lengths: list[int], seed: int) -> None:
    terms = draw(lengths, seed)
    joined = join(terms, device)
    sums = segment_sums(
        joined.terms_N,
        slots_N=joined.slots_N,
        starts_R=torch.from_numpy(joined.layout.starts).to(joined.terms_N.device),
        layout=joined.layout,
    ).cpu()
    heads = torch.stack([found[0] for found in solve(terms, 1.0, device)])
    assert sums.numpy().tobytes() == heads.numpy().tobytes()
    exact = [math.fsum(own.tolist()) for own in terms]
    np.testing.assert_allclose(sums.numpy(), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("base", [0.0, 0.5, 1.0])
def test_what_is_not_finite_reaches_what_comes_before_it_in_its_sequence(
    device: str, base: float
) -> None:
    terms = draw([4, 8, 3], seed=1)
    expected = solve(terms, base, device)
    terms[1][5] = torch.inf
    found = solve(terms, base, device)
    reached = found[1].isinf()
    assert reached.tolist() == [base > 0.0] * 5 + [True] + [False] * 2
    for own, other in zip(found, expected, strict=True):
        assert own[own.isfinite()].tolist() == other[own.isfinite()].tolist()


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("length", [1, 8, 9])
def test_negative_zero_does_not_come_out(device: str, length: int) -> None:
    (found,) = solve([torch.full((length,), -0.0, dtype=torch.float64)], 0.0, device)
    assert not torch.signbit(found).any()


def test_slots_of_sequences_do_not_overlap_and_are_aligned() -> None:
    lengths = np.array([5, 1000, 1, 16, 17, 2, 64])
    layout = ScanLayout.of(lengths)
    sizes = np.array([8, 1024, 1, 16, 32, 2, 64])
    assert not (layout.starts % sizes).any()
    order = np.argsort(layout.starts)
    assert (np.diff(layout.starts[order]) == sizes[order][:-1]).all()
    assert layout.num_slots == sizes.sum()
    assert len(layout.prefixes) == 10
    for level, num_slots in enumerate(layout.prefixes):
        longer = sizes > 1 << level
        assert num_slots == sizes[longer].sum()
        assert (layout.starts[longer] < num_slots).all()


def test_no_sequences() -> None:
    layout = ScanLayout.of(np.zeros(0, dtype=np.int64))
    nothing = torch.zeros(0, dtype=torch.float64)
    slots = torch.zeros(0, dtype=torch.int64)
    assert reverse_scan(nothing, slots_N=slots, powers_K=nothing, layout=layout).numel() == 0
