"""The text of the larger benchmarks: the source code of Python's standard library, which every installation has.

It has 12 million characters, 27 times as many as the text of the demo. A model of a million parameters learns that one
by heart, and then its held-out loss says little about how well peers train.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from scripts.demo_gpt.text import Text, tokens_of, vocabulary_of

_LEFT_OUT = {"site-packages", "test", "tests", "__pycache__"}
_HELD_OUT_EVERY = 10


@cache
def load_sources() -> Text:
    """Return the code; of each ten files, the tenth is held out."""
    root = Path(os.__file__).parent
    files = sorted(path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    vocabulary = vocabulary_of("".join(texts))
    held_out = texts[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    del texts[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train, rest = (tokens_of("\n".join(parts), vocabulary) for parts in (texts, held_out))
    return Text(train=train, held_out=rest, vocabulary=vocabulary)
