"""A server whose store is in memory: it does all that others do, and says that nothing survives it."""

from __future__ import annotations

import pytest

from experience_buffer import AdvantageConfig, BufferConfig, Client, ConsumerConfig, errors
from tests.integration.server import MakeServer
from tests.unit.builders import experience


def test_it_computes_and_delivers_and_keeps_nothing(make_server: MakeServer) -> None:
    server = make_server(toml="[store]\nmemory = true\n")
    config = BufferConfig(
        name="math",
        group_size=2,
        advantage=AdvantageConfig(estimator="grpo"),
        consumers=(ConsumerConfig(name="trainer", unit="group"),),
    )
    with Client(server.address) as client:
        client.create_buffer(config)
        members = [experience(7, run) for run in range(2)]
        assert client.push(members, buffer="math").num_stored == 2
        batch = client.sample(1, buffer="math", timeout=30.0)
        advantages = [member.advantages for member in batch.experiences]
        assert [bool((each != 0).all()) for each in advantages if each is not None] == [True] * 2
        batch.ack()
        assert client.push(members, buffer="math").num_duplicates == 2
        with pytest.raises(errors.UnsupportedError, match="serve without --memory"):
            client.snapshot()
    assert any("NOTHING SURVIVES" in line and '"WARNING"' in line for line in server.log)
    assert not server.data.exists()
    assert server.stop() == 0
    server.start()
    with Client(server.address) as client:
        assert "math" not in [info.config.name for info in client.list_buffers()]
