"""The site's search finds words beside punctuation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "docs" / "site" / "mkdocs.yml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adapters (LoRA), and others", ["adapters", "LoRA", "and", "others"]),
        ('robust="centered_clip:1.0:3".', ["robust", "centered_clip", "1.0", "3"]),
        ("p2pavg.optim/AveragedOptimizer[`int8`]", ["p2pavg", "optim", "AveragedOptimizer", "int8"]),
    ],
)
def test_punctuation_separates_words(text: str, words: list[str]) -> None:
    found = re.search(r"^ +separator: '(.*)'$", SITE.read_text(), re.MULTILINE)
    assert found is not None
    assert [each for each in re.split(found[1], text) if each] == words
