"""Fragments of a model for local updates: which elements are averaged together. No I/O, no clock.

The layers of the model are dealt out like cards: with P fragments, the first one begins with the layers 0, P, 2P and so
on, as the strided pattern of Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, section 2.2). The line of
layers in this order is cut into P fragments of the same number of elements, also in the middle of a tensor: all rounds
then have vectors of one size. Names and shapes alone decide, so all peers that agree on these agree on the fragments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from p2pavg.base.messages import pack

_DOMAIN = "p2pavg/fragments/1"
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one parameter's elements, in the order of its memory."""

    position: int
    """Number of the parameter."""
    start: int
    stop: int


Fragment = tuple[Piece, ...]


def fragments_of(names: Sequence[str], shapes: Sequence[tuple[int, ...]], count: int) -> tuple[Fragment, ...]:
    """Return the fragments of some parameters; together they hold every element once.

    Args:
        names: of the parameters, which begin with their layers' names.
        shapes: of the parameters.
        count: number of fragments. With 1, its pieces are the whole parameters in their order.

    Raises:
        ValueError: there are fewer elements than fragments.
    """
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    if count == 1:
        return (tuple(Piece(position, 0, size) for position, size in enumerate(sizes)),)
    if total < count:
        raise ValueError(f"fragments must be at most the number of elements, {total}, got {count}")
    layers = _layers(names)
    order = [position for first in range(count) for layer in layers[first::count] for position in layer]
    ends = [total * number // count for number in range(1, count + 1)]
    found: list[list[Piece]] = [[] for _ in range(count)]
    at = number = 0  # in the line of all elements; of the fragment
    for position in order:
        start = 0
        while start < sizes[position]:
            taken = min(sizes[position] - start, ends[number] - at)
            found[number].append(Piece(position, start, start + taken))
            start, at = start + taken, at + taken
            number += at == ends[number]
    return tuple(tuple(pieces) for pieces in found)


def elements_in(fragment: Fragment) -> int:
    """Return the number of elements of a fragment; those of one model differ by 1 at most."""
    return sum(piece.stop - piece.start for piece in fragment)


def layout_digest(names: Sequence[str], fragments: Sequence[Fragment]) -> str:
    """Return a short text that depends on every name and piece."""
    pieces = tuple(
        tuple((piece.position, piece.start, piece.stop) for piece in fragment) for fragment in fragments
    )
    return blake3(pack(_DOMAIN, repr((tuple(names), pieces)))).hexdigest()[:16]


def _layers(names: Sequence[str]) -> list[list[int]]:
    """Return the positions of each layer's parameters, in the order in which the layers first appear."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        found.setdefault(layer_of(name), []).append(position)
    return list(found.values())


def layer_of(name: str) -> str:
    """Return the name of a parameter's layer: up to its first number, as in ``blocks.3``; else without its last part.

    >>> layer_of("transformer.h.3.attn.c_proj.weight")
    'transformer.h.3'
    >>> layer_of("transformer.wte.weight")
    'transformer.wte'
    """
    number = _NUMBER.search(name)
    if number is not None:
        return name[: number.end()]
    layer, _, last = name.rpartition(".")
    return layer or last
