from __future__ import annotations

import pytest

from experience_buffer_server.store.lmdb.loading import Magnitudes


def test_it_is_a_mapping_of_what_was_appended() -> None:
    magnitudes = Magnitudes()
    assert 1 not in magnitudes
    expected = {3: 0.7, 11: 0.0, 2**63 + 5: 1e300}
    for seq, value in expected.items():
        magnitudes.append(seq, value)
    assert magnitudes == expected
    assert len(magnitudes) == 3
    assert [seq in magnitudes for seq in (2, 3, 4, 11, 12, 2**63 + 6)] == [
        *(False, True, False, True, False, False)
    ]
    assert magnitudes.get(11) == 0.0
    assert magnitudes.get(12) is None
    with pytest.raises(KeyError):
        magnitudes[2**64 - 1]
    for seq in (2**63 + 5, 11):
        with pytest.raises(AssertionError, match=f"seq {seq} comes after {2**63 + 5}"):
            magnitudes.append(seq, 0.1)


def test_equal_ones_are_one_object() -> None:
    magnitudes = Magnitudes()
    for seq in (1, 2, 3):
        magnitudes.append(seq, 0.5 + (seq == 2))
    assert magnitudes[1] is magnitudes[3]
    assert magnitudes[2] == 1.5
