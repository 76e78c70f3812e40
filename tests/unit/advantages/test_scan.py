"""The recurrence as a scan, against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages.scan import ScanLayout, reverse_scan

from .devices import TORCH_DEVICES

LENGTHS = st.lists(
    st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 511, 512, 513, 4096])),
    min_size=1,
    max_size=6,
)


def solve(
    terms: list[torch.Tensor], factors: list[torch.Tensor], device: str
) -> list[torch.Tensor]:
    """All sequences in one scan; the last factor of each is 0."""
    device = device.removeprefix("torch:")
    lengths = np.array([len(term) for term in terms], dtype=np.int64)
    layout = ScanLayout.of(lengths)
    slots = [
        start + torch.arange(length)
        for start, length in zip(layout.starts.tolist(), lengths.tolist(), strict=True)
    ]
    solved = reverse_scan(
        torch.cat(terms).to(device),
        factors_N=torch.cat(factors).to(device),
        slots_N=layout.interleave(torch.cat(slots).to(device)),
        layout=layout,
    )
    return list(torch.split_with_sizes(solved.cpu(), lengths.tolist()))


def draw(lengths: list[int], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    factors = [torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]
    for own in factors:
        own[-1] = 0.0
    return terms, factors


@pytest.mark.parametrize("device", TORCH_DEVICES)
@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_a_scan_agrees_with_a_loop(device: str, lengths: list[int], seed: int) -> None:
    terms, factors = draw(lengths, seed)
    for found, own_terms, own_factors in zip(
        solve(terms, factors, device), terms, factors, strict=True
    ):
        later, expected = 0.0, []
        pairs = zip(own_terms.tolist(), own_factors.tolist(), strict=True)
        for term, factor in reversed(list(pairs)):
            later = term + factor * later
            expected.append(later)
        np.testing.assert_allclose(found.numpy(), expected[::-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", TORCH_DEVICES)
@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_a_sequence_does_not_depend_on_its_neighbours(
    device: str, lengths: list[int], seed: int
) -> None:
    terms, factors = draw(lengths, seed)
    for together, own_terms, own_factors in zip(
        solve(terms, factors, device), terms, factors, strict=True
    ):
        (alone,) = solve([own_terms], [own_factors], device)
        assert alone.numpy().tobytes() == together.numpy().tobytes()


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("length", [1, 8, 9])
def test_negative_zero_does_not_come_out(device: str, length: int) -> None:
    (found,) = solve(
        [torch.full((length,), -0.0, dtype=torch.float64)], [torch.zeros(length).double()], device
    )
    assert not torch.signbit(found).any()


def test_slots_of_sequences_do_not_overlap_and_are_aligned() -> None:
    lengths = np.array([5, 1000, 1, 16, 17, 2, 64])
    layout = ScanLayout.of(lengths)
    sizes = np.array([8, 1024, 1, 16, 32, 2, 64])
    assert not (layout.starts % sizes).any()
    order = np.argsort(layout.starts)
    assert (np.diff(layout.starts[order]) == sizes[order][:-1]).all()
    assert layout.num_slots % 1024 == 0
    assert layout.num_slots >= sizes.sum()


def test_no_sequences() -> None:
    layout = ScanLayout.of(np.zeros(0, dtype=np.int64))
    nothing = torch.zeros(0, dtype=torch.float64)
    slots = layout.interleave(torch.zeros(0, dtype=torch.int64))
    assert reverse_scan(nothing, factors_N=nothing, slots_N=slots, layout=layout).numel() == 0
