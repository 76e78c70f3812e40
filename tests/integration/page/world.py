"""What a server holds while the page is looked at: training as it is, and what somebody hostile pushes."""

from __future__ import annotations

import base64
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from experience_buffer import (
    EID,
    BufferConfig,
    Client,
    ConsumerConfig,
    Experience,
    ExperienceBufferError,
    Tombstone,
)

MATH, AGENTS, HOSTILE, EMPTY = "math", "agents", "hostile", "empty"
STUCK: Final = "0/27"
"""The group that lacks a member."""
LONG: Final = 131_072
"""Tokens of the longest response."""
LONG_UID: Final = "long/1/0/0/x"

SCRIPT: Final = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
NASTY: Final = (
    f"{SCRIPT}\u202etxet desrever\u202c\x1b[31m red \x00 \u2028 javascript:window.hacked=1"
)
"""What would do harm if it were believed, and would disturb what is beside it if it were shown as it is."""
_QUESTION = "What is the sum of the first {} odd numbers? Answer in \\boxed{{}}."
_SYSTEM = "You are a careful mathematician. Use the tool when numbers get large."


def fill(client: Client) -> None:
    """Make the buffers, and let a trainer work on one of them."""
    readers = [ConsumerConfig("trainer", unit="group"), ConsumerConfig("reference", raw=True)]
    for name in (MATH, AGENTS, HOSTILE):
        config = BufferConfig(name, group_size=4, advantage="grpo", consumers=readers)
        client.create_buffer(config)
    client.create_buffer(BufferConfig(EMPTY, group_size=4, advantage="grpo"))
    _train(client)
    _leave_open(client)
    client.push([_agent(task, run) for task in range(3) for run in range(4)], buffer=AGENTS)
    client.push([_long()], buffer=AGENTS)
    client.push([_hostile(run) for run in range(4)], buffer=HOSTILE)
    client.push([], tombstones=[Tombstone(EID(NASTY[:40], "9", 0, 0, "x"), NASTY)], buffer=HOSTILE)


@contextmanager
def waiting(address: str) -> Iterator[None]:
    """A trainer that waits for more than there is, until the block ends."""
    client = Client(address)

    def wait() -> None:
        with suppress(ExperienceBufferError):
            client.sample(64, buffer=MATH, consumer="trainer", timeout=600)

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        yield
    finally:
        client.close()
        waiter.join()


def _train(client: Client) -> None:
    """Three steps of four groups each, and one batch that somebody still holds."""
    client.publish_policy_version(11, buffer=MATH)
    rollouts = [rollout(task, run) for task in range(26) for run in range(4)]
    client.push(rollouts, buffer=MATH)
    client.publish_policy_version(12, buffer=MATH)
    for step in range(1, 4):
        client.sample(4, buffer=MATH, consumer="trainer", timeout=30).ack(step)
    client.sample(3, buffer=MATH, consumer="trainer", timeout=30)


def _leave_open(client: Client) -> None:
    """Groups that lack members, one with a failed rollout; and one that was aborted."""
    client.push([rollout(27, run) for run in range(3)], buffer=MATH)
    client.push([rollout(28, 0)], buffer=MATH)
    failed = Tombstone(EID(0, 29, 2, 0, "x"), "the sandbox timed out after 300 s")
    client.push([rollout(29, run) for run in (0, 1, 3)], tombstones=[failed], buffer=MATH)
    client.push([rollout(30, 0), rollout(30, 1)], buffer=MATH)
    client.drop_group("0/30", buffer=MATH, reason="its environment was shut down")


def rollout(task: int, run: int) -> Experience:
    """One of four answers to a question."""
    number = 10 + task
    right = (task * 7 + run * 3) % 5 < 2
    words = (
        f"The first odd numbers are 1, 3, 5. Their sum is n squared: {number} * {number}. ".split()
    )
    response = [1000 + (task * 31 + run * 17 + index) % 500 for index in range(60 + 10 * run)]
    answer = number * number + (0 if right else run + 1)
    return Experience(
        eid=EID(0, task, run, 0, "x"),
        prompt=list(range(100, 130)),
        response=response,
        logprobs=[-0.05 - abs(math.sin(index * 0.7)) * 3 for index in range(len(response))],
        reward=1.0 if right else 0.0,
        prompt_text=_QUESTION.format(number),
        response_text=" ".join(words * (1 + run)) + f" \\boxed{{{answer}}}",
        info={
            "model_version": 10 + task % 3,
            "env": "odd-numbers",
            "difficulty": {"level": task % 4},
        },
        metrics={"time/generate": 1.5 + run, "reward/format": 1.0},
    )


def _agent(task: int, run: int) -> Experience:
    """A conversation with a tool and an image; what the tool said isn't trained on."""
    size = 96 + 8 * run
    mask = [not 40 <= index < 60 for index in range(size)]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(40, 24)}"}}
    code = f'{{"code": "print(sum(2 * k - 1 for k in range(1, {task + 13})))"}}'
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": code}}
    question = {"type": "text", "text": _QUESTION.format(task + 12)}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": [question, image]},
        {"role": "assistant", "content": "I compute it with the tool.", "tool_calls": [call]},
        {"role": "tool", "name": "python", "tool_call_id": "c1", "content": str((task + 12) ** 2)},
        {"role": "assistant", "content": f"So it is \\boxed{{{(task + 12) ** 2 + run}}}."},
    ]
    return Experience(
        eid=EID("agents", task, run, 0, "x"),
        tokens=list(range(200, 240 + size)),
        prompt_length=40,
        action_mask=mask,
        logprobs=[-0.02 * (index % 37) for index in range(size)],
        reward=[1.0, -0.5, 0.25, 0.0][run],
        messages=messages,
        tools=[{"type": "function", "function": {"name": "python", "parameters": {}}}],
        info={"model_version": 11},
        truncate_status="response_truncated" if run == 3 else None,
    )


def _long() -> Experience:
    wave = [math.sin(index / 400) for index in range(LONG)]
    return Experience(
        eid=EID("long", 1, 0, 0, "x"),
        prompt=[1, 2, 3],
        response=[index % 50_000 for index in range(LONG)],
        logprobs=[-0.5 + 0.4 * value for value in wave],
        advantages=wave,
        reward=1.0,
        response_text="It goes on and on. " * 4000,
    )


def _hostile(run: int) -> Experience:
    return Experience(
        eid=EID(NASTY[:60], f"../{NASTY[:30]}#?&%2F", run, 0, "'\"><b>"),
        prompt=[1],
        response=[1, 2, 3],
        logprobs=[-1.0, -2.0, -3.0],
        reward=[1e300, -1e300, 0.1, 1e-300][run] / 1e290,
        prompt_text=NASTY,
        response_text=NASTY + "\u202e" + "x" * 200_000,
        messages=[
            {"role": NASTY[:20], "content": NASTY, "name": NASTY},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}} for url in _URLS],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": SCRIPT, "arguments": NASTY}}],
            },
            {"role": "assistant", "content": {"__proto__": {"hacked": 1}, "html": SCRIPT}},
        ],
        info={
            "__proto__": {"polluted": True},
            "constructor": {"prototype": {"polluted": True}},
            SCRIPT: SCRIPT,
            "deep": _deep(30),
            "wide": {f"k{index}": index for index in range(500)},
            "long": "y" * 100_000,
        },
        metrics={SCRIPT: 1.0},
    )


_URLS = (
    "https://elsewhere.example/spy.png",
    "//elsewhere.example/spy.png",
    "javascript:window.hacked=1",
    "data:text/html;base64," + base64.b64encode(SCRIPT.encode()).decode(),
    "data:image/svg+xml;base64," + base64.b64encode(b"<svg onload='window.hacked=1'/>").decode(),
    "data:image/png;base64,!!!!",
)


def _deep(levels: int) -> dict[str, Any]:
    return {"in": _deep(levels - 1)} if levels else {"end": SCRIPT}


def _png(width: int, height: int) -> str:
    """A small picture: a slope of colours."""
    rows = b"".join(
        b"\0" + bytes(part for x in range(width) for part in (80 + 4 * x, 120 + 4 * y, 200))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()
