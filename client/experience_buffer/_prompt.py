"""Where the prompt ends and the response begins: what is trained on depends on it, so it is never guessed.

Nothing here needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from experience_buffer._dense import convert
from experience_buffer._dense.rules import RULES
from experience_buffer._fields import info_value, num_rows
from experience_buffer.errors import InvalidRequestError

if TYPE_CHECKING:
    from experience_buffer._dense.convert import Kept, TensorLike

_PARTS: Final = "prompt= and response= token ids in place of tokens="


def tokens_and_prompt(
    *,
    tokens: TensorLike | None,
    prompt: TensorLike | None,
    response: TensorLike | None,
    prompt_length: int | None,
    action_mask: Kept | None,
    logprobs: Kept | None,
    is_dpo: bool,
) -> tuple[Kept, int]:
    """All tokens of an experience, and how many of them are the prompt's.

    Args:
        tokens: Prompt and response, shape [S]; of a dpo experience the prompt; None: in two parts.
        prompt: The prompt's tokens, shape [P].
        response: The response's tokens, shape [T].
        prompt_length: P, where it is said.
        action_mask: Shape [T], as it is kept.
        logprobs: The same, or empty where there were none.
        is_dpo: All tokens are the prompt's.

    Raises:
        InvalidRequestError: Nothing says where the prompt ends, or it is said twice or in contradiction; or
            a value is no token id, or `prompt_length` no whole number.
    """
    if prompt is not None or response is not None:
        if tokens is not None or prompt_length is not None:
            raise InvalidRequestError(
                "prompt and response say all that tokens and prompt_length do; give the one pair "
                "or the other",
                subject="tokens",
            )
        return _joined(prompt, response, is_dpo=is_dpo)
    if tokens is None:
        raise InvalidRequestError(
            "there are no tokens; give tokens with prompt_length, or prompt and response",
            subject="tokens",
        )
    kept = convert.kept(tokens, "tokens", RULES["tokens"])
    num_tokens = num_rows(kept)
    if is_dpo:
        return kept, num_tokens
    if prompt_length is not None:
        is_plain = type(prompt_length) is int
        return kept, prompt_length if is_plain else info_value(int, prompt_length, "prompt_length")
    name, known = (
        ("action_mask", action_mask) if action_mask is not None else ("logprobs", logprobs)
    )
    length = 0 if known is None or len(known.shape) != 1 else num_rows(known)
    if not length:
        raise InvalidRequestError(
            f"nothing says how many of the {num_tokens} tokens are the prompt's; give "
            f"prompt_length, or {_PARTS}, or an action_mask or logprobs with a value for each "
            "token of the response",
            subject="prompt_length",
        )
    if length >= num_tokens:
        raise InvalidRequestError(
            f"{name} has {length} values for {num_tokens} tokens, which leaves none to the prompt; "
            f"give one value for each token of the response alone, or prompt_length, or {_PARTS}",
            subject=name,
        )
    return kept, num_tokens - length


def _joined(
    prompt: TensorLike | None, response: TensorLike | None, *, is_dpo: bool
) -> tuple[Kept, int]:
    if prompt is None:
        raise InvalidRequestError(
            "response is given without prompt; give both, or tokens with prompt_length",
            subject="prompt",
        )
    if is_dpo and response is None:
        kept = convert.kept(prompt, "prompt", RULES["tokens"])
        return kept, num_rows(kept)
    if response is None:
        raise InvalidRequestError(
            "prompt is given without response; give both, or tokens with prompt_length",
            subject="response",
        )
    if is_dpo:
        raise InvalidRequestError(
            "response is given beside chosen and rejected, which are the responses",
            subject="response",
        )
    parts = _ids("prompt", prompt), _ids("response", response)
    return [each for part in parts for each in part], len(parts[0])


def _ids(name: str, part: TensorLike) -> list[int]:
    """The ids of one part, checked under its name."""
    kept = convert.kept(part, name, RULES["tokens"])
    return convert.ids(kept, name)
