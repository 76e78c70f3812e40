"""Where the prompt ends and the response begins: what is trained on depends on it, so it is never guessed.

Nothing here needs torch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from experience_buffer._fields import TensorLike

_PARTS: Final = "prompt= and response= token ids in place of tokens="


def tokens_and_prompt(
    *,
    tokens: TensorLike | None,
    prompt: TensorLike | None,
    response: TensorLike | None,
    prompt_length: int | None,
    action_mask: TensorLike | None,
    logprobs: TensorLike | None,
    is_dpo: bool,
) -> tuple[TensorLike, int]:
    """All tokens of an experience, and how many of them are the prompt's.

    Args:
        tokens: Prompt and response, shape [S]; of a dpo experience the prompt; None: in two parts.
        prompt: The prompt's tokens, shape [P].
        response: The response's tokens, shape [T].
        prompt_length: P, where it is said.
        action_mask: Shape [T].
        logprobs: Shape [T], or empty where they weren't kept.
        is_dpo: All tokens are the prompt's.

    Raises:
        ValueError: Nothing says where the prompt ends, or it is said twice or in contradiction.
        TypeError: `prompt_length` is no whole number.
    """
    if prompt is not None or response is not None:
        if tokens is not None or prompt_length is not None:
            raise ValueError(
                "prompt and response say all that tokens and prompt_length do; give the one pair "
                "or the other"
            )
        return _joined(prompt, response, is_dpo=is_dpo)
    if tokens is None:
        raise ValueError(
            "there are no tokens; give tokens with prompt_length, or prompt and response"
        )
    if is_dpo:
        return tokens, len(tokens)
    if prompt_length is not None:
        return tokens, _whole(prompt_length)
    name, known = (
        ("action_mask", action_mask) if action_mask is not None else ("logprobs", logprobs)
    )
    length = 0 if known is None or getattr(known, "ndim", 1) != 1 else len(known)
    if not length:
        raise ValueError(
            f"nothing says how many of the {len(tokens)} tokens are the prompt's; give "
            f"prompt_length, or {_PARTS}, or an action_mask or logprobs with a value for each "
            "token of the response"
        )
    if length >= len(tokens):
        raise ValueError(
            f"{name} has {length} values for {len(tokens)} tokens, which leaves none to the prompt; "
            f"give one value for each token of the response alone, or prompt_length, or {_PARTS}"
        )
    return tokens, len(tokens) - length


def _joined(
    prompt: TensorLike | None, response: TensorLike | None, *, is_dpo: bool
) -> tuple[TensorLike, int]:
    if prompt is None:
        raise ValueError(
            "response is given without prompt; give both, or tokens with prompt_length"
        )
    if is_dpo and response is None:
        return prompt, len(prompt)
    if response is None:
        raise ValueError(
            "prompt is given without response; give both, or tokens with prompt_length"
        )
    if is_dpo:
        raise ValueError("response is given beside chosen and rejected, which are the responses")
    prompt_ids, response_ids = _ids("prompt", prompt), _ids("response", response)
    return [*prompt_ids, *response_ids], len(prompt_ids)


def _ids(name: str, part: TensorLike) -> list[Any]:
    ids = part.tolist() if hasattr(part, "tolist") else part
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{name} is {part!r:.80}; give the list, array or tensor of its token ids")
    if ids and isinstance(ids[0], list | tuple):
        raise ValueError(f"{name} has several dimensions; give the token ids of one {name}")
    return list(ids)


def _whole(prompt_length: Any) -> int:
    try:
        if isinstance(prompt_length, bool):
            raise TypeError
        return operator.index(prompt_length)
    except TypeError:
        raise TypeError(f"prompt_length is {prompt_length!r:.80}; give a whole number") from None
