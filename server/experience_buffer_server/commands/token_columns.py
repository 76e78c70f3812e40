"""The tokens of a response as columns: ids, texts, advantages, log-probabilities, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from experience_buffer import Experience
    from experience_buffer._codec.safetensors import TensorView

Texts = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A response, a value per token; what there isn't is None.

    Attributes:
        ids: Token ids.
        advantages: Advantages.
        logprobs: Log-probabilities under the policy that sampled.
        mask: Whether it trains.
    """

    ids: list[int]
    advantages: list[float] | None
    logprobs: list[float] | None
    mask: list[bool] | None

    def trained(self) -> float | None:
        """The mean of the advantages over the tokens that train; None where there are none."""
        if self.advantages is None:
            return None
        mask = self.mask or [True] * len(self.advantages)
        values = [each for each, trains in zip(self.advantages, mask, strict=False) if trains]
        return sum(values) / len(values) if values else None


def columns_of(experience: Experience) -> Columns:
    """Take the columns of a response out of an experience, without making tensors of it."""
    start = experience.prompt_length
    tokens = _numbers(experience, "tokens")
    mask = _numbers(experience, "action_mask")
    return Columns(
        ids=[int(each) for each in (tokens or [])[start:]],
        advantages=_numbers(experience, "advantages"),
        logprobs=_numbers(experience, "logprobs"),
        mask=None if mask is None else [bool(each) for each in mask],
    )


def prompt_ids(experience: Experience) -> list[int]:
    """The token ids of its prompt."""
    tokens = _numbers(experience, "tokens") or []
    return [int(each) for each in tokens[: experience.prompt_length]]


def _numbers(experience: Experience, name: str) -> list[Any] | None:
    from experience_buffer._fields import kept

    found: Any = kept(experience, name)
    return None if found is None else _flat(found)


def _flat(view: TensorView) -> list[Any]:
    import numpy as np

    from experience_buffer._dense.arrays import array_of

    if view.dtype == "BF16":  # NumPy has none: the upper half of a float32.
        halves = np.frombuffer(view.data, np.uint16).astype(np.uint32) << 16
        return list(halves.view(np.float32).tolist())
    return list(array_of(view).reshape(-1).tolist())


def tokenizer_of(path: Path | None) -> Texts | None:
    """What makes texts of ids, by a file of the `tokenizers` format; None without a file.

    Raises:
        typer.BadParameter: The package isn't installed, or the file can't be read.
    """
    if path is None:
        return None
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            "--tokenizer needs the package tokenizers: pip install 'experience-buffer[tokenizer]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # Its errors have no class of their own.
        raise typer.BadParameter(f"--tokenizer {path}: {error}") from error
    return lambda ids: _texts(tokenizer, ids)


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it."""
    found: list[str] = []
    for number, each in enumerate(ids):
        # With a neighbour: alone many decoders take a token's leading space away.
        before = [ids[number - 1]] if number else []
        whole = tokenizer.decode([*before, each], skip_special_tokens=False)
        first = tokenizer.decode(before, skip_special_tokens=False) if before else ""
        found.append(whole[len(first) :] if whole.startswith(first) else whole)
    return found
