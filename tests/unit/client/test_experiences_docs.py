"""What docs/experiences.md shows happens."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experience_buffer import Experience, InvalidRequestError

PAGE = (Path(__file__).parents[3] / "docs" / "experiences.md").read_text("utf-8")


def shown_below(heading: str) -> list[Any]:
    """What the expressions make that a section shows, in order; nothing but they and imports."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    values = []
    for code in re.findall(r"^```python\n(.+?)^```", section, re.DOTALL | re.MULTILINE):
        for statement in ast.parse(code).body:
            source = ast.unparse(statement)
            if isinstance(statement, ast.Expr):
                values.append(eval(source, names))
            else:
                exec(source, names)
    return values


def test_every_example_is_tried_here() -> None:
    sections = [section for section in PAGE.split("\n## ") if "```python" in section]
    assert [section.splitlines()[0] for section in sections] == [
        "The same again",
        "Where the prompt ends",
    ]


def test_what_is_made_again_is_the_same() -> None:
    by_place, by_content = shown_below("The same again")
    again_by_place, again_by_content = shown_below("The same again")
    assert by_place.uid == again_by_place.uid
    assert by_content.eid.uid == again_by_content.eid.uid
    assert by_content.serialize() == again_by_content.serialize()


def test_each_way_says_where_the_prompt_ends() -> None:
    shown = shown_below("Where the prompt ends")
    assert [experience.prompt_length for experience in shown] == [3] * 4


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("tokens[1] is 1.7", {"tokens": [5, 1.7, 6]}),
        ("tokens has shape", {"tokens": np.zeros((1, 512), dtype=np.int64)}),
        ("routed_experts[0][1][0]", {"routed_experts": [[[1], [-1]]]}),
        ("action_mask[3]", {"action_mask": [1, 1, 0, 0.5]}),
        ("logprobs[0]", {"logprobs": [None, -0.5]}),
    ],
)
def test_what_is_refused_is_refused_in_the_words_of_the_page(
    words: str, mistake: dict[str, Any]
) -> None:
    (shown,) = (line for line in PAGE.splitlines() if line.startswith(words))
    fields: dict[str, Any] = {"tokens": [5, 6, 7, 8, 9], "prompt_length": 3} | mistake
    with pytest.raises(InvalidRequestError) as refused:
        Experience(**fields)
    assert str(refused.value).startswith(shown.removesuffix("..."))
