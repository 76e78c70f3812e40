"""One experience as people read it: identity, texts, conversation, and what tensors there are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Any

from experience_buffer._codec.item import Item
from experience_buffer._show import Shown
from experience_buffer_server.web.inside.bounded import Bounded, Cut
from experience_buffer_server.web.inside.images import ImageInfo, images_of


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorInfo(Shown):
    """A tensor of an experience.

    Attributes:
        name: Its field, such as "logprobs"; of a multi-modal input "multi_modal_inputs:NAME".
        dtype: Its code in a payload, such as "F32".
        shape: Sizes of its dimensions.
        num_bytes: Its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExperienceContent(Shown):
    """What an experience holds, without its tensors' elements; long texts are cut.

    Attributes:
        eid: Its identity: batch, task, run, step, suffix.
        reward: Its scalar reward; null where it has none.
        truncate_status: "prompt_truncated", "response_truncated", or null.
        num_tokens: Tokens of prompt and response.
        num_prompt_tokens: Those of the prompt.
        prompt_text: The prompt as text.
        response_text: The response as text.
        messages: The conversation.
        tools: Schemas of the tools that the model could call.
        chosen_messages: Of a pair, the conversation that ends with the preferred response.
        rejected_messages: Of a pair, the other one.
        info: Anything else that the worker said.
        metrics: Numbers for a monitor.
        tensors: Which tensors there are.
        images: Which images there are; the texts that hold them are cut.
        cuts: What isn't shown whole.
    """

    eid: dict[str, Any]
    reward: float | None
    truncate_status: str | None
    num_tokens: int
    num_prompt_tokens: int
    prompt_text: str | None
    response_text: str | None
    messages: Any
    tools: Any
    chosen_messages: Any
    rejected_messages: Any
    info: dict[str, Any]
    metrics: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    images: tuple[ImageInfo, ...]
    cuts: tuple[Cut, ...]


def content_of(item: Item, *, num_chars: int) -> ExperienceContent:
    """Describe an experience.

    Args:
        item: As it lies in its payload.
        num_chars: The most of any text.
    """
    bounded, meta = Bounded(num_chars), item.meta
    texts = {
        name: bounded.text(meta.get(name), name)
        for name in ("truncate_status", "response_text", "prompt_text")
    }
    plain = {
        name: bounded.plain(meta.get(name), name)
        for name in ("messages", "tools", "chosen_messages", "rejected_messages")
    }
    reward, tokens = meta.get("reward"), item.tensors.get("tokens")
    return ExperienceContent(
        **texts,
        **plain,
        eid=bounded.plain(item.eid.to_dict(), "eid"),
        reward=None if reward is None else _float(reward),
        num_tokens=0 if tokens is None else prod(tokens.shape),
        num_prompt_tokens=max(int(meta.get("prompt_length", 0)), 0),
        info=bounded.plain(meta.get("info") or {}, "info"),
        metrics=bounded.plain(meta.get("metrics") or {}, "metrics"),
        tensors=tuple(
            TensorInfo(name=name, dtype=view.dtype, shape=view.shape, num_bytes=view.data.nbytes)
            for name, view in item.tensors.items()
        ),
        images=tuple(info for info, _ in images_of(item)),
        cuts=tuple(bounded.cuts),
    )


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
