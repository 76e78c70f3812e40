"""Where the prompt ends: said in one of four ways, and never guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import InvalidRequestError, trxp
from experience_buffer.experience import Experience

TOKENS = [11, 13, 17, 19, 23]


@pytest.mark.parametrize(
    "said",
    [
        {"tokens": TOKENS, "prompt_length": 3},
        {"tokens": TOKENS, "prompt_length": np.int64(3)},
        {"tokens": TOKENS, "prompt_length": torch.tensor(3)},
        {"tokens": TOKENS, "action_mask": [1, 0]},
        {"tokens": torch.tensor(TOKENS), "action_mask": np.array([True, False])},
        {"tokens": TOKENS, "logprobs": [-0.5, -0.25]},
        {"tokens": np.array(TOKENS), "logprobs": torch.tensor([-0.5, -0.25])},
        {"prompt": TOKENS[:3], "response": TOKENS[3:]},
        {"prompt": tuple(TOKENS[:3]), "response": np.array(TOKENS[3:])},
        {"prompt": torch.tensor(TOKENS[:3]), "response": torch.tensor(TOKENS[3:])},
        {"prompt": TOKENS[:3], "response": TOKENS[3:], "action_mask": [0, 1]},
    ],
)
def test_the_prompt_ends_where_it_is_said(said: dict[str, Any]) -> None:
    experience = Experience(**said)
    assert (experience.prompt_length, experience.tokens.tolist()) == (3, TOKENS)
    assert experience.action_mask is not None
    assert len(experience.action_mask) == 2
    (item,) = trxp.read(experience.serialize())
    assert isinstance(item, trxp.Item)
    assert item.meta["prompt_length"] == 3


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tokens": TOKENS}, "nothing says how many of the 5 tokens are the prompt's; give"),
        ({"tokens": TOKENS, "logprobs": []}, "nothing says how many of the 5 tokens"),
        ({"tokens": TOKENS, "logprobs": torch.zeros(1, 2)}, "nothing says how many"),
        ({"tokens": TOKENS, "logprobs": [0.0] * 5}, "logprobs has 5 values for 5 tokens"),
        ({"tokens": TOKENS, "action_mask": [1] * 6}, "action_mask has 6 values for 5 tokens"),
        ({"reward": 1.0}, "no tokens; give tokens with prompt_length, or prompt and response"),
        ({"prompt": TOKENS}, "prompt is given without response"),
        ({"response": TOKENS}, "response is given without prompt"),
        ({"prompt": TOKENS, "response": []}, "there is no response"),
        ({"prompt": [], "response": TOKENS}, "prompt_length is 0"),
        ({"prompt": [TOKENS], "response": TOKENS}, r"prompt has shape \[1, 5\]"),
        (
            {"prompt": TOKENS, "response": torch.zeros(1, 2)},
            r"response has shape \[1, 2\]",
        ),
        ({"prompt": TOKENS, "response": torch.tensor(3)}, r"response has shape \[\]"),
        ({"prompt": "What is 2 + 2?", "response": TOKENS}, "prompt is 'What is 2"),
        (
            {"prompt": TOKENS, "response": TOKENS, "tokens": TOKENS},
            "give the one pair or the other",
        ),
        ({"prompt": TOKENS, "response": TOKENS, "prompt_length": 5}, "give the one pair or"),
        ({"prompt": [1], "response": [2], "chosen": [2], "rejected": [3]}, "beside chosen and"),
    ],
)
def test_it_is_never_guessed(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experience(**said)


@pytest.mark.parametrize("length", ["3", 3.0, True, [3]])
def test_prompt_length_is_a_whole_number(length: Any) -> None:
    with pytest.raises(InvalidRequestError, match="; give a whole number"):
        Experience(tokens=TOKENS, prompt_length=length)


def test_of_a_pair_of_responses_all_tokens_are_the_prompts() -> None:
    for said in ({"tokens": TOKENS}, {"prompt": TOKENS}, {"tokens": TOKENS, "prompt_length": 1}):
        pair = Experience(**said, chosen=[1], rejected=[2])
        assert (pair.prompt_length, pair.tokens.tolist()) == (5, TOKENS)


def test_a_payload_that_does_not_say_it_is_read_as_trinity_reads_it() -> None:
    (item,) = trxp.read(Experience(tokens=TOKENS, prompt_length=1).serialize())
    assert isinstance(item, trxp.Item)
    del item.meta["prompt_length"]
    (read,) = trxp.decode(bytes(item.encode()))
    assert read.prompt_length == 1
