"""New priorities for stored experiences: generations, all or none, and what they do to the order."""

from __future__ import annotations

import pytest

from experience_buffer import (
    Client,
    InvalidRequestError,
    PushRefusedError,
    Selector,
)
from experience_buffer._messages import delivery_calls
from tests.integration.buffers import create
from tests.integration.plain import experience, group, groups, uid


def test_updates_change_what_comes_next(client: Client, name: str) -> None:
    create(client, name, selector="max")
    client.push(group(0, 5), buffer=name)
    result = client.update_priorities({uid(0, 3): 7.0, uid(0, 1): 3.5, uid(0, 0): 0}, buffer=name)
    assert (result.num_updated, result.unknown_uids, result.outdated_uids) == (3, (), ())
    batch = client.sample(5, buffer=name)
    assert batch.uids[:2] == (uid(0, 3), uid(0, 1))
    assert batch.uids[-1] == uid(0, 0), "priority 0 comes last"
    summary = client.get(uid(0, 3), buffer=name).summary
    assert summary.priority == 7.0
    assert summary.generation == batch.generations[0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_one_bad_priority_keeps_no_other_out(
    client: Client, name: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_calls, "MAX_UPDATES", 2)
    create(client, name, selector="max")
    client.push(group(0, 4), buffer=name)
    priorities = {uid(0, run): bad if run == 1 else 5.0 for run in range(4)}
    with pytest.raises(
        InvalidRequestError, match=r"others are set: .*finite and at least 0"
    ) as error:
        client.update_priorities(priorities, buffer=name)
    assert uid(0, 1) in str(error.value)
    found = [client.get(uid(0, run), buffer=name).summary.priority for run in range(4)]
    assert found == [5.0, 1.0, 5.0, 5.0]


def test_a_uid_has_one_priority(client: Client, name: str) -> None:
    create(client, name, selector="max")
    client.push(group(0, 2), buffer=name)
    with pytest.raises(InvalidRequestError, match="twice"):
        client.update_priorities([(uid(0, 0), 5.0, 0), (uid(0, 0), 6.0, 0)], buffer=name)


def test_a_group_has_the_mean_of_its_members(client: Client, name: str) -> None:
    create(client, name, 2, selector="max")
    client.push(groups(3, 2), buffer=name)
    client.update_priorities({uid(0, 0): 8.0, uid(1, 0): 5.0, uid(1, 1): 5.0}, buffer=name)
    assert client.sample(3, buffer=name).groups[::2] == ("7/1", "7/0", "7/2")


def test_priorities_can_come_with_the_experience(client: Client, name: str) -> None:
    create(client, name, selector="max")
    client.push(
        [experience(0, run, info={"priority": priority}) for run, priority in enumerate((1, 6.5))],
        buffer=name,
    )
    assert client.sample(1, buffer=name).uids == (uid(0, 1),)
    with pytest.raises(PushRefusedError, match="finite number of at least 0"):
        client.push([experience(0, 5, info={"priority": "high"})], buffer=name)


def test_updated_weights_are_drawn_with(client: Client, name: str) -> None:
    drawn = Selector("prioritized", seed=2)
    create(client, name, selector=drawn, replay=True, with_replacement=True)
    client.push(group(0, 4), buffer=name)
    client.update_priorities(
        {uid(0, run): (0.0, 0.0, 3.0, 1.0)[run] for run in range(4)}, buffer=name
    )
    batch = client.sample(40, buffer=name)
    chances = dict(zip(batch.uids, batch.probabilities, strict=True))
    assert chances == {uid(0, 2): 0.75, uid(0, 3): 0.25}
