"""How long a stream that breaks is opened again."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import Client, ClientOptions, RetryOptions, UnavailableError
from experience_buffer._sync.reconnecting import Reconnecting


class Call(list[int]):
    """A stream with these messages."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_each_message_gives_a_stream_all_its_attempts_again() -> None:
    options = ClientOptions(retry=RetryOptions(max_attempts=2))
    client: Any = Client("127.0.0.1:1", options=options)
    stream = Reconnecting(client, "SampleStream", "sample stream")
    heard: list[int] = []
    for _ in range(5):
        call = Call([3, 5])
        error = stream.hear(call, heard.append)
        assert (str(error), call.is_cancelled) == ("the server ended the sample stream", True)
        assert stream.delay_after(error) > 0
    assert heard == [3, 5] * 5
    silent = stream.hear(Call(), heard.append)
    with pytest.raises(UnavailableError) as caught:
        stream.delay_after(silent)
    assert caught.value is silent
