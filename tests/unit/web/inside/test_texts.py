"""What tokens read: exactly what was said, token by token, by tokenizers of either kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experience_buffer_server.settings.server import ConfigurationError
from experience_buffer_server.web.inside.texts import Texts

SAID = "The answer is 42, naïve 🙂 日本 <b>.\n  two spaces"


def bytes_level(folder: Path) -> Path:
    """As of most models today: any text, byte by byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["the answer is the answer"] * 10, trainer)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return bytes_level(tmp_path)


def test_texts_joined_are_what_was_said(path: Path) -> None:
    ids = Tokenizer.from_file(str(path)).encode(SAID).ids
    texts = Texts(path).of(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == SAID
    assert "🙂" in texts  # At the last of its four tokens.
    assert Texts(path).of([0]) == ["<|end|>"]


def test_ids_that_there_are_not_read_nothing(path: Path) -> None:
    assert Texts(path).of([-1, 10**9]) == ["", ""]
    assert Texts(path).of([]) == []


def test_the_space_before_a_word_is_kept(tmp_path: Path) -> None:
    """Where the decoder drops it from the first word, as those of Llama 2 do."""
    vocabulary = {"<unk>": 0, "▁a": 1, "▁the": 2, "▁answer": 3, "s": 4}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert Texts(tmp_path / "tokenizer.json").of([2, 3, 4]) == [" the", " answer", "s"]


def test_bytes_that_are_no_text_don_t_swallow_what_follows(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    lead = tokenizer.encode("🙂").ids[0]
    texts = Texts(path).of([lead] * 30 + tokenizer.encode("answer").ids)
    assert "".join(texts).endswith("answer")


@pytest.mark.parametrize("content", [None, b"{}", b"\xff", b"not json", b"[1]"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"server\.tokenizer: .*tokenizer\.json"):
        Texts(path)
