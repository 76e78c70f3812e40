"""What tokens read, by a tokenizer of the operator's: a file of the `tokenizers` format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from experience_buffer_server.settings.server import ConfigurationError

_HALF: Final = "\ufffd"
"""What a part of a character reads."""
_MOST_PARTS: Final = 8
_ANCHORS: Final = ("a", "\u2581a", "\u0120a", "x", ".")


class Texts:
    """A tokenizer. It can be shared between threads.

    Args:
        path: Its file, such as a model's tokenizer.json. Takes up to seconds: read it in a thread.

    Raises:
        ConfigurationError: It can't be read, or the package `tokenizers` isn't there.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigurationError(
                "server.tokenizer needs the package tokenizers: pip install 'experience-buffer[tokenizer]'"
            ) from error
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"server.tokenizer: can't read {path}: {error}") from error
        try:
            self._tokenizer: Any = Tokenizer.from_str(content)
        except Exception as error:  # The package raises this class itself.
            raise ConfigurationError(
                f"server.tokenizer: {path} is no file of the tokenizers format, such as a model's "
                f"tokenizer.json: {error}"
            ) from error
        self._num_ids = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # Some decoders drop the space before what comes first: something else comes first then.
        ids = (self._tokenizer.token_to_id(name) for name in _ANCHORS)
        self._anchor = next(([each] for each in ids if each is not None), [])
        self._anchored = ""
        (self._anchored,) = self._decoded([[]])

    def of(self, ids: Sequence[int]) -> list[str]:
        """What each token reads; a character of several tokens stands at the last of them."""
        is_known = [0 <= each < self._num_ids for each in ids]
        single = self._decoded(
            [[each] if known else [] for each, known in zip(ids, is_known, strict=True)]
        )
        texts, begin = list(single), 0
        for place, text in enumerate(single):
            if _HALF not in text or not is_known[place]:
                begin = place + 1
                continue
            (whole,) = self._decoded([list(ids[begin : place + 1])])
            if _HALF not in whole:
                texts[begin : place + 1] = [*[""] * (place - begin), whole]
                begin = place + 1
            elif place - begin >= _MOST_PARTS:
                begin = place + 1
        return texts

    def _decoded(self, lists: list[list[int]]) -> list[str]:
        """What follows the anchor, for each list of ids."""
        given = [[*self._anchor, *each] for each in lists]
        texts = self._tokenizer.decode_batch(given, skip_special_tokens=False)
        return [text.removeprefix(self._anchored) for text in texts]
