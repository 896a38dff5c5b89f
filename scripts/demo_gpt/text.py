"""The text that the demo learns: Python's reference topics, which every installation has."""

from collections import Counter
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

HELD_OUT_SHARE = 0.1
RARE = "\N{REPLACEMENT CHARACTER}"  # replaces every character that occurs fewer than MIN_COUNT times
MIN_COUNT = 10


@dataclass(frozen=True, kw_only=True)
class Text:
    """The characters as int64 numbers; `held_out` is the tail of the text and never trained on."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocabulary: tuple[str, ...]


def vocabulary_of(text: str) -> tuple[str, ...]:
    counts = Counter(text)
    return (RARE, *sorted(c for c, n in counts.items() if n >= MIN_COUNT and c != RARE))


def tokens_of(text: str, vocabulary: tuple[str, ...]) -> torch.Tensor:
    """Return the characters' numbers, int64 (characters,). 0 is that of all rare ones."""
    numbers = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([numbers.get(character, 0) for character in text])


def load_text() -> Text:
    text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = vocabulary_of(text)
    tokens = tokens_of(text, vocabulary)
    cut = int(len(tokens) * (1 - HELD_OUT_SHARE))
    return Text(train=tokens[:cut], held_out=tokens[cut:], vocabulary=vocabulary)
