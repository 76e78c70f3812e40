"""The experiences that all benchmarks use: three sizes, groups of 8, content that can be checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experience_buffer import EID, Experience

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths of one experience."""

    name: str
    num_tokens: int
    num_response_tokens: int


SIZES = {
    "S": Size("S", 512, 384),
    "M": Size("M", 2048, 1536),
    "L": Size("L", 16384, 12288),
}
_TEXT = "The quick brown fox jumps over the lazy dog. " * 45
_INFO = {"model_version": 3, "source": "x" * 150, "temperature": 0.7, "index": 17}


def group(size: Size, writer: int, number: int) -> list[Experience]:
    """One group of experiences with uids of its own; 2 KB of text, 200 bytes of metadata each."""
    return [
        Experience(
            eid=EID(batch=writer, task=number, run=run, step=0, suffix=f"{run:06x}"),
            tokens=torch.full((size.num_tokens,), number % 32000, dtype=torch.int32),
            logprobs=torch.full((size.num_response_tokens,), -0.5),
            action_mask=torch.ones(size.num_response_tokens, dtype=torch.bool),
            prompt_length=size.num_tokens - size.num_response_tokens,
            reward=float(run % 3),
            response_text=_TEXT,
            info=dict(_INFO),
        )
        for run in range(GROUP_SIZE)
    ]


def check(experience: Experience) -> None:
    """Fail if what came back isn't what was pushed.

    Raises:
        ValueError: A tensor differs.
    """
    task = int(experience.eid.task)
    if experience.tokens is None or experience.logprobs is None:
        raise ValueError(f"experience {experience.eid.uid} came back without its tensors")
    if int(experience.tokens[0]) != task % 32000 or float(experience.logprobs[-1]) != -0.5:
        raise ValueError(f"experience {experience.eid.uid} came back with other content")
