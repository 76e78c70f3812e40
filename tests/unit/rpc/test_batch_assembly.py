"""What becomes of a batch of which some can't be read."""

from __future__ import annotations

from typing import Any, cast

from experience_buffer_server.rpc.batch_assembly import Unreadable


def test_unreadable_counts_repeats() -> None:
    units = [cast(Any, object()) for _ in range(3)]
    found = Unreadable()
    assert (bool(found), found.explain("why")) == (False, "why")
    found.add(units[1], {7: "gone"})
    assert found.left_of([units[0], units[1], units[1], units[2]]) == 2
    assert found.explain("") == "1 more was set aside: damaged on the disk"
    found.add(units[2], {9: "gone"})
    assert found.explain("why") == "why; 2 more were set aside: damaged on the disk"
    assert found.reasons == {7: "gone", 9: "gone"}
