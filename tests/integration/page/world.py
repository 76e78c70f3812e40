"""What a server holds while the page is looked at: training as it is, and what somebody hostile pushes."""

from __future__ import annotations

import base64
import functools
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

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


def settings(folder: Path) -> str:
    """A server that has texts for these experiences' tokens, as TOML."""
    path = folder / "tokenizer.json"
    _tokenizer().save(str(path))
    return f'[server]\ntokenizer = "{path}"\n'


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
    """One that has learned from what is said here: words and parts of them, as models have."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [text for task in range(0, 40, 3) for run in range(4) for text in _texts(task, run)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*texts, _SYSTEM], trainer)
    return made


def _ids(text: str) -> list[int]:
    return list(_tokenizer().encode(text).ids)


def fill(client: Client) -> None:
    """Make the buffers, and let a trainer work on one of them."""
    readers = [ConsumerConfig("trainer", unit="group"), ConsumerConfig("reference", raw=True)]
    for name in (MATH, AGENTS, HOSTILE):
        config = BufferConfig(name, group_size=4, advantage="grpo", consumers=readers, archive={})
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
    client.sample(104, buffer=MATH, consumer="reference", timeout=30).ack()
    for step in range(1, 4):
        client.sample(4, buffer=MATH, consumer="trainer", timeout=30).ack(step)
    # What the first step has consumed can't be rewound any more, and leaves.
    client.declare_safe(1, buffer=MATH, consumer="trainer")
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
    question, answer = _texts(task, run)
    response = _ids(answer)
    return Experience(
        eid=EID(0, task, run, 0, "x"),
        prompt=_ids(question),
        response=response,
        logprobs=[
            -0.02 - abs(math.sin(index * 0.7 + run)) ** 6 * 3 for index in range(len(response))
        ],
        reward=1.0 if _is_right(task, run) else 0.0,
        prompt_text=question,
        response_text=answer,
        info={
            "model_version": 10 + task % 3,
            "env": "odd-numbers",
            "difficulty": {"level": task % 4},
        },
        metrics={"time/generate": 1.5 + run, "reward/format": 1.0},
    )


def _is_right(task: int, run: int) -> bool:
    return (task * 7 + run * 3) % 5 < 2


def _texts(task: int, run: int) -> tuple[str, str]:
    """A question and one of the answers to it."""
    number = 10 + task
    ways = (
        f"The odd numbers are 1, 3, 5, ..., and the last of {number} is 2 * {number} - 1 = {2 * number - 1}.\n"
        f"Pairs from both ends add up to {2 * number}, and there are {number} / 2 of them.",
        f"A square of side n holds 1 + 3 + 5 + ... up to n terms, so I need {number} squared.\n"
        "Let me check with a small case: 1 + 3 = 4 = 2 * 2. That works.",
        f"I add them one by one: 1, 4, 9, 16, 25, ...\nThese are the squares, so term {number} of the sums "
        f"is {number} * {number}.\nWait, let me check the number of terms again: {number}. Good.",
        "By induction: the sum of the first n is n * n. It holds for 1. Adding 2n + 1 gives "
        "(n + 1) * (n + 1).\nSo it holds for all n.",
    )
    result = number * number + (0 if _is_right(task, run) else run + 1)
    return _QUESTION.format(number), f"{ways[run]}\nThe answer is \\boxed{{{result}}}."


def _agent(task: int, run: int) -> Experience:
    """A conversation with a tool and an image."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(40, 24)}"}}
    code = f'{{"code": "print(sum(2 * k - 1 for k in range(1, {task + 13})))"}}'
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": code}}
    question = {"type": "text", "text": _QUESTION.format(task + 12)}
    said, shown = _ids("I compute it with the tool.\n" + code), _ids(f"\n{(task + 12) ** 2}\n")
    end = _ids(f"So it is \\boxed{{{(task + 12) ** 2 + run}}}.")
    response = [*said, *shown, *end]
    prompt = _ids(_SYSTEM + "\n" + _QUESTION.format(task + 12))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": [question, image]},
        {"role": "assistant", "content": "I compute it with the tool.", "tool_calls": [call]},
        {"role": "tool", "name": "python", "tool_call_id": "c1", "content": str((task + 12) ** 2)},
        {"role": "assistant", "content": f"So it is \\boxed{{{(task + 12) ** 2 + run}}}."},
    ]
    return Experience(
        eid=EID("agents", task, run, 0, "x"),
        tokens=[*prompt, *response],
        prompt_length=len(prompt),
        # What the tool said isn't trained on.
        action_mask=[True] * len(said) + [False] * len(shown) + [True] * len(end),
        logprobs=[-0.02 * (index % 37) for index in range(len(response))],
        reward=[1.0, -0.5, 0.25, 0.0][run],
        messages=messages,
        tools=[{"type": "function", "function": {"name": "python", "parameters": {}}}],
        info={"model_version": 11},
        truncate_status="response_truncated" if run == 3 else None,
    )


def _long() -> Experience:
    wave = [math.sin(index / 400) for index in range(LONG)]
    words = _ids(_texts(7, 2)[1] + "\n")
    return Experience(
        eid=EID("long", 1, 0, 0, "x"),
        prompt=[1, 2, 3],
        response=[words[index % len(words)] for index in range(LONG)],
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
